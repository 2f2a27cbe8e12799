"""One block of shared memory that holds what all rows of a vector environment return in a step."""

from __future__ import annotations

import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_envs.spaces import empty_batch

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["SharedBatch"]

_ALIGN_BYTES = 64  # a cache line, so that no two arrays share one


class SharedBatch:
    """Observations, final observations, rewards and flags of all rows, in shared memory.

    Args:
        space: the observation space of one row.
        num_envs: rows.
        name: the block to attach to; None makes a new one.

    Attributes:
        observations: batch in the layout of `space`.
        final_obs: batch in the layout of `space`; a row is meaningful when its episode ended.
        rewards: float64 ``[N]``.
        terminated: bool ``[N]``.
        truncated: bool ``[N]``.
        name: what other processes attach by.
    """

    def __init__(self, space: gym.Space[Any], num_envs: int, *, name: str | None = None) -> None:
        prototype = (
            empty_batch(space, num_envs),
            empty_batch(space, num_envs),
            np.zeros(num_envs, dtype=np.float64),
            np.zeros(num_envs, dtype=np.bool_),
            np.zeros(num_envs, dtype=np.bool_),
        )
        self._offset = 0
        size = _size_of(prototype)
        self._owner = name is None
        self._memory = _attach(name) if name else SharedMemory(create=True, size=size)
        self.name = self._memory.name
        views = self._place(prototype)
        self.observations, self.final_obs, self.rewards, self.terminated, self.truncated = views

    def _place(self, prototype: Any) -> Any:
        if isinstance(prototype, dict):
            return {key: self._place(part) for key, part in prototype.items()}
        if isinstance(prototype, tuple):
            return tuple(self._place(part) for part in prototype)
        view = np.ndarray(
            prototype.shape, prototype.dtype, buffer=self._memory.buf, offset=self._offset
        )
        self._offset += _aligned(prototype.nbytes)
        return view

    def close(self) -> None:
        """Let go of the memory; whoever made it also removes it. The views are gone after this."""
        del self.observations, self.final_obs, self.rewards, self.terminated, self.truncated
        self._memory.close()
        if self._owner:
            self._memory.unlink()


def _attach(name: str) -> SharedMemory:
    """Open a block that another process owns, without telling this process's resource tracker.

    A tracker removes what it knows of when its process ends, and this block must outlive us.
    """
    if sys.version_info >= (3, 13):
        return SharedMemory(name=name, track=False)
    register = resource_tracker.register
    resource_tracker.register = lambda *_: None  # what `track=False` does, before Python had it
    try:
        return SharedMemory(name=name)
    finally:
        resource_tracker.register = register


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _size_of(prototype: Any) -> int:
    if isinstance(prototype, dict):
        return sum(_size_of(part) for part in prototype.values())
    if isinstance(prototype, tuple):
        return sum(_size_of(part) for part in prototype)
    return _aligned(prototype.nbytes)
