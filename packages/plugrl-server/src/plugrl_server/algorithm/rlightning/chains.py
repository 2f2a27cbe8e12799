"""Chains of frames as rlightning sees environments: rows of `EnvRet`, workers of a buffer.

Columns instead of an object per chain: a message of many environments is a few numpy operations.
Knows nothing about policies, buffers and sockets.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from plugrl_server.common.trees import map_tree, take
from rlightning.policy.joining import ROW_OWNERS
from rlightning.types import EnvRet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_server.algorithm.base_algorithm import FrameBatch

__all__ = ["ChainGroup", "ChainTable", "put_rows"]

Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

_FIRST_SLOTS = 8


class ChainTable:
    """What came of the last frame of every chain.

    Args:
        shows_steps: whether an `EnvRet` says how many environment steps the last frame was.
    """

    def __init__(self, *, shows_steps: bool) -> None:
        self._shows_steps = shows_steps
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._names: list[str] = []
        self._reward = np.zeros(0, np.float32)
        self._terminated = np.zeros(0, np.bool_)
        self._truncated = np.zeros(0, np.bool_)
        self._steps = np.zeros(0, np.int64)
        self._following: Any = None

    def __len__(self) -> int:
        return len(self._slots)

    def slots_of(self, chains: Sequence[int]) -> Indices:
        """Return where chains are, ``[n]``; those not seen before have done nothing yet."""
        slots = self._slots
        for chain in chains:
            if chain not in slots:
                self._add(chain)
        return np.fromiter((slots[chain] for chain in chains), np.int64, len(chains))

    def _add(self, chain: int) -> None:
        if not self._free:
            self._make_room()
        slot = self._free.pop()
        self._slots[chain] = slot
        self._names[slot] = name_of(chain)
        self._reward[slot] = self._steps[slot] = 0
        self._terminated[slot] = self._truncated[slot] = False

    def _make_room(self) -> None:
        taken, room = len(self._names), max(_FIRST_SLOTS, len(self._names))
        for name in ("_reward", "_terminated", "_truncated", "_steps"):
            setattr(self, name, _longer(getattr(self, name), room))
        self._following = map_tree(lambda leaf: _longer(leaf, room), self._following)
        self._names += [""] * room
        self._free += reversed(range(taken, taken + room))

    def forget(self, chains: Sequence[int]) -> None:
        """Let go of chains."""
        self._free += [self._slots.pop(chain) for chain in chains if chain in self._slots]

    def note(self, slots: Indices, following: Any, batch: FrameBatch) -> None:
        """Take what came of frames.

        Args:
            slots: of their chains, ``[m]``.
            following: what was observed next, ``[m, ...]``.
            batch: the frames.
        """
        if self._following is None:
            slots_in_all = len(self._names)
            self._following = map_tree(
                lambda leaf: np.zeros((slots_in_all, *leaf.shape[1:]), leaf.dtype), following
            )
        put_rows(self._following, slots, following)
        self._reward[slots] = batch.rewards
        self._terminated[slots], self._truncated[slots] = batch.terminated, batch.truncated
        self._steps[slots] = batch.steps

    def following(self, slots: Indices) -> Any:
        """Return what was observed after the last frames, ``[n, ...]``."""
        return take(self._following, slots)

    def env_ret(self, name: str, slots: Indices, observation: Any) -> EnvRet:
        """Return what environments show now, with what came of their last actions.

        Args:
            name: of all of them together.
            slots: of their chains, ``[n]``.
            observation: what they show, ``[n, ...]``.
        """
        terminated, truncated = self._terminated[slots], self._truncated[slots]
        over = terminated | truncated
        names = self._names
        info: dict[str, Any] = {ROW_OWNERS: tuple((names[slot], 1) for slot in slots.tolist())}
        if over.any():
            final = map_tree(np.copy, observation)
            ended = np.flatnonzero(over)
            put_rows(final, ended, self.following(slots[ended]))
            info |= {"final_obs": final, "_final_obs": over}
        extra = {"last_steps": self._steps[slots]} if self._shows_steps else {}
        reward = self._reward[slots]
        return EnvRet(name, observation, reward, terminated, truncated, info, _extra=extra)


@dataclasses.dataclass(slots=True, eq=False)
class ChainGroup:
    """Chains that began with one message: the environments of a client, one worker of a buffer."""

    name: str
    chains: tuple[int, ...]
    slots: Indices
    """In the table, ``[N]``."""
    gone: set[int] = dataclasses.field(default_factory=set)
    """Those that no frame will come of any more."""
    _whole: Any = None

    def spread(self, rows: Indices, part: Any) -> Any:
        """Return N rows, of which `rows` ``[m]`` are those of `part` and the others mean nothing.

        They are overwritten by the next call.
        """
        if self._whole is None:
            self._whole = map_tree(self._zeros, part)
        put_rows(self._whole, rows, part)
        return self._whole

    def _zeros(self, leaf: Any) -> Any:
        shape = (len(self.chains), *leaf.shape[1:])
        is_array = isinstance(leaf, np.ndarray)
        return np.zeros(shape, leaf.dtype) if is_array else leaf.new_zeros(shape)


def name_of(chain: int) -> str:
    """Return what a policy knows an environment by."""
    return f"env-{chain}"


def put_rows(target: Any, rows: Indices, values: Any) -> None:
    """Write rows of a tree of arrays or tensors, in place."""
    if isinstance(target, dict):
        for key, part in target.items():
            put_rows(part, rows, values[key])
    elif target is not None:
        target[rows] = values


def _longer(leaf: Any, room: int) -> Any:
    return np.concatenate([leaf, np.zeros((room, *leaf.shape[1:]), leaf.dtype)])
