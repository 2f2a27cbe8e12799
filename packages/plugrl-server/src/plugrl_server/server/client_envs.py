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
from plugrl_server.common.trees import take

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plugrl_protocol.messages import Feedback

__all__ = ["ClientEnvs", "InferStep"]

Array = np.ndarray[Any, Any]
Claim = tuple[bytes, Array, "InferStep"]
"""All environments of one inference: their indices as bytes, their slots, and the inference."""

Ends = tuple[bytes, Array, Array, Array]
"""Environments as in a claim, their slots, and which of them were terminated and truncated."""

_MOST_KNOWN = 64


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
        self._known: dict[bytes, Array] = {}
        # The newest inference, and how the last frames of its environments ended: written into the
        # columns only if that turns out to be needed.
        self._last: Claim | None = None
        self._ends: Ends | None = None

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

    def chains_of(self, env_indices: Array) -> list[int]:
        """Return the open chain of each of some environments."""
        slots = self._find(env_indices)  # makes room, so that the columns may be others after it
        chains: list[int] = self._chain[slots].tolist()
        return chains

    def acted(self, env_indices: Array, step: InferStep) -> None:
        """Remember that an inference answered these environments, in this order."""
        self._settle()
        key = env_indices.tobytes()
        slots = self._known.get(key)
        if slots is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            slots = self._known[key] = self._find(env_indices)
        self._last = (key, slots, step)

    def _settle(self) -> None:
        """Write the newest inference into the columns: its rows may be reported in any order."""
        if self._last is not None:
            (_, slots, step), self._last = self._last, None
            number = next(self._step_numbers)
            self._steps[number] = step
            self._step[slots] = number
            self._row[slots] = np.arange(len(slots))

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
        last = self._last
        if last is not None and report.env_indices.tobytes() == last[0]:
            self._last = None
            return last
        self._settle()
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
            key, slots, step = claim
            rows = None if step.is_whole else slice(step.start, step.start + len(slots))
            if self._ends is None or self._ends[0] != key:
                self._settle_ends()
                self._ends = key, slots, self._was_terminated[slots], self._was_truncated[slots]
            before = self._ends[2:]
            parts = [(step.version, self._frames(report, slots, step, rows, None, before))]
            # Copied: they may be views on a frame of many megabytes.
            self._ends = key, slots, report.terminated.copy(), report.truncated.copy()
            return parts
        self._settle_ends()
        slots = self._find(report.env_indices)
        parts = self._sorted_by_step(report, slots)
        self._was_terminated[slots] = report.terminated
        self._was_truncated[slots] = report.truncated
        return parts

    def _settle_ends(self) -> None:
        """Write how frames ended into the columns."""
        if self._ends is not None:
            (_, slots, terminated, truncated), self._ends = self._ends, None
            self._was_terminated[slots], self._was_truncated[slots] = terminated, truncated

    def _sorted_by_step(self, report: Feedback, slots: Array) -> list[tuple[int, FrameBatch]]:
        numbers = self._step[slots]
        parts = []
        for number in dict.fromkeys(numbers.tolist()):
            at = np.flatnonzero(numbers == number)
            step = self._steps[number]
            rows = _as_slice(self._row[slots[at]] + step.start)
            was = self._was_terminated[slots[at]], self._was_truncated[slots[at]]
            parts.append((step.version, self._frames(report, slots[at], step, rows, at, was)))
            step.rows_left -= len(at)
            if step.rows_left == 0:
                del self._steps[number]
        return parts

    def _frames(  # what a frame is made of
        self,
        report: Feedback,
        slots: Array,
        step: InferStep,
        rows: Any,
        at: Array | None,
        was: tuple[Array, Array],
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
            with np.errstate(over="ignore"):  # what overflows is found by `usable_frames`
                rewards = rewards.astype(np.float32)
        return FrameBatch(
            sampled=step.sampled,
            sampled_rows=rows,
            chains=self._chain[slots],
            was_terminated=was[0],
            was_truncated=was[1],
            next_obs=next_obs,
            rewards=rewards,
            steps=steps,
            terminated=terminated,
            truncated=truncated,
            info=report.info,
        )


def _as_slice(rows: Array) -> Any:
    """Give consecutive rows as a slice, which takes views instead of copies."""
    first = int(rows[0])
    if len(rows) == 1 or np.array_equal(rows, np.arange(first, first + len(rows))):
        return slice(first, first + len(rows))
    return rows
