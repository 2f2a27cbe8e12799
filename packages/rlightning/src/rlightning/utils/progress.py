"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere.

Knows nothing about training: epochs and numbers come in, text goes out.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import TYPE_CHECKING, Any, Protocol, TextIO, final

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from types import TracebackType

    from rich.console import Console

__all__ = ["ProgressDisplay", "get_console"]


@functools.cache
def get_console() -> Console:
    """Return the process's terminal; the log handler uses it too, so neither breaks the other."""
    from rich.console import Console  # a tenth of a second to import, only for terminals

    return Console(stderr=True)


class _View(Protocol):
    def show(
        self, epoch: int, metrics: Mapping[str, float], new: Collection[str], *, last: bool
    ) -> None: ...
    def close(self) -> None: ...


@final
class ProgressDisplay:
    """Shows epochs and their metrics; use it as a context manager.

    On a terminal: one table that is redrawn in place, of the newest values. Without one: a line per
    epoch, at most one every `min_interval_s` seconds, the last epoch always; it has the numbers
    that are new since the line before. Never both.

    Args:
        total_epochs: how many epochs the run has.
        enabled: False shows nothing.
        stream: where plain lines go; by default standard error.
        min_interval_s: the least time between two plain lines.
        clock: monotonic seconds; tests pass their own.
    """

    def __init__(
        self,
        total_epochs: int,
        *,
        enabled: bool = True,
        stream: TextIO | None = None,
        min_interval_s: float = 3.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_epochs = total_epochs
        self._enabled = enabled
        self._stream = sys.stderr if stream is None else stream
        self._min_interval_s = min_interval_s
        self._clock = clock
        self._view: _View | None = None

    def __enter__(self) -> ProgressDisplay:
        if self._enabled and self._stream is sys.stderr and sys.stderr.isatty():
            self._view = _Table(self._total_epochs)
        elif self._enabled:
            self._view = _Lines(self._total_epochs, self._stream, self._min_interval_s, self._clock)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None

    def update(
        self,
        epoch: int,
        metrics: Mapping[str, float | None],
        *,
        new: Collection[str] | None = None,
    ) -> None:
        """Show that `epoch` (counted from one) is done.

        Args:
            epoch: which.
            metrics: the newest value of every number by name; None is one that does not exist yet,
                and is not shown.
            new: which of them are from after the last call; by default all.
        """
        if self._view is not None:
            known = {name: value for name, value in metrics.items() if value is not None}
            fresh = known if new is None else new
            self._view.show(epoch, known, fresh, last=epoch >= self._total_epochs)


@final
class _Lines:
    def __init__(
        self, total_epochs: int, stream: TextIO, min_interval_s: float, clock: Callable[[], float]
    ) -> None:
        self._total_epochs = total_epochs
        self._stream = stream
        self._min_interval_s = min_interval_s
        self._clock = clock
        self._shown_s: float | None = None
        self._new: set[str] = set()

    def show(
        self, epoch: int, metrics: Mapping[str, float], new: Collection[str], *, last: bool
    ) -> None:
        self._new.update(new)
        now_s = self._clock()
        if not last and self._shown_s is not None and now_s - self._shown_s < self._min_interval_s:
            return
        self._shown_s = now_s
        shown = {name: value for name, value in metrics.items() if name in self._new}
        self._new.clear()
        numbers = "  ".join(f"{name} {_number(value)}" for name, value in shown.items())
        self._stream.write(f"epoch {epoch}/{self._total_epochs}  {numbers}\n")
        self._stream.flush()

    def close(self) -> None:
        """Every line is complete already."""


@final
class _Table:
    def __init__(self, total_epochs: int) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

        console = get_console()
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
        )
        self._progress = Progress("epoch", *columns, console=console)
        self._task = self._progress.add_task("epoch", total=total_epochs)
        self._live = Live(self._progress, console=console, refresh_per_second=4)
        self._live.start()

    def show(
        self, epoch: int, metrics: Mapping[str, float], new: Collection[str], *, last: bool
    ) -> None:
        del new  # a cell of the table stays until its next value
        self._progress.update(self._task, completed=epoch)
        self._live.update(self._render(metrics), refresh=last)

    def _render(self, metrics: Mapping[str, float]) -> Any:
        from rich.console import Group
        from rich.table import Table

        table = Table(show_header=False, box=None, padding=(0, 2))
        for name, value in metrics.items():
            table.add_row(name, _number(value))
        return Group(table, self._progress)

    def close(self) -> None:
        self._live.stop()


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
