"""What is remembered of one client's environments between an action and its feedback.

Columns instead of one object per environment: a feedback of a thousand environments is a few numpy
operations. Knows nothing about sockets, threads or algorithms.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_server.algorithm.base_algorithm import FrameBatch, Sampled
from plugrl_server.common.trees import concatenate, take

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plugrl_protocol.messages import Feedback

__all__ = ["ClientEnvs", "InferStep", "finite_frames", "join_frames"]

Array = np.ndarray[Any, Any]
Claim = tuple[int, Array, Array]
"""All environments of one inference: its number, their indices and slots."""

_LARGEST = float(np.finfo(np.float32).max)
_COLUMNS = (
    "chains",
    "was_terminated",
    "was_truncated",
    "rewards",
    "steps",
    "terminated",
    "truncated",
)


@dataclass(slots=True, eq=False)
class InferStep:
    """One client's part of an inference."""

    sampled: Sampled
    """Of the whole batch; this client's rows begin at `start`."""
    version: int
    """Of the policy that acted."""
    start: int
    is_whole: bool
    """Whether the batch has no rows but this client's."""
    rows_left: int
    """Rows whose feedback has not come."""


def finite_frames(frames: FrameBatch) -> Array | None:
    """Find frames whose rewards and states before and after are finite, ``[m]``; None: all of them.

    Finite as float32, which is what is learned from.
    """
    finite: Array | None = None
    states = (*frames.obs["states"].values(), *frames.next_obs["states"].values())
    for array in (frames.rewards, *states):
        whole = np.abs(array) <= _LARGEST if array.dtype.itemsize > 4 else np.isfinite(array)
        if not whole.all():
            rows = np.asarray(whole.reshape(len(whole), -1).all(axis=1))
            finite = rows if finite is None else finite & rows
    return finite


