"""Where the time goes: named durations, summed per owner, on a clock that never jumps.

A `timing_raw` dictionary maps a name to ``{"count", "total", "avg"}``, seconds; whoever measures
owns one. `profiler` bundles the functions under the name users import. Nothing is logged by
default: one line per call would bury everything else.
"""

from __future__ import annotations

import functools
import inspect
import logging
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

from rlightning.utils.logger import get_logger, log_metric

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Profiler", "Timing", "profiler"]

Timing = dict[str, dict[str, float]]
F = TypeVar("F", bound="Callable[..., Any]")

_logger = get_logger("profiler")


@final
class Profiler:
    """Timers that add up in a dictionary of the caller's."""

    @contextmanager
    def timer(
        self, name: str, timing_raw: Timing, level: str | None = None, *, enable: bool = True
    ) -> Iterator[None]:
        """Time the body under `name`, also when it raises.

        Args:
            name: what is timed.
            timing_raw: where the duration is added.
            level: the log level of a line per call; None writes none.
            enable: False measures nothing.
        """
        if not enable:
            yield
            return
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self.record_timing(name, time.perf_counter() - start_s, timing_raw, level)

    def timer_wrap(
        self,
        name: str | None = None,
        level: str | None = None,
        *,
        log_to_metric: bool = False,
        enable: bool = True,
    ) -> Callable[[F], F]:
        """Return a method decorator that times into ``self.timing_raw``.

        Args:
            name: what is timed; by default the method's name.
            level: the log level of a line per call; None writes none.
            log_to_metric: also record ``Performance/time_profile/<name>``, the step being the
                number of calls.
            enable: False leaves the method as it is.
        """

        def decorate(function: F) -> F:
            if not enable:
                return function
            label = name or function.__name__

            def finish(owner: Any, start_s: float) -> None:
                duration_s = time.perf_counter() - start_s
                self.record_timing(label, duration_s, owner.timing_raw, level)
                if log_to_metric:
                    count = int(owner.timing_raw[label]["count"])
                    payload = {f"time_profile/{label}": duration_s}
                    log_metric(payload, logging.DEBUG, step=count, prefix="Performance")

            @functools.wraps(function)
            def timed(owner: Any, *args: Any, **kwargs: Any) -> Any:
                start_s = time.perf_counter()
                try:
                    return function(owner, *args, **kwargs)
                finally:
                    finish(owner, start_s)

            @functools.wraps(function)
            async def timed_async(owner: Any, *args: Any, **kwargs: Any) -> Any:
                start_s = time.perf_counter()
                try:
                    return await function(owner, *args, **kwargs)
                finally:
                    finish(owner, start_s)

            return cast("F", timed_async if inspect.iscoroutinefunction(function) else timed)

        return decorate

    def record_timing(
        self, name: str, duration_s: float, timing_raw: Timing, level: str | None = None
    ) -> None:
        """Add one duration, in seconds, to `timing_raw`; with a `level` log it too."""
        entry = timing_raw.setdefault(name, {"count": 0, "total": 0.0, "avg": 0.0})
        entry["count"] += 1
        entry["total"] += duration_s
        entry["avg"] = entry["total"] / entry["count"]
        if level is not None:
            _logger.log(_level_number(level), "time_profile/%s: %.4fs", name, duration_s)

    def log_gpu_memory_usage(self, head: str, level: int = logging.INFO, rank: int = 0) -> None:
        """Log allocated and reserved memory of the current CUDA device; nothing without one."""
        import torch

        if torch.cuda.is_available():
            gib = 1024.0**3
            allocated = torch.cuda.memory_allocated() / gib
            reserved = torch.cuda.memory_reserved() / gib
            _logger.log(
                level,
                "%s rank %d: %.2f GiB allocated, %.2f reserved",
                head,
                rank,
                allocated,
                reserved,
            )

    def summary(self, timing_raw: Timing) -> str:
        """Return a table of `timing_raw`, the largest total first."""
        rows = sorted(timing_raw.items(), key=lambda item: -item[1]["total"])
        lines = [f"{'':24} {'calls':>8} {'total s':>10} {'mean ms':>10}"]
        lines += [
            f"{name:24} {int(entry['count']):8d} {entry['total']:10.3f} {entry['avg'] * 1e3:10.3f}"
            for name, entry in rows
        ]
        return "\n".join(lines)


def _level_number(level: str) -> int:
    number = logging.getLevelNamesMapping().get(level.upper())
    if number is None:
        known = ", ".join(name.lower() for name in ("DEBUG", "INFO", "WARNING", "ERROR"))
        raise ValueError(f"{level!r} is not a log level; use one of {known}")
    return number


profiler = Profiler()
