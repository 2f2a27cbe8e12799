"""Where a rollout's time goes, and how it keeps a real-time rate."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Pacer", "RolloutTiming"]


class RolloutTiming:
    """Seconds spent in each part of a rollout.

    Attributes:
        infer_obs_pack: picking the rows that ask, in seconds.
        infer_wait: waiting for the server's actions, encoding and sending included.
        env_step: stepping environments.
        env_reset: resetting them.
        feedback: reporting.
        record: writing to disk.
        pace: waiting for the next tick of ``--runner.fps``.
        steps: how often the environment was stepped.
        late_steps: steps that began more than a period behind ``--runner.fps``.
    """

    PARTS = ("infer_obs_pack", "infer_wait", "env_step", "env_reset", "feedback", "record", "pace")

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started_s = clock()
        self.infer_obs_pack = 0.0
        self.infer_wait = 0.0
        self.env_step = 0.0
        self.env_reset = 0.0
        self.feedback = 0.0
        self.record = 0.0
        self.pace = 0.0
        self.steps = 0
        self.late_steps = 0

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time that the block takes to a part."""
        started_s = self._clock()
        try:
            yield
        finally:
            setattr(self, part, getattr(self, part) + self._clock() - started_s)

    def as_dict(self) -> dict[str, Any]:
        """Return seconds and fractions of every part, and steps per second."""
        total_s = max(self._clock() - self._started_s, 1e-9)
        seconds = {part: getattr(self, part) for part in self.PARTS}
        return {
            "total_s": total_s,
            **{f"{part}_s": value for part, value in seconds.items()},
            **{f"{part}_fraction": value / total_s for part, value in seconds.items()},
            "steps": self.steps,
            "late_steps": self.late_steps,
            "effective_fps": self.steps / total_s,
        }

    def describe(self) -> str:
        """Return one line for the log: the rate, then the parts, largest first."""
        found = self.as_dict()
        parts = sorted(self.PARTS, key=lambda part: -found[f"{part}_s"])
        shares = [f"{part} {found[f'{part}_fraction']:.0%}" for part in parts if found[f"{part}_s"]]
        return f"{found['effective_fps']:.1f} steps/s ({', '.join(shares)})"


class Pacer:
    """Keeps steps at a steady rate.

    A step that comes more than one period late starts a new schedule: lost time is not caught up
    by a burst, which a robot could not follow.

    Args:
        fps: steps per second; None never waits.
        clock: and `sleep`: in seconds.
    """

    def __init__(
        self,
        fps: float | None,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._period_s = None if fps is None else 1.0 / fps
        self._clock = clock
        self._sleep = sleep
        self._due_s: float | None = None

    def wait(self) -> bool:
        """Wait for the next tick; tell whether it was on time."""
        if self._period_s is None:
            return True
        now_s = self._clock()
        if self._due_s is None:
            self._due_s = now_s
        behind_s = now_s - self._due_s
        on_time = behind_s <= self._period_s
        if behind_s < 0:
            self._sleep(-behind_s)
        elif not on_time:
            self._due_s = now_s
        self._due_s += self._period_s
        return on_time