class ClientEnvs:
    """The environments of one connection.

    Args:
        chains: gives numbers that no other chain of the run has.
    """

    def __init__(self, chains: Iterator[int]) -> None:
        self._new_chain = chains
        self._slots: dict[int, int] = {}
        self._steps: dict[int, InferStep] = {}
        self._step_numbers = itertools.count()
        self._chain = np.zeros(0, np.int64)
        self._step = np.zeros(0, np.int64)
        self._row = np.zeros(0, np.int64)
        self._was_terminated = np.zeros(0, np.bool_)
        self._was_truncated = np.zeros(0, np.bool_)
        self._last: Claim | None = None

    @property
    def chains(self) -> list[int]:
        """The chains that are open."""
        chains: list[int] = self._chain[: len(self._slots)].tolist()
        return chains

    def _find(self, env_indices: Array) -> Array:
        slots = self._slots
        for index in env_indices.tolist():
            if index not in slots:
                self._add(index)
        return np.fromiter((slots[i] for i in env_indices.tolist()), np.int64, len(env_indices))

    def _add(self, index: int) -> None:
        slot = len(self._slots)
        if slot == len(self._chain):
            room = max(8, slot)
            for name in ("_chain", "_step", "_row", "_was_terminated", "_was_truncated"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros(room, column.dtype)]))
        self._slots[index] = slot
        self._chain[slot] = next(self._new_chain)

    def acted(self, env_indices: Array, step: InferStep) -> None:
        """Remember that an inference answered these environments, in this order."""
        slots = self._find(env_indices)
        number = next(self._step_numbers)
        self._steps[number] = step
        self._step[slots] = number
        self._row[slots] = np.arange(len(slots))
        self._last = (number, env_indices, slots)

    def end_chains(self, chains: Array) -> bool:
        """Begin new chains where one of `chains` was: a frame is missing. Whether one was here."""
        here = np.isin(self._chain[: len(self._slots)], chains).nonzero()[0]
        self._chain[here] = [next(self._new_chain) for _ in range(len(here))]
        return len(here) > 0

    def claim(self, report: Feedback) -> Claim | None:
        """Take note that a feedback names what the last inference answered, in its order.

        Such a feedback may be turned into frames later, after further inferences.

        Returns:
            What `report` wants to know then; None: the feedback must be turned into frames now.
        """
        last, self._last = self._last, None
        if last is not None and np.array_equal(report.env_indices, last[1]):
            return last
        return None

    def report(self, report: Feedback, claim: Claim | None) -> list[tuple[int, FrameBatch]]:
        """Turn a feedback into frames.

        Args:
            report: reports of one client come in order.
            claim: what `claim` gave for it.

        Returns:
            Per inference: the version of the policy that acted, and the frames.
        """
        if claim is not None:
            number, _, slots = claim
            step = self._steps.pop(number)
            rows = None if step.is_whole else slice(step.start, step.start + len(slots))
            parts = [(step.version, self._frames(report, slots, step, rows, None))]
        else:
            slots = self._find(report.env_indices)
            parts = self._sorted_by_step(report, slots)
        self._was_terminated[slots] = report.terminated
        self._was_truncated[slots] = report.truncated
        return parts

    def _sorted_by_step(self, report: Feedback, slots: Array) -> list[tuple[int, FrameBatch]]:
        numbers = self._step[slots]
        parts = []
        for number in dict.fromkeys(numbers.tolist()):
            at = np.flatnonzero(numbers == number)
            step = self._steps[number]
            rows = _as_slice(self._row[slots[at]] + step.start)
            parts.append((step.version, self._frames(report, slots[at], step, rows, at)))
            step.rows_left -= len(at)
            if step.rows_left == 0:
                del self._steps[number]
        return parts

    def _frames(
        self, report: Feedback, slots: Array, step: InferStep, rows: Any, at: Array | None
    ) -> FrameBatch:
        """Build the frames at some positions of a feedback; None: all of them."""
        next_obs = report.observation.to_wire()
        steps = report.steps
        if steps is None:
            steps = np.ones(len(report.env_indices), np.int64)
        columns = (report.rewards, steps, report.terminated, report.truncated)
        if at is not None:
            next_obs = take(next_obs, at)
            columns = tuple(column[at] for column in columns)  # type: ignore[assignment]  # four
        rewards, steps, terminated, truncated = columns
        if rewards.dtype != np.float32:
            with np.errstate(over="ignore"):  # what overflows is found by `finite_frames`
                rewards = rewards.astype(np.float32)
        return FrameBatch(
            sampled=step.sampled,
            sampled_rows=rows,
            chains=self._chain[slots],
            was_terminated=self._was_terminated[slots],
            was_truncated=self._was_truncated[slots],
            next_obs=next_obs,
            rewards=rewards,
            steps=steps,
            terminated=terminated,
            truncated=truncated,
            info=report.info,
        )


def join_frames(batches: list[FrameBatch]) -> list[FrameBatch]:
    """Join frames that come from one inference, in their order: storing many at once is cheap.

    Large observations stay apart, because joining copies them; so do frames with an ``info``.
    """
    joined: list[FrameBatch] = []
    group: list[FrameBatch] = []
    for frames in batches:
        if group and not (frames.sampled is group[0].sampled and _is_light(frames)):
            joined.append(_join(group))
            group = []
        group.append(frames)
        if not _is_light(group[0]):
            joined.append(group.pop())
    return [*joined, _join(group)] if group else joined


def _is_light(frames: FrameBatch) -> bool:
    return not frames.info and not frames.next_obs["images"]


def _join(group: list[FrameBatch]) -> FrameBatch:
    if len(group) == 1:
        return group[0]
    rows = [frames.sampled_rows for frames in group]
    follows = all(isinstance(r, slice) for r in rows) and all(
        one.stop == two.start for one, two in itertools.pairwise(rows)
    )
    columns = {
        name: np.concatenate([getattr(frames, name) for frames in group]) for name in _COLUMNS
    }
    return FrameBatch(
        sampled=group[0].sampled,
        sampled_rows=slice(rows[0].start, rows[-1].stop)
        if follows
        else np.concatenate([_as_index(r) for r in rows]),
        next_obs=concatenate([frames.next_obs for frames in group]),
        info={},
        **columns,
    )


def _as_index(rows: Any) -> Array:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


def _as_slice(rows: Array) -> Any:
    """Give consecutive rows as a slice, which takes views instead of copies."""
    first = int(rows[0])
    if len(rows) == 1 or np.array_equal(rows, np.arange(first, first + len(rows))):
        return slice(first, first + len(rows))
    return rows
