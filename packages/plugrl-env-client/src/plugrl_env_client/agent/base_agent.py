"""What a rollout needs of an agent: actions for observations, and somewhere to report to."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from plugrl_env_client.envs.base_env import Observation

__all__ = ["BaseAgent"]


class BaseAgent(abc.ABC):
    """Chooses chunks of actions for rows, and is told what became of them."""

    @abc.abstractmethod
    def infer(
        self,
        obs: Observation,
        *,
        env_indices: npt.NDArray[np.int64],
        step_ids: npt.NDArray[np.int64],
    ) -> dict[str, Any]:
        """Choose actions.

        Args:
            obs: n rows.
            env_indices: ``[n]``: which rows of the environment these are.
            step_ids: ``[n]``: completed chunks in each row's episode.

        Returns:
            ``{"env_ids": [n], "action": [H, n, *A]}``: `env_indices`, and H actions for each.
        """

    @abc.abstractmethod
    def feedback(
        self,
        obs: Observation,
        rewards: npt.NDArray[Any],
        terminated: npt.NDArray[np.bool_],
        truncated: npt.NDArray[np.bool_],
        info: dict[str, Any],
        *,
        env_indices: npt.NDArray[np.int64],
        step_ids: npt.NDArray[np.int64],
        steps: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Report finished chunks.

        Args:
            obs: m rows; on a done the last observation of the episode.
            rewards: ``[m]``: summed over the chunk.
            terminated: ``[m]``.
            truncated: ``[m]``.
            info: may hold ``episode``, arrays of length m.
            env_indices: ``[m]``.
            step_ids: ``[m]``, as in `infer`.
            steps: ``[m]``: env steps that each chunk really ran; None if that is not known.
        """

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget everything about the rows; the next call is an `infer`."""

    def refuse(self, reason: str) -> None:
        """Take note that chunks of actions do not fit the environment; `close` comes next.

        Args:
            reason: names both sides.
        """

    def close(self) -> None:
        """Let go of what the agent holds."""

    def get_server_metadata(self) -> dict[str, Any]:
        """Return what is known about the policy: ``action_horizon``, ``action_dim``, ..."""
        return {}
