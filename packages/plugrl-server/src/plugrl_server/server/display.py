"""What a person sees: a table that is redrawn on a terminal, plain lines elsewhere.

Knows nothing about training: numbers come in, text goes out.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Display", "format_metrics_table"]

_log = logging.getLogger(__name__)

_LEFT: Final = ("rollout", "episode", "train", "losses")
_RIGHT: Final = ("models", "server", "learn", "progress")
_PLAIN: Final = (
    "rollout/reward",
    "rollout/success",
    "episode/reward",
    "losses/policy_loss",
    "losses/q_loss",
)
_PLAIN_INTERVAL_S = 3.0


def format_metrics_table(metrics: Mapping[str, float]) -> Any:
    """Lay numbers out in two columns of groups, for rich to print."""
    from rich.table import Table

    table = Table(show_header=False, box=None, padding=(0, 2))
    columns = [
        [(name, metrics[name]) for name in sorted(metrics) if name.partition("/")[0] in groups]
        for groups in (_LEFT, _RIGHT)
    ]
    for position in range(max(map(len, columns), default=0)):
        cells: list[str] = []
        for column in columns:
            pair = column[position] if position < len(column) else None
            cells += ["", ""] if pair is None else [pair[0], f"{pair[1]:.4g}"]
        table.add_row(*cells)
    return table


class Display:
    """Shows the newest numbers and how far the run is.

    Args:
        total_steps: of the run; None if it has no end.
        table: whether numbers are shown.
        progress: whether a bar is shown.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        total_steps: int | None,
        *,
        table: bool,
        progress: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps, self._table, self._clock = total_steps, table, clock
        self._shown_s = -_PLAIN_INTERVAL_S
        self._live: Any = None
        self._bar: Any = None
        if sys.stderr.isatty() and (table or progress):
            self._open(progress)

    def _open(self, progress: bool) -> None:  # noqa: FBT001  # private
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        from rlightning.utils.progress import get_console

        if progress and self._total_steps is not None:
            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._bar = Progress("steps", *columns, console=get_console())
            self._task = self._bar.add_task("steps", total=self._total_steps)
        self._live = Live("", console=get_console(), refresh_per_second=4)
        self._live.start()

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that the run is at `step`, with these numbers."""
        if self._live is None:
            self._say(step, metrics)
            return
        from rich.console import Group

        parts = [format_metrics_table(metrics)] if self._table else []
        if self._bar is not None:
            self._bar.update(self._task, completed=step)
            parts.append(self._bar)
        self._live.update(Group(*parts))

    def _say(self, step: int, metrics: Mapping[str, float]) -> None:
        now_s = self._clock()
        if not self._table or now_s - self._shown_s < _PLAIN_INTERVAL_S:
            return
        self._shown_s = now_s
        known = [f"{name} {metrics[name]:.4g}" for name in _PLAIN if name in metrics]
        total = "" if self._total_steps is None else f"/{self._total_steps}"
        _log.info("step %d%s  %s", step, total, "  ".join(known))

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._live is not None:
            self._live.stop()
            self._live = None
