"""Hide parts of what an environment observes, so that acting well takes memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from plugrl_envs.errors import PlugrlEnvsError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KeepEntries", "without_velocities"]

_POSITIONS = {
    "Acrobot": (0, 1, 2, 3),
    "CartPole": (0, 2),
    "LunarLander": (0, 1, 4, 6, 7),
    "LunarLanderContinuous": (0, 1, 4, 6, 7),
    "MountainCar": (0,),
    "MountainCarContinuous": (0,),
    "Pendulum": (0, 1),
}
"""Entries of the observation that are no velocities, by the task's name without its version."""


class KeepEntries(gym.ObservationWrapper[np.ndarray, Any, np.ndarray]):
    """Observe only some entries of a vector.

    Args:
        env: observes a one-dimensional Box.
        kept: which entries, in the order in which they are observed.

    Raises:
        PlugrlEnvsError: the environment observes something else, or has no such entry.
    """

    def __init__(self, env: gym.Env[Any, Any], kept: Sequence[int]) -> None:
        super().__init__(env)
        space = env.observation_space
        if not isinstance(space, spaces.Box) or len(space.shape) != 1:
            raise PlugrlEnvsError(f"only a vector has entries to keep; {env} observes {space}")
        if not kept or max(kept) >= space.shape[0] or min(kept) < 0:
            raise PlugrlEnvsError(
                f"the entries to keep are {list(kept)}; {env} observes {space.shape[0]}, from 0"
            )
        self._kept = list(kept)
        low, high = space.low[self._kept], space.high[self._kept]
        self.observation_space = spaces.Box(low, high, dtype=space.dtype.type)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        """Return the entries that are kept."""
        return observation[self._kept]


def without_velocities(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Hide the velocities of a classic control task.

    Raises:
        PlugrlEnvsError: it is not known which entries of this environment are velocities.
    """
    name = "" if env.spec is None else env.spec.id.split("/")[-1].rpartition("-v")[0]
    if name not in _POSITIONS:
        raise PlugrlEnvsError(
            f"the velocities of {name or env} are not known; known: {', '.join(_POSITIONS)}. "
            "Write a function that wraps it in plugrl_envs.masking.KeepEntries"
        )
    return KeepEntries(env, _POSITIONS[name])
