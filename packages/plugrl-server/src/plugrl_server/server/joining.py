"""Frames of several messages as one batch, so that storing them costs a few numpy operations.

Knows nothing about clients, sockets or threads.
"""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import numpy as np

from plugrl_server.algorithm.base_algorithm import FrameBatch
from plugrl_server.common.trees import concatenate, num_rows, take
from plugrl_server.errors import PolicyContractError
from rlightning.utils.bounds import are_usable

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["JoinedSampled", "join_frames", "usable_frames"]

Array = np.ndarray[Any, Any]

_MOST_UNUSED = 2
"""Inferences may have so many times the rows that are meant, to be joined as wholes."""
_COLUMNS = (
    "chains",
    "was_terminated",
    "was_truncated",
    "rewards",
    "steps",
    "terminated",
    "truncated",
)


@final
class JoinedSampled:
    """What several inferences saw and gave, of the rows that are meant; joined when asked for.

    Few inferences lie behind many frames: each is joined once, and rows are taken of the whole.

    Args:
        parts: frames of one layout, in order.
    """

    def __init__(self, parts: Sequence[FrameBatch]) -> None:
        self._parts = parts
        inferences = list({id(part.sampled): part.sampled for part in parts}.values())
        sizes = [num_rows(sampled.obs) for sampled in inferences]
        starts = dict(zip(map(id, inferences), np.cumsum([0, *sizes]).tolist(), strict=False))
        rows = _join_rows([_rows_from(starts[id(part.sampled)], part) for part in parts])
        # Of large inferences only what is meant is worth copying.
        is_worth_it = sum(sizes) <= _MOST_UNUSED * sum(map(len, parts))
        self._whole = (inferences, rows) if is_worth_it else None

    @cached_property
    def obs(self) -> dict[str, Any]:
        """What the policy saw."""
        obs: dict[str, Any] = self._join("obs")
        return obs

    @cached_property
    def runtime_state(self) -> Any:
        """As the policy returned it."""
        return self._join("runtime_state")

    @cached_property
    def train_state(self) -> Any:
        """As `BaseAlgorithm.derive_train_state` returned it."""
        return self._join("train_state")

    def _join(self, name: str) -> Any:
        try:
            if self._whole is None:
                return concatenate([getattr(part, name) for part in self._parts])
            inferences, rows = self._whole
            return take(concatenate([getattr(sampled, name) for sampled in inferences]), rows)
        except ValueError as error:
            raise PolicyContractError(
                f"the states beside two actions differ in names or shapes ({error}); keep what "
                "get_action_and_runtime_state returns stable"
            ) from error


def _rows_from(start: int, frames: FrameBatch) -> Any:
    """Give the rows of frames whose inference begins at `start`."""
    rows = frames.sampled_rows
    if rows is None:
        return slice(start, start + len(frames))
    if isinstance(rows, slice):
        return slice(start + rows.start, start + rows.stop)
    return rows + start


def usable_frames(frames: FrameBatch) -> Array | None:
    """Find frames that can be learned from, ``[m]``; None: all of them.

    Their rewards, and states before and after, are neither NaN nor too large: see
    ``rlightning.utils.bounds``.
    """
    usable: Array | None = None
    states = (*frames.obs["states"].values(), *frames.next_obs["states"].values())
    for array in (frames.rewards, *states):
        whole = are_usable(array)
        if not whole.all():
            rows = np.asarray(whole.reshape(len(whole), -1).all(axis=1))
            usable = rows if usable is None else usable & rows
    return usable


def join_frames(batches: Sequence[tuple[Any, FrameBatch]]) -> list[FrameBatch]:
    """Join frames in their order: storing many at once is cheap.

    Large observations stay apart, because joining copies them; so do frames with an ``info``.

    Args:
        batches: frames with the layout of their observations; other layouts are not joined.
    """
    joined: list[FrameBatch] = []
    group: list[FrameBatch] = []
    layout: Any = None
    for observed, frames in batches:
        light = is_light(frames)
        if group and not (light and observed == layout):
            joined.append(_join(group))
            group = []
        group.append(frames)
        layout = observed
        if not light:
            joined.append(group.pop())
    return [*joined, _join(group)] if group else joined


def is_light(frames: FrameBatch) -> bool:
    """Whether frames are small enough, and alike enough, to be joined."""
    return not frames.info and not frames.next_obs["images"]


def _join(group: list[FrameBatch]) -> FrameBatch:
    if len(group) == 1:
        return group[0]
    first = group[0]
    sampled: Any = first.sampled
    rows: Any = None
    if all(frames.sampled is sampled for frames in group):
        rows = _join_rows([frames.sampled_rows for frames in group])
    else:
        sampled = JoinedSampled(group)
    columns = {
        name: np.concatenate([getattr(frames, name) for frames in group]) for name in _COLUMNS
    }
    return FrameBatch(
        sampled=sampled,
        sampled_rows=rows,
        next_obs=concatenate([frames.next_obs for frames in group]),
        info={},
        **columns,
    )


def _join_rows(rows: list[Any]) -> Any:
    """Give rows of one inference one after the other; as a slice where they follow."""
    if all(isinstance(r, slice) for r in rows):
        if all(one.stop == two.start for one, two in itertools.pairwise(rows)):
            return slice(rows[0].start, rows[-1].stop)
        return np.asarray([row for r in rows for row in range(r.start, r.stop)])
    return np.concatenate([np.arange(r.start, r.stop) if isinstance(r, slice) else r for r in rows])
