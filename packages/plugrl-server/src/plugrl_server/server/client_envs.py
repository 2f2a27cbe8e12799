"""What is remembered of one client's environments between an action and its feedback.

Columns instead of one object per environment: a feedback of a thousand environments is a few numpy
operations. Knows nothing about sockets, threads or algorithms.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_server.algorithm.base_algorithm import FrameBatch
from plugrl_server.common.trees import take

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plugrl_protocol.messages import Feedback

__all__ = ["ClientEnvs", "InferStep", "finite_rows"]

Array = np.ndarray[Any, Any]


@dataclass(slots=True, eq=False)
class InferStep:
    """One client's part of an inference."""

    obs: dict[str, Any]
    """Of the whole batch; this client's rows begin at `start`."""
    runtime_state: Any
    train_state: Any
    version: int
    """Of the policy that acted."""
    start: int
    finite: Array | None
    """``[n]``: rows of this client whose observation is finite; None: all are."""
    rows_left: int
    """Rows whose feedback has not come."""


def finite_rows(states: dict[str, Array]) -> Array | None:
    """Find rows of which every state is finite, ``[n]``; None: all of them."""
    finite: Array | None = None
    for array in states.values():
        whole = np.isfinite(array)
        if not whole.all():
            rows = np.asarray(whole.all(axis=tuple(range(1, array.ndim))))
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

    def break_chains(self, env_indices: Array) -> list[int]:
        """Begin new chains: a frame is missing. Gives the old ones."""
        slots = self._find(env_indices)
        old: list[int] = self._chain[slots].tolist()
        self._chain[slots] = [next(self._new_chain) for _ in old]
        return old

    def report(self, report: Feedback) -> list[tuple[InferStep, Array, FrameBatch]]:
        """Turn a feedback into frames.

        Returns:
            Per inference: where it came from, positions in the feedback, and the frames.
        """
        slots = self._find(report.env_indices)
        numbers = self._step[slots]
        next_obs = report.observation.to_wire()
        steps = report.steps
        if steps is None:
            steps = np.ones(len(slots), np.int64)
        parts: list[tuple[InferStep, Array, FrameBatch]] = []
        for number in dict.fromkeys(numbers.tolist()):
            at = np.flatnonzero(numbers == number)
            step = self._steps[number]
            rows = _as_slice(self._row[slots[at]] + step.start)
            everything = len(at) == len(slots)
            chosen: Any = slice(None) if everything else at
            frames = FrameBatch(
                chains=self._chain[slots[at]],
                obs=take(step.obs, rows),
                runtime_state=take(step.runtime_state, rows),
                train_state=take(step.train_state, rows),
                was_terminated=self._was_terminated[slots[at]],
                was_truncated=self._was_truncated[slots[at]],
                next_obs=take(next_obs, chosen),
                rewards=report.rewards[chosen].astype(np.float32),
                steps=steps[chosen],
                terminated=report.terminated[chosen],
                truncated=report.truncated[chosen],
                info=report.info,
            )
            parts.append((step, at, frames))
            step.rows_left -= len(at)
            if step.rows_left == 0:
                del self._steps[number]
        self._was_terminated[slots] = report.terminated
        self._was_truncated[slots] = report.truncated
        return parts

    def finite(self, step: InferStep, at: Array, report: Feedback) -> Array | None:
        """Find frames whose observations before and after are finite; None: all of them."""
        after = finite_rows(dict(report.observation.states))
        if after is None and step.finite is None:
            return None
        good = np.ones(len(at), np.bool_) if after is None else after[at]
        if step.finite is not None:
            slots = self._find(report.env_indices[at])
            good = good & step.finite[self._row[slots]]
        return good


def _as_slice(rows: Array) -> Any:
    """Give consecutive rows as a slice, which takes views instead of copies."""
    first = int(rows[0])
    if len(rows) == 1 or np.array_equal(rows, np.arange(first, first + len(rows))):
        return slice(first, first + len(rows))
    return rows
