"""The chunks in flight: one row per row of the environment, as arrays.

Knows nothing of environments and servers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from plugrl_env_client.errors import ActionShapeError

__all__ = ["Plans"]


class Plans:
    """Chunks of actions, how far each has been used, and what it earned.

    Args:
        num_envs: rows.
        action_shape: of one action as the environment takes it; an action of another shape and the
            same number of entries is reshaped.

    Attributes:
        position: ``[N]``: steps taken of each chunk.
        length: ``[N]``: steps to take of each chunk; 0 where there is none.
        reward: float64 ``[N]``: summed over the chunk.
        step_id: ``[N]``: completed chunks of each episode.
    """

    def __init__(self, num_envs: int, action_shape: tuple[int, ...]) -> None:
        self._shape = action_shape
        self._every = np.arange(num_envs)
        self._actions: npt.NDArray[Any] = np.zeros((num_envs, 0, *action_shape))
        self.position = np.zeros(num_envs, np.int64)
        self.length = np.zeros(num_envs, np.int64)
        self.reward = np.zeros(num_envs, np.float64)
        self.step_id = np.zeros(num_envs, np.int64)

    def without_chunk(self) -> npt.NDArray[np.int64]:
        """Return the rows that have nothing to do."""
        return np.flatnonzero(self.length == 0)

    def load(
        self, rows: npt.NDArray[np.int64], action: npt.NDArray[Any], *, use_steps: int
    ) -> None:
        """Give rows their chunks.

        Args:
            rows: ``[n]``.
            action: ``[H, n, *A]``, as the wire has it.
            use_steps: how many of the H steps to take.

        Raises:
            ActionShapeError: an action has another number of entries than the environment takes.
        """
        if action.shape[2:] != self._shape:
            if np.prod(action.shape[2:]) != np.prod(self._shape):
                raise ActionShapeError(
                    f"the server's actions have the shape {action.shape[2:]}, the environment "
                    f"takes {self._shape}; is the policy built for another environment?"
                )
            action = action.reshape(*action.shape[:2], *self._shape)
        self._make_room(use_steps, action.dtype)
        self._actions[rows, :use_steps] = np.swapaxes(action[:use_steps], 0, 1)
        self.position[rows] = 0
        self.reward[rows] = 0.0
        self.length[rows] = use_steps

    def _make_room(self, steps: int, dtype: np.dtype[Any]) -> None:
        known = self._actions
        wider = np.result_type(known.dtype, dtype) if self.length.any() else dtype
        if steps > known.shape[1] or wider != known.dtype:
            capacity = max(steps, known.shape[1])
            self._actions = np.zeros((len(known), capacity, *self._shape), wider)
            self._actions[:, : known.shape[1]] = known

    def next_actions(self) -> npt.NDArray[Any]:
        """Return every row's action for the next step, ``[N, *A]``."""
        chosen: npt.NDArray[Any] = self._actions[self._every, self.position]
        return chosen

    def add(self, rewards: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Count one step of every row, and tell whose chunk that used up."""
        self.position += 1
        self.reward += rewards
        used_up: npt.NDArray[np.bool_] = self.position >= self.length
        return used_up

    def finish(self, rows: npt.NDArray[np.int64], done: npt.NDArray[np.bool_]) -> None:
        """Let go of reported chunks.

        Args:
            rows: whose chunk finished.
            done: ``[N]``: whose episode ended.
        """
        self.length[rows] = 0
        self.step_id[rows] += 1
        self.step_id[done] = 0

    def drop(self) -> None:
        """Let go of every chunk without reporting it; episodes go on."""
        self.length[:] = 0
