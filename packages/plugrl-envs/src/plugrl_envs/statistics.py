"""Return, length and success of episodes, from what every step returns. Needs no wrapper."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

__all__ = ["EpisodeStatistics", "FinishedEpisodes"]

Array = np.ndarray[Any, Any]

_SUCCESS_KEYS = ("is_success", "success")


class FinishedEpisodes(NamedTuple):
    """The episodes that ended in one step, K of them."""

    rows: Array
    """Which rows, int64 ``[K]``."""
    returns: Array
    """Sums of rewards, float64 ``[K]``."""
    lengths: Array
    """Numbers of steps, int64 ``[K]``."""
    success: Array | None
    """Whether each reached its goal, bool ``[K]``; None if the environment does not say."""


class EpisodeStatistics:
    """Accumulates return and length per row, and hands out those of episodes that ended.

    Success is read from ``is_success`` or ``success`` in the info of the episode's last step: in
    ``final_info`` (a dict of arrays, or an array of dicts as before Gymnasium 1.0) or beside.

    Args:
        num_envs: rows.
        require_success: refuse episodes whose info does not tell success, rather than leave it
            out of the numbers.
    """

    def __init__(self, num_envs: int, *, require_success: bool = False) -> None:
        self.num_envs = num_envs
        self._require_success = require_success
        self._returns = np.zeros(num_envs, dtype=np.float64)
        self._steps = 0
        self._starts = np.zeros(num_envs, dtype=np.int64)

    def reset(self, mask: Array | None = None) -> None:
        """Forget the running episodes of all rows, or of those in `mask` (bool ``[N]``)."""
        self._returns[... if mask is None else mask] = 0.0
        self._starts[... if mask is None else mask] = self._steps

    def update(
        self, rewards: Any, terminated: Any, truncated: Any, info: dict[str, Any]
    ) -> FinishedEpisodes | None:
        """Add one step of every row; return the episodes that it ended, or None.

        Args:
            rewards: ``[N]``.
            terminated: bool ``[N]``.
            truncated: bool ``[N]``.
            info: the info of the step.

        Raises:
            KeyError: success is required, and the info of an ended episode does not tell it.
        """
        self._returns += rewards
        self._steps += 1
        if not (np.count_nonzero(terminated) or np.count_nonzero(truncated)):
            return None
        rows = np.flatnonzero(np.logical_or(terminated, truncated))
        finished = FinishedEpisodes(
            rows, self._returns[rows], self._steps - self._starts[rows], self._success(info, rows)
        )
        self._returns[rows] = 0.0
        self._starts[rows] = self._steps
        return finished

    def _success(self, info: dict[str, Any], rows: Array) -> Array | None:
        final_info = info.get("final_info")
        for source in (final_info, info):
            found = _from_array_of_dicts(source, rows) if isinstance(source, np.ndarray) else None
            if isinstance(source, dict):
                found = _from_dict_of_arrays(source, rows)
            if found is not None:
                return found
        if self._require_success:
            have = sorted(final_info) if isinstance(final_info, dict) else sorted(info)
            raise KeyError(
                f"an episode ended and its info tells no success: expected one of {_SUCCESS_KEYS} "
                f"for rows {rows.tolist()}, found the keys {have}"
            )
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the running sums as plain data."""
        return {"returns": self._returns.copy(), "lengths": self._steps - self._starts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: the state is for another number of rows.
        """
        if len(state["returns"]) != self.num_envs:
            raise ValueError(
                f"the state is for {len(state['returns'])} rows; these statistics have "
                f"{self.num_envs}"
            )
        self._returns[:] = state["returns"]
        self._starts[:] = self._steps - np.asarray(state["lengths"])


def _from_dict_of_arrays(source: dict[str, Any], rows: Array) -> Array | None:
    for key in _SUCCESS_KEYS:
        if key not in source:
            continue
        mask = source.get("_" + key)
        if mask is not None and not np.reshape(mask, -1)[rows].all():
            continue
        return np.asarray(source[key]).reshape(-1)[rows].astype(np.bool_)
    return None


def _from_array_of_dicts(source: Array, rows: Array) -> Array | None:
    infos = [source[row] for row in rows]
    for key in _SUCCESS_KEYS:
        if all(isinstance(info, dict) and key in info for info in infos):
            return np.array([bool(info[key]) for info in infos])
    return None
