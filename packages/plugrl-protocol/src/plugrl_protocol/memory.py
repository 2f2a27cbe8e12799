"""What a client knows that the server still has of its observations (``reuse-feedback-obs``).

The server keeps the observation of each env's last feedback, unless that was a done. An ``infer``
may leave out a row that equals it, byte for byte. The module knows nothing of turns or sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_protocol.messages import Observation
from plugrl_protocol.templates import spec_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from plugrl_protocol.messages import Feedback
    from plugrl_protocol.templates import Array, Spec


class _Kept:
    """The observation of one feedback, copied: the caller may fill the same arrays again."""

    __slots__ = ("_data", "_names", "_specs", "rows")

    def __init__(self, seen: Observation) -> None:
        self._names = (*seen.images, None, *seen.states)
        arrays = _arrays_of(seen)
        self._specs: list[Spec] = list(map(spec_of, arrays))
        self._data = [array.tobytes() for array in arrays]
        self.rows = len(seen)

    def equals(self, seen: Observation) -> bool | None:
        """Tell whether all rows are the same bytes under the same names, text included.

        Returns:
            None where names, dtypes or shapes differ: text of another width may be the same text.
        """
        if (*seen.images, None, *seen.states) != self._names:
            return None
        arrays = _arrays_of(seen)
        if list(map(spec_of, arrays)) != self._specs:
            return None
        for array, data in zip(arrays, self._data, strict=True):  # noqa: SIM110  # all() is slower
            if array.tobytes() != data:
                return False
        return True

    def is_like(self, other: _Kept) -> bool:
        """Tell whether names, dtypes and shapes are the same."""
        return self._names == other._names and self._specs == other._specs

    def observation(self) -> Observation:
        """Give what was kept."""
        arrays: list[Array] = [
            np.ndarray(shape, dtype, data)
            for (_, dtype, shape), data in zip(self._specs, self._data, strict=True)
        ]
        split = self._names.index(None)
        return Observation(
            images=dict(zip(self._names[:split], arrays[:split], strict=True)),  # type: ignore[arg-type]  # only the mark between the groups is None
            states=dict(zip(self._names[split + 1 :], arrays[split:-1], strict=True)),  # type: ignore[arg-type]  # the same
            text=arrays[-1],
        )


def _arrays_of(seen: Observation) -> list[Array]:
    return [*seen.images.values(), *seen.states.values(), seen.text]


class Memory:
    """What one connection's server has of each env."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[_Kept, int]] = {}
        # What is sent when all rows are left out, and for which observations.
        self._all: tuple[_Kept, Observation, npt.NDArray[np.bool_]] | None = None

    def __bool__(self) -> bool:
        return bool(self._rows)

    def note(self, report: Feedback, indices: list[int]) -> None:
        """Remember a feedback that is sent; done rows leave nothing."""
        kept = _Kept(report.observation)
        ended = zip(report.terminated.tolist(), report.truncated.tolist(), strict=True)
        for row, (index, (terminated, truncated)) in enumerate(zip(indices, ended, strict=True)):
            if terminated or truncated:
                self._rows.pop(index, None)
            else:
                self._rows[index] = (kept, row)

    def forget(self, indices: list[int]) -> None:
        """Forget envs that are asked about: the server lets go of their rows."""
        for index in indices:
            self._rows.pop(index, None)

    def leave_out(
        self, seen: Observation, indices: list[int]
    ) -> tuple[Observation, npt.NDArray[np.bool_]] | None:
        """Find the rows that the server has.

        Args:
            seen: one row per env.
            indices: the envs.

        Returns:
            The rows that must be sent, and ``reuse`` |b1 [n]; None when all must be.
        """
        kept = self._of_all(indices, len(seen))
        is_equal = None if kept is None else kept.equals(seen)
        if is_equal is False and len(indices) == 1:
            return None
        if kept is not None and is_equal:
            if self._all is None or not kept.is_like(self._all[0]):
                self._all = kept, seen.rows(slice(0, 0)), np.ones(len(indices), np.bool_)
            return self._all[1:]
        reuse = self._equal_rows(seen, indices)
        return (seen.rows(~reuse), reuse) if reuse.any() else None

    def _of_all(self, indices: list[int], rows: int) -> _Kept | None:
        """Give what was kept, if it is one feedback that named just these envs in this order."""
        first, _ = self._rows.get(indices[0], (None, 0))
        if first is None or first.rows != rows:
            return None
        for row, index in enumerate(indices):
            kept, kept_row = self._rows.get(index, (None, 0))
            if kept is not first or kept_row != row:
                return None
        return first

    def _equal_rows(self, seen: Observation, indices: list[int]) -> npt.NDArray[np.bool_]:
        reuse = np.zeros(len(indices), np.bool_)
        sources: dict[int, tuple[_Kept, list[int], list[int]]] = {}
        for row, index in enumerate(indices):
            kept, kept_row = self._rows.get(index, (None, 0))
            if kept is not None:
                _, rows, kept_rows = sources.setdefault(id(kept), (kept, [], []))
                rows.append(row)
                kept_rows.append(kept_row)
        for kept, rows, kept_rows in sources.values():
            theirs = kept.observation().rows(np.asarray(kept_rows))
            reuse[rows] = _equal_rows(seen.rows(np.asarray(rows)), theirs)
        return reuse


def _equal_rows(one: Observation, other: Observation) -> npt.NDArray[np.bool_]:
    """Tell which rows are the same bytes, names included: -0.0 is not 0.0, a NaN is itself."""
    if one.images.keys() != other.images.keys() or one.states.keys() != other.states.keys():
        return np.zeros(len(one), np.bool_)
    equal: npt.NDArray[np.bool_] = one.text == other.text
    pairs = [(array, other.states[name]) for name, array in one.states.items()]
    pairs += [(array, other.images[name]) for name, array in one.images.items()]
    for mine, theirs in pairs:
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return np.zeros(len(one), np.bool_)
        if mine.size:
            equal = equal & (_as_bytes(mine) == _as_bytes(theirs)).all(axis=1)
    return equal


def _as_bytes(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
