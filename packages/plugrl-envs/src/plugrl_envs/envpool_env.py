"""EnvPool's native pools as a Gymnasium vector environment whose rows can be reset one by one."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from plugrl_envs.errors import MissingExtraError
from plugrl_envs.spaces import copy_batch
from plugrl_envs.sync_vector import split_reset_mask

__all__ = ["EnvPoolVectorEnv", "make_envpool"]

Array = np.ndarray[Any, Any]


def make_envpool(task: str, num_envs: int, **kwargs: Any) -> EnvPoolVectorEnv:
    """Return EnvPool's `task` with `num_envs` rows.

    Args:
        task: EnvPool's name, without ``"envpool:"``.
        num_envs: rows.
        **kwargs: EnvPool's own options.

    Raises:
        MissingExtraError: EnvPool is not installed.
    """
    try:
        import envpool  # one optional dependency, imported where it is needed
    except ModuleNotFoundError as error:
        reason = "the module 'envpool' is not installed"
        raise MissingExtraError(f"envpool:{task}", extra="envpool", reason=reason) from error

    def make(seed: int) -> Any:
        return envpool.make_gymnasium(task, num_envs=num_envs, seed=seed, **kwargs)

    return EnvPoolVectorEnv(make, num_envs)


class EnvPoolVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """A pool of environments in native threads.

    EnvPool itself resets an ended row in its next step and ignores that row's action. Here ended
    rows are reset by id at once (the mode is DISABLED), so that no step is a dummy.

    Args:
        make: makes a pool for a seed; EnvPool takes seeds at construction only.
        num_envs: rows.
    """

    def __init__(self, make: Any, num_envs: int) -> None:
        self._make = make
        self._pool: Any = None
        self._pool = make(0)
        self._observation: Any = None
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.single_observation_space = self._pool.observation_space
        self.single_action_space = self._pool.action_space
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all rows, or those in ``options["reset_mask"]``; a seed makes a new pool."""
        _, mask = split_reset_mask(options, self.num_envs)
        if seed is not None:
            self._pool.close()
            self._pool = self._make(seed)
        if mask is None or self._observation is None:
            observation, info = self._pool.reset()
            self._observation = copy_batch(observation)
            return observation, info
        # Rows come back in the order they became ready; their ids say which is which.
        part, info = self._pool.reset(np.flatnonzero(mask).astype(np.int32))
        rows = np.asarray(info["env_id"])
        merged = copy_batch(self._observation)
        _scatter(merged, part, rows)
        self._observation = merged
        return merged, {}

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step every row."""
        observation, reward, terminated, truncated, info = self._pool.step(actions)
        self._observation = observation
        return (
            observation,
            np.asarray(reward, dtype=np.float64),
            np.asarray(terminated, dtype=np.bool_),
            np.asarray(truncated, dtype=np.bool_),
            info,
        )

    def close_extras(self, **kwargs: Any) -> None:
        """Close the pool, if there is one."""
        if self._pool is not None:
            self._pool.close()


def _scatter(target: Any, part: Any, rows: Array) -> None:
    """Write the rows of `part` to positions `rows` of `target`."""
    if isinstance(target, dict):
        for key, column in target.items():
            _scatter(column, part[key], rows)
    elif isinstance(target, tuple):
        for column, other in zip(target, part, strict=True):
            _scatter(column, other, rows)
    else:
        target[rows] = part
