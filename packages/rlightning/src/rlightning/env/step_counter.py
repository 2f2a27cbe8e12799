"""Count the steps of environment workers up to a limit, and measure their throughput."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["EnvStepCounter", "ThroughputTracker"]


class EnvStepCounter:
    """Steps since the last reset, per worker.

    Args:
        env_ids: the workers.
        max_steps_list: the limit of each.

    Raises:
        ValueError: the lengths differ, or a limit is not positive.
    """

    def __init__(self, env_ids: Sequence[str], max_steps_list: Sequence[int]) -> None:
        if len(env_ids) != len(max_steps_list):
            raise ValueError(f"{len(env_ids)} workers, {len(max_steps_list)} limits; give one each")
        for env_id, limit in zip(env_ids, max_steps_list, strict=True):
            if limit < 1:
                raise ValueError(
                    f"the step limit of environment {env_id} is {limit}; expected at least 1"
                )
        self._limits = dict(zip(env_ids, max_steps_list, strict=True))
        self._steps = dict.fromkeys(env_ids, 0)

    def reset(self, env_id: str) -> None:
        """Start counting `env_id` from 0."""
        self._steps[env_id] = 0

    def reset_all(self) -> None:
        """Start counting all workers from 0."""
        self._steps = dict.fromkeys(self._steps, 0)

    def step(self, env_id: str) -> bool:
        """Count one step of `env_id`; return whether its limit is reached.

        Raises:
            ValueError: the limit was reached before.
        """
        if self.is_reached_max_steps(env_id):
            raise ValueError(
                f"environment {env_id} has taken its {self._limits[env_id]} steps; reset it first"
            )
        self._steps[env_id] += 1
        return self.is_reached_max_steps(env_id)

    def get_steps(self, env_id: str) -> int:
        """Return the steps since the last reset of `env_id`."""
        return self._steps[env_id]

    def get_max_steps(self, env_id: str) -> int:
        """Return the limit of `env_id`."""
        return self._limits[env_id]

    def is_reached_max_steps(self, env_id: str) -> bool:
        """Return whether `env_id` has taken all its steps."""
        return self._steps[env_id] >= self._limits[env_id]


class ThroughputTracker:
    """Environment steps per second, since the first step recorded."""

    def __init__(self) -> None:
        self._begin_s: float | None = None
        self._rows = 0

    def record(self, rows: int, *, begin_s: float) -> None:
        """Count `rows` steps that began at `begin_s` on the monotonic clock."""
        if self._begin_s is None:
            self._begin_s = begin_s
        self._rows += rows

    def get_stats(self) -> dict[str, float]:
        """Return ``{"env_throughput": steps per second}``, empty before the first step."""
        if self._begin_s is None:
            return {}
        return {"env_throughput": self._rows / max(time.perf_counter() - self._begin_s, 1e-9)}
