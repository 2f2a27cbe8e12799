"""What the client adds around any environment: checked actions, a time limit, statistics.

All work on whole batches of rows. They know nothing of servers.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from plugrl_envs import ActionBorder, EpisodeStatistics

if TYPE_CHECKING:
    VectorWrapper = gym.vector.VectorWrapper[Any, Any, Any, Any, Any]
else:  # before Gymnasium 1.4 the class took no parameters
    VectorWrapper = gym.vector.VectorWrapper

__all__ = [
    "ActionBorderWrapper",
    "TimeLimitWrapper",
    "VectorEpisodeStatsWrapper",
    "VectorWrapper",
    "reset_rows",
]

StepResult = tuple[Any, Any, Any, Any, dict[str, Any]]
VectorEnv = gym.vector.VectorEnv[Any, Any, Any]

_SUCCESS_KEYS = ("is_success", "success")


def reset_rows(options: dict[str, Any] | None) -> Any:
    """Return what a reset with these options resets: an index array, or all rows."""
    indices = (options or {}).get("reset_indices")
    return slice(None) if indices is None else np.asarray(indices, dtype=np.int64)


class ActionBorderWrapper(VectorWrapper):
    """Hands an environment only actions of its space: clipped, of its dtype, never NaN.

    Args:
        env: anything with a `single_action_space`.

    Raises:
        UnsupportedSpaceError: a space that no policy can act in.
    """

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self._border = ActionBorder(env.single_action_space, env.num_envs)
        self.single_action_space = self._border.policy_space

    def step(self, actions: Any) -> StepResult:
        """Step with converted actions; raises `InvalidActionError` where they cannot be."""
        return self.env.step(self._border.convert(actions))


class TimeLimitWrapper(VectorWrapper):
    """Truncates the episodes of rows that the caller resets.

    Args:
        env: resets rows by ``options["reset_indices"]``.
        max_episode_steps: how long an episode may be, at least 1.

    Raises:
        ValueError: the limit is below 1.
    """

    def __init__(self, env: VectorEnv, max_episode_steps: int) -> None:
        super().__init__(env)
        if max_episode_steps < 1:
            raise ValueError(f"max_episode_steps is {max_episode_steps}; expected at least 1")
        self.max_episode_steps = max_episode_steps
        self._elapsed = np.zeros(env.num_envs, np.int64)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset, and count these rows from 0."""
        self._elapsed[reset_rows(options)] = 0
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> StepResult:
        """Step; rows that reached the limit and did not terminate are truncated."""
        observation, rewards, terminated, truncated, info = self.env.step(actions)
        self._elapsed += 1
        late = self._elapsed >= self.max_episode_steps
        return observation, rewards, terminated, truncated | (late & ~terminated), info


class VectorEpisodeStatsWrapper(VectorWrapper):
    """Adds ``info["episode"]`` on steps that end episodes.

    It holds arrays of all rows, meaningful where ``mask`` is set: ``r`` (return, float64), ``l``
    (env steps, int64), ``mask`` (bool), and, where the environment tells success, ``s`` (bool) and
    ``mean_success_rate`` (over the last episodes, float64). ``info["is_step_success"]`` is bool
    ``[n]`` on every step where success is known.

    Args:
        env: anything that reports success as ``is_success`` or ``success``, if at all.
        best_reward_threshold_for_success: an episode succeeds if one of its rewards reaches this;
            for environments that do not tell success.
        window: how many episodes the mean is over.
    """

    def __init__(
        self,
        env: VectorEnv,
        *,
        best_reward_threshold_for_success: float | None = None,
        window: int = 100,
    ) -> None:
        super().__init__(env)
        self._statistics = EpisodeStatistics(env.num_envs)
        self._threshold = best_reward_threshold_for_success
        self._best = np.full(env.num_envs, -np.inf)
        self._recent: deque[bool] = deque(maxlen=window)

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset, and forget the running episodes of these rows."""
        rows = reset_rows(options)
        mask = np.zeros(self.num_envs, np.bool_)
        mask[rows] = True
        self._statistics.reset(mask)
        self._best[rows] = -np.inf
        return self.env.reset(seed=seed, options=options)

    def step(self, actions: Any) -> StepResult:
        """Step, and say what ended."""
        observation, rewards, terminated, truncated, info = self.env.step(actions)
        finished = self._statistics.update(rewards, terminated, truncated, info)
        step_success = self._step_success(rewards, info)
        if finished is None and step_success is None:
            return observation, rewards, terminated, truncated, info
        info = dict(info)
        if finished is not None:
            success = finished.success
            if self._threshold is not None:
                success = self._best[finished.rows] >= self._threshold
                self._best[finished.rows] = -np.inf
            info["episode"] = self._episode(finished.rows, finished.returns, finished.lengths,
                                            success)  # fmt: skip
            if step_success is not None and success is not None:
                step_success[finished.rows] = success  # the info may be the next episode's
        if step_success is not None:
            info["is_step_success"] = step_success
        return observation, rewards, terminated, truncated, info

    def _step_success(self, rewards: Any, info: dict[str, Any]) -> npt.NDArray[np.bool_] | None:
        if self._threshold is not None:
            np.maximum(self._best, rewards, out=self._best)
            return np.array(rewards >= self._threshold, np.bool_)
        for key in _SUCCESS_KEYS:
            if key in info and np.shape(info[key]) == (self.num_envs,):
                return np.array(info[key], np.bool_)
        return None

    def _episode(
        self,
        rows: npt.NDArray[np.int64],
        returns: npt.NDArray[np.float64],
        lengths: npt.NDArray[np.int64],
        success: npt.NDArray[np.bool_] | None,
    ) -> dict[str, npt.NDArray[Any]]:
        columns: dict[str, npt.NDArray[Any]] = {
            "r": np.zeros(self.num_envs, np.float64),
            "l": np.zeros(self.num_envs, np.int64),
            "mask": np.zeros(self.num_envs, np.bool_),
        }
        columns["r"][rows] = returns
        columns["l"][rows] = lengths
        columns["mask"][rows] = True
        if success is not None:
            self._recent.extend(success.tolist())
            columns["s"] = np.zeros(self.num_envs, np.bool_)
            columns["s"][rows] = success
            mean = sum(self._recent) / len(self._recent)
            columns["mean_success_rate"] = np.full(self.num_envs, mean)
        return columns
