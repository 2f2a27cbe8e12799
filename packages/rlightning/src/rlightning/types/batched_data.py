"""`BatchedData`: ordered (id, value) pairs, one per environment worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rlightning.errors import UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["BatchedData"]

T = TypeVar("T")


class BatchedData(Generic[T]):
    """Values by environment id, in order; an id may stand more than once.

    Args:
        ids: one id per value.
        data: the values.

    Raises:
        ValueError: the lengths differ.
    """

    __slots__ = ("_data", "_ids")

    def __init__(self, ids: Sequence[str], data: Sequence[T]) -> None:
        if len(ids) != len(data):
            raise ValueError(f"{len(ids)} ids for {len(data)} values; give one id per value")
        self._ids = tuple(ids)
        self._data = tuple(data)

    @staticmethod
    def from_dict(mapping: Mapping[str, Any]) -> BatchedData[Any]:
        """Return the pairs of `mapping`, in its order."""
        return BatchedData(list(mapping), list(mapping.values()))

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[tuple[str, T]]:
        return iter(zip(self._ids, self._data, strict=True))

    def __getitem__(self, env_id: str) -> T:
        """Return the first value with this id.

        Raises:
            KeyError: no value has it.
        """
        try:
            return self._data[self._ids.index(env_id)]
        except ValueError:
            raise UnknownNameError(env_id, kind="batch", known=set(self._ids)) from None

    def __repr__(self) -> str:
        return f"BatchedData({dict(self)!r})"

    def items(self) -> Iterator[tuple[str, T]]:
        """Return an iterator over the (id, value) pairs."""
        return iter(self)

    def ids(self) -> tuple[str, ...]:
        """Return the ids in order."""
        return self._ids

    def values(self) -> tuple[T, ...]:
        """Return the values in order."""
        return self._data
