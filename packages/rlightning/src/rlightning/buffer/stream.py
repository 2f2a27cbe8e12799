"""A stream: one worker's rows on their way into a ring.

Knows which row waits for the next one, and whether the next one follows from it. Knows nothing
about sampling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.buffer.columns import as_numpy
from rlightning.buffer.ring import slot_numbers
from rlightning.buffer.schema import ENV_FLAGS, RowSchema
from rlightning.buffer.segment import SHIFTED, Finals
from rlightning.errors import ContractError
from rlightning.utils.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlightning.buffer.columns import Array, Column, Indices
    from rlightning.buffer.ring import Ring, Span
    from rlightning.types import EnvMeta, EnvRet, PolicyResponse

__all__ = ["Stream"]

_log = get_logger("buffer")


class Stream:
    """The rows of one worker.

    Args:
        meta: the worker's spaces and number of rows N.
        ring: where the rows go.
    """

    def __init__(self, meta: EnvMeta, ring: Ring) -> None:
        self._schema = RowSchema(meta)
        self._ring = ring
        self._columns: list[Column] = []
        self._new: list[int] = []  # positions among the leaves: what a new row writes
        self._flags: list[int] = []  # reward and flags: what completes the row before
        self._over: list[int] = []  # those of the flags that end episodes
        self._warned = False
        self.reset()

    @property
    def rows(self) -> int:
        """How many environments the worker steps."""
        return self._schema.rows

    @property
    def last_response(self) -> PolicyResponse | None:
        """The policy's last answer."""
        return self._last[1] if self._last is not None else None

    def reset(self) -> None:
        """Forget the waiting row."""
        self._waiting = -1
        self._generation = 0
        self._ended = True
        self._same_row_next = False
        self._last: tuple[EnvRet, PolicyResponse] | None = None
        # Once an environment was away, rows of different ages wait: slot and generation of each.
        self._slots: Indices | None = None
        self._generations: Indices = np.zeros(self.rows, dtype=np.int64)

    def end(self) -> None:
        """Say that the next row does not follow from the last, unless it is the last again."""
        self._ended = True

    def add(
        self,
        env_ret: EnvRet,
        response: PolicyResponse,
        fields: Mapping[str, Any],
        info: Mapping[str, Any],
    ) -> Span | None:
        """Put a row into the ring.

        Args:
            env_ret: what the worker returned.
            response: the policy's answer.
            fields: both by name, as the preprocessing made them.
            info: what the environment reported beside.

        Returns:
            The slots that became transitions; None where there are none.

        Raises:
            ContractError: a field is missing, not numeric, or changes its shape or dtype.
        """
        arrays = self._schema.arrays(fields, response.extras)
        if not self._columns:
            self._open()
        new = [arrays[position] for position in self._new]
        last = self._last[0] if self._last is not None else None
        again = self._ended and (last is env_ret or self._same_row_next) and self._alive()
        self._same_row_next = False
        self._last = (env_ret, response)
        columns = [self._columns[position] for position in self._new]
        if self._slots is not None or (info and ("_idle" in info or "_lost" in info)):
            return self._add_by_row(columns, arrays, info, again=again)
        if again:
            span = self._ring.span(self._waiting, self.rows)
            for column, array in zip(columns, new, strict=True):
                column[span] = array
            self._ended = False
            return None
        finished = None
        if not self._ended and self._alive():
            finished = self._ring.span(self._waiting, self.rows)
        start = self._ring.insert(columns, new, self.rows)
        if finished is not None and not self._alive():
            finished = None  # the waiting row was the oldest: this one went over it
        if finished is not None:
            self._finish(finished, self._ring.span(start, self.rows), arrays, info)
        self._waiting, self._generation = start, int(self._ring.generation[start])
        self._ended = False
        return finished

    def _open(self) -> None:
        leaves = self._schema.leaves
        names = [(SHIFTED.get(leaf.path[0], leaf.path[0]), *leaf.path[1:]) for leaf in leaves]
        if len(set(names)) != len(names):
            raise ContractError(
                f"the fields {sorted(SHIFTED.values())} are made by the buffer; give the policy's "
                "fields other names"
            )
        self._columns = self._ring.open(leaves, names)
        for position, leaf in enumerate(leaves):
            (self._flags if leaf.path[0] in ENV_FLAGS else self._new).append(position)
            if leaf.path[0] in ("last_terminated", "last_truncated"):
                self._over.append(position)

    def _alive(self) -> bool:
        """Whether the waiting row is still in the ring: other workers may have overwritten it."""
        if self._slots is not None:
            return bool(self._waits(np.arange(self.rows)).any())
        waiting = self._waiting
        return waiting >= 0 and int(self._ring.generation[waiting]) == self._generation

    def _finish(
        self, span: Span, following: Span, arrays: list[Array], info: Mapping[str, Any]
    ) -> None:
        for position in self._flags:
            self._columns[position][span] = arrays[position]
        over = np.zeros(self.rows, dtype=bool)
        for position in self._over:
            np.logical_or(over, as_numpy(arrays[position]), out=over)
        finals = Finals.from_info(self.rows, info) if "_final_obs" in info else None
        if not self._warned and over.any() and finals is None:
            self._warned = True
            _log.warning(
                "an episode ended and info has no final_obs: the next episode's first observation "
                "stands in for what followed its last step. Put the finished episode's own last "
                "observation into info['final_obs'], and the row mask into info['_final_obs']"
            )
        if "executed_action" in info:
            self._correct(slot_numbers(span), np.arange(self.rows), info)
        self._ring.finish(span, following, over, finals)

    def _correct(self, slots: Indices, envs: Indices, info: Mapping[str, Any]) -> None:
        """Replace the actions at `slots` by what was executed there, where somebody says so.

        Raises:
            ContractError: an executed action has another shape than the policy's.
        """
        column = self._ring.columns.get(("action",))
        if column is None:
            raise ContractError("info has executed_action, but the policy's answer no `action`")
        shape = tuple(column.tensor.shape[1:])
        given = np.asarray(info["executed_action"])
        if given.shape not in ((self.rows, *shape), shape if self.rows == 1 else None):
            raise ContractError(
                f"info['executed_action'] has shape {given.shape}; the policy's actions of "
                f"{self.rows} environment(s) have {(self.rows, *shape)}"
            )
        told = np.flatnonzero(self._mask(info, "_executed_action", default=True)[envs])
        column[slots[told]] = given.reshape(self.rows, *shape)[envs[told]]

    def _add_by_row(
        self, columns: list[Column], arrays: list[Array], info: Mapping[str, Any], *, again: bool
    ) -> Span | None:
        """Put into the ring what is new of a row of which some environments are away.

        An environment's row waits until that environment comes back; where its episode was lost
        meanwhile, nothing completes it.
        """
        ring, idle, lost = self._ring, self._mask(info, "_idle"), self._mask(info, "_lost")
        if self._slots is None:
            together = slot_numbers(ring.span(self._waiting, self.rows))
            self._generations[:] = self._generation
            self._slots = together if self._alive() else np.full(self.rows, -1, dtype=np.int64)
        slots, present = self._slots, np.flatnonzero(~idle)
        whole = [self._broadcast(position, arrays) for position in range(len(arrays))]
        ended, self._ended = self._ended, False
        if again:
            present = present[self._waits(present)]
            for column, position in zip(columns, self._new, strict=True):
                column[slots[present]] = whole[position][present]
            return None
        if ended:
            slots[:] = -1
        before = slots[present]
        start = ring.insert(columns, [whole[p][present] for p in self._new], len(present))
        fresh = slot_numbers(ring.span(start, len(present)))
        follows = self._waits(present) & ~lost[present]
        slots[present], self._generations[present] = fresh, ring.generation[fresh]
        done = np.flatnonzero(follows)
        if not len(done):
            return None
        self._finish_some(before[done], fresh[done], present[done], whole, info)
        return before[done]

    def _waits(self, envs: Indices) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Whether rows of environments wait in the ring, not written over."""
        assert self._slots is not None  # only rows of different ages are looked at one by one
        slots = self._slots[envs]
        waits: np.ndarray[Any, np.dtype[np.bool_]] = (slots >= 0) & (
            self._ring.generation[slots] == self._generations[envs]
        )
        return waits

    def _mask(
        self, info: Mapping[str, Any], key: str, *, default: bool = False
    ) -> np.ndarray[Any, np.dtype[np.bool_]]:
        given = np.asarray(info.get(key, default), dtype=bool)
        return np.broadcast_to(given.reshape(-1), (self.rows,))

    def _broadcast(self, position: int, arrays: list[Array]) -> np.ndarray[Any, Any]:
        shape = (self.rows, *self._schema.leaves[position].row_shape)
        return np.broadcast_to(as_numpy(arrays[position]), shape)

    def _finish_some(
        self,
        slots: Indices,
        following: Indices,
        envs: Indices,
        whole: list[np.ndarray[Any, Any]],
        info: Mapping[str, Any],
    ) -> None:
        over = np.zeros(len(envs), dtype=bool)
        for position in self._flags:
            self._columns[position][slots] = whole[position][envs]
        for position in self._over:
            over |= whole[position][envs].astype(bool)
        finals = None
        if "_final_obs" in info:
            every = Finals.from_info(self.rows, info)
            kept = np.isin(every.envs, envs)
            values = {path: value[kept] for path, value in every.values.items()}
            finals = Finals(len(envs), np.searchsorted(envs, every.envs[kept]), values)
        if "executed_action" in info:
            self._correct(slots, envs, info)
        self._ring.finish(slots, following, over, finals)

    def state_dict(self) -> dict[str, int]:
        """Return which row waits, and whether its segment was ended."""
        waiting = self._waiting if self._slots is None and self._alive() else -1
        return {"waiting": waiting, "generation": self._generation, "ended": int(self._ended)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where `state_dict` was taken.

        The next row follows from the one that waited; where its segment was ended, it is that row
        again, as it would have been without an interruption.
        """
        self.reset()
        self._waiting, self._generation = state["waiting"], state["generation"]
        self._ended = bool(state["ended"])
        self._same_row_next = self._ended
