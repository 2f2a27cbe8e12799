"""`Ring`: transitions in preallocated circular columns, complete one step after their action.

A slot is one environment's row: its observation and the answer to it. When the next row of the
same environment arrives, the slot gets the reward and flags of its action and a link to that row,
which holds the next observation: no observation is stored twice. Links are what n-step windows and
sequences follow, so workers may add at any pace. A finished episode's own last observation, which
no row holds, is kept beside. Knows nothing about workers, sampling or priorities.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from rlightning.buffer.columns import Array, Column, Indices, Path, as_numpy, dotted
from rlightning.buffer.final_store import FinalStore
from rlightning.buffer.schema import Leaf
from rlightning.buffer.segment import Finals
from rlightning.errors import ContractError

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Ring", "Span", "slot_numbers"]

Span: TypeAlias = "slice | Indices"
"""Consecutive slots: a slice, or their numbers where they wrap around."""


class Ring:
    """Slots in order of arrival, the oldest overwritten first.

    Args:
        capacity: transitions held at most.
        pending: further slots, for rows whose transition is not complete yet.
        device: where the columns live.
        folder: where given, columns are memory maps of files in it.
    """

    def __init__(
        self, capacity: int, *, pending: int, device: str, folder: pathlib.Path | None = None
    ) -> None:
        self.capacity = capacity
        self.slots = capacity + pending
        self.columns: dict[Path, Column] = {}
        self.complete = np.zeros(self.slots, dtype=bool)
        """Which slots are transitions; only those may be read."""
        self.successor = np.zeros(self.slots, dtype=np.int64)
        """The slot of the row after."""
        self.over = np.zeros(self.slots, dtype=bool)
        """Whether the episode ended with the transition."""
        self.generation = np.zeros(self.slots, dtype=np.int64)
        """How often a slot was written."""
        self.final = np.full(self.slots, -1, dtype=np.int64)
        """Where in the store of last observations the next one is; -1 if it is the successor's."""
        self.count = 0
        """How many transitions there are."""
        self.written = 0
        """How many slots were ever written."""
        self.on_drop: Callable[[Span], None] | None = None
        """Called with slots that are no transitions any more."""
        self._cursor = 0
        self._device = device
        self._folder = folder
        self._finals = FinalStore(device=device, folder=folder)

    # ---- writing -------------------------------------------------------------------------------

    def span(self, start: int, rows: int) -> Span:
        """Return the `rows` slots from `start` on."""
        if start + rows <= self.slots:
            return slice(start, start + rows)
        return (start + np.arange(rows)) % self.slots

    def open(self, leaves: Sequence[Leaf], names: Sequence[Path]) -> list[Column]:
        """Return the columns of a worker's leaves, allocated for the first worker.

        Raises:
            ContractError: another worker's fields, shapes or dtypes differ.
        """
        if not self.columns:
            for leaf, name in zip(leaves, names, strict=True):
                self.columns[name] = self._column(name, leaf.row_shape, leaf.dtype)
        if set(names) != self.columns.keys():
            changed = sorted(dotted(name) for name in set(names) ^ self.columns.keys())
            raise ContractError(
                f"the fields {changed} are in some workers' rows and not in others'; the buffer "
                "keeps one set of fields for all environments"
            )
        for leaf, name in zip(leaves, names, strict=True):
            tensor = self.columns[name].tensor
            if tuple(tensor.shape[1:]) != leaf.row_shape or tensor.dtype != leaf.dtype:
                raise ContractError(
                    f"the field {dotted(name)!r} is {leaf.dtype} {leaf.row_shape} here and "
                    f"{tensor.dtype} {tuple(tensor.shape[1:])} in the buffer; all environments of "
                    "one buffer have the same shapes and dtypes"
                )
        return [self.columns[name] for name in names]

    def _column(self, name: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Column:
        file = None if self._folder is None else self._folder / f"{dotted(name)}.column"
        return Column(self.slots, shape, dtype, device=self._device, file=file)

    def insert(self, columns: Sequence[Column], arrays: Sequence[Array], rows: int) -> int:
        """Write `rows` new rows over the oldest slots; return the first slot."""
        start = self._cursor
        span = self.span(start, rows)
        self._invalidate(span)
        self.generation[span] += 1
        for column, array in zip(columns, arrays, strict=True):
            column[span] = array
        self._cursor = (start + rows) % self.slots
        self.written = min(self.slots, self.written + rows)
        return start

    def finish(
        self, span: Span, following: Span, over: np.ndarray[Any, Any], finals: Finals | None
    ) -> None:
        """Make the rows in `span`, whose rewards and flags are written, transitions.

        Args:
            span: the rows.
            following: the rows after them, in the same order.
            over: whether their episodes ended, ``[rows]``.
            finals: the last observations of those that did.
        """
        self.successor[span] = slot_numbers(following)
        self.over[span] = over
        if finals is not None and len(finals.envs):
            store = self._finals.put(finals, self._observations())
            self.final[slot_numbers(span)[finals.envs]] = store
        self.complete[span] = True
        self.count += len(over)
        if self.count > self.capacity:
            self._invalidate(self.order()[: self.count - self.capacity])

    def append(self, rows: Mapping[Path, torch.Tensor]) -> Span:
        """Write finished transitions of one environment, in order of time; return their slots.

        Args:
            rows: flat ``[T, ...]`` columns, with ``next_observation`` and the flags. Of more than
                `capacity` rows the last ones are kept.

        Raises:
            ContractError: fields, shapes or dtypes differ from the rows before.
        """
        kept = {path: tensor[-self.capacity :] for path, tensor in rows.items()}
        over = np.array([False])
        for path, tensor in kept.items():
            if path[0] in ("terminated", "truncated"):
                over = over | as_numpy(tensor).astype(bool)
        count = len(next(iter(kept.values())))
        over = np.broadcast_to(over, (count,)).copy()
        over[-1] = True  # nothing follows: links must not lead on
        stored = {path: tensor for path, tensor in kept.items() if path[0] != "next_observation"}
        leaves = [
            Leaf(path, (), tuple(tensor.shape[1:]), tensor.dtype, set(), set())
            for path, tensor in stored.items()
        ]
        columns = self.open(leaves, list(stored))
        start = self.insert(columns, list(stored.values()), count)
        ends = np.flatnonzero(over)
        values = {
            ("observation", *path[1:]): as_numpy(tensor)[ends]
            for path, tensor in kept.items()
            if path[0] == "next_observation"
        }
        span = self.span(start, count)
        following = (start + 1 + np.arange(count)) % self.slots
        self.finish(span, following, over, Finals(count, ends, values))
        return span

    def _invalidate(self, span: Span) -> None:
        gone = int(np.count_nonzero(self.complete[span]))
        if not gone:
            return
        self.count -= gone
        self.complete[span] = False
        if self.on_drop is not None:
            self.on_drop(span)
        final = self.final[span]
        kept = final[final >= 0]
        if len(kept):
            self._finals.release(kept)
            self.final[span] = -1

    def clear(self) -> None:
        """Forget all rows; the columns stay allocated."""
        self._invalidate(slice(0, self.slots))
        self.generation += 1  # ids of what was here are stale
        self._cursor = self.written = 0

    # ---- reading -------------------------------------------------------------------------------

    def order(self) -> Indices:
        """Return the slots of all transitions, the oldest first; takes time with the capacity."""
        slots = self.slot(np.arange(self.written))
        ordered: Indices = slots[self.complete[slots]]
        return ordered

    def slot(self, age: Indices) -> Indices:
        """Return the slots of rows by age, 0 the oldest of all `written` ones."""
        oldest = self._cursor if self.written == self.slots else 0
        return (age + oldest) % self.slots

    def chain(self, slots: Indices, length: int) -> tuple[Indices, np.ndarray[Any, Any]]:
        """Return each slot and the ones after it, as far as they belong together.

        Args:
            slots: ``[B]``, transitions.
            length: how many to return for each, K.

        Returns:
            Slots ``[K, B]``, and which of them count, bool ``[K, B]``: up to an episode's end or
            the newest transition. The others repeat the last that counts.
        """
        chained = np.empty((length, len(slots)), dtype=np.int64)
        counts = np.empty((length, len(slots)), dtype=bool)
        chained[0], counts[0] = slots, True
        for step in range(1, length):
            now = chained[step - 1]
            later = self.successor[now]
            goes_on = counts[step - 1] & ~self.over[now] & self.complete[later]
            chained[step] = np.where(goes_on, later, now)
            counts[step] = goes_on
        return chained, counts

    def take(self, name: Path, slots: Indices) -> torch.Tensor:
        """Return one field at `slots`, copied."""
        return self.columns[name].take(slots)

    def next_observation(self, slots: Indices) -> dict[Path, torch.Tensor]:
        """Return what followed the transitions at `slots`, copied."""
        final = self.final[slots]
        ended = np.flatnonzero(final >= 0)
        later = self.successor[slots]
        out: dict[Path, torch.Tensor] = {}
        for path in self._observations():
            rows = self.columns[path].take(later)
            if len(ended):
                self._finals.put_into(rows, ended, path, final[ended])
            out["next_observation", *path[1:]] = rows
        return out

    def _observations(self) -> dict[Path, Column]:
        return {path: item for path, item in self.columns.items() if path[0] == "observation"}

    # ---- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return all contents, as plain data and tensors; memory-mapped columns are copied."""
        n = self.written
        return {
            "slots": self.slots,
            "written": n,
            "cursor": self._cursor,
            "paths": [list(path) for path in self.columns],
            "columns": [column.tensor[:n].clone() for column in self.columns.values()],
            "links": {
                name: torch.from_numpy(getattr(self, name)[:n].copy())
                for name in ("complete", "successor", "over", "final")
            },
            "generation": torch.from_numpy(self.generation.copy()),
            "finals": self._finals.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents by what `state_dict` returned.

        Raises:
            ContractError: the saved ring had another number of slots.
        """
        if state["slots"] != self.slots:
            raise ContractError(
                f"the saved transitions are of a buffer with room for {state['slots']} (its "
                f"capacity, and a waiting one of each environment), and this one's is {self.slots}"
            )
        self.clear()
        n = state["written"]
        for path, saved in zip(state["paths"], state["columns"], strict=True):
            name = tuple(path)
            if name not in self.columns:
                self.columns[name] = self._column(name, tuple(saved.shape[1:]), saved.dtype)
            self.columns[name].tensor[:n] = saved
        for name, saved in state["links"].items():
            getattr(self, name)[:n] = as_numpy(saved)
        self.generation[:] = as_numpy(state["generation"])
        self._finals.load_state_dict(state["finals"])
        self.written, self._cursor = n, state["cursor"]
        self.count = int(np.count_nonzero(self.complete))


def slot_numbers(span: Span) -> Indices:
    """Return the slots of `span` one by one."""
    return np.arange(span.start, span.stop) if isinstance(span, slice) else span
