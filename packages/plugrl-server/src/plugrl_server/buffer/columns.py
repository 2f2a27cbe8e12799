"""Preallocated columns for a tree of arrays, on rlightning's `Column`; written rows at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugrl_server.common.trees import leaves
from rlightning.buffer.columns import Column, nest, torch_dtype

if TYPE_CHECKING:
    import numpy as np
    import torch

__all__ = ["TreeColumns"]


class TreeColumns:
    """One column per array of a tree.

    Args:
        capacity: rows.
        example: a tree of numpy arrays, batch first; only shapes and dtypes are read.
    """

    def __init__(self, capacity: int, example: Any) -> None:
        self.capacity = capacity
        self._columns = {
            path: Column(capacity, tuple(leaf.shape[1:]), torch_dtype(leaf.dtype))
            for path, leaf in leaves(example)
        }

    def write(self, rows: Any, tree: Any) -> None:
        """Set rows (a slice or an index array) to a tree of the example's structure."""
        columns = self._columns
        for path, column in columns.items():
            leaf = tree
            for key in path:
                leaf = leaf[key]
            column[rows] = leaf

    def grow(self, capacity: int) -> None:
        """Make room for more rows."""
        self.capacity = capacity
        for column in self._columns.values():
            column.grow(capacity)

    def read(self, length: int) -> Any:
        """Give the first rows as a tree of tensors that share memory with the columns."""
        return self._tree({path: c.tensor[:length] for path, c in self._columns.items()})

    def take(self, rows: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
        """Give some rows as a tree of tensors, copied."""
        return self._tree({path: column.take(rows) for path, column in self._columns.items()})

    def state(self, length: int) -> list[torch.Tensor]:
        """Copy the first rows of every column."""
        return [column.tensor[:length].clone() for column in self._columns.values()]

    def load(self, tensors: list[torch.Tensor]) -> None:
        """Write what `state` gave to the first rows.

        Raises:
            ValueError: there are more or fewer columns than then.
        """
        for column, tensor in zip(self._columns.values(), tensors, strict=True):
            column.tensor[: len(tensor)] = tensor

    @staticmethod
    def _tree(columns: dict[tuple[str, ...], torch.Tensor]) -> Any:
        return columns[()] if set(columns) == {()} else nest(columns)
