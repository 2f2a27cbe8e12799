"""Columns: one preallocated tensor per field, written in place through numpy where it can be.

The layout every buffer shares. A field may be nested (a Dict or Tuple observation): it becomes one
column per leaf, addressed by its path, and one nested mapping again when it is read (the entries
of a tuple under ``"0"``, ``"1"``, ...). Floating-point columns are float32, unless the data is
half precision already. Knows nothing about episodes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from rlightning.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["Column", "Path", "as_array", "leaves", "nest"]

Path: TypeAlias = tuple[str, ...]
"""Where a leaf stands: the field's name, then the keys inside it."""

Array: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"


def leaves(name: str, value: Any) -> Iterator[tuple[Path, Any]]:
    """Yield every leaf below `value` with its path; None leaves are left out."""
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, tuple):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        if value is not None:
            yield (name,), value
        return
    for key, item in items:
        for path, leaf in leaves(key, item):
            yield (name, *path), leaf


def nest(columns: Mapping[Path, Any]) -> dict[str, Any]:
    """Return the nested mapping that `leaves` flattened."""
    nested: dict[str, Any] = {}
    for path, column in columns.items():
        target = nested
        for key in path[:-1]:
            target = target.setdefault(key, {})
        target[path[-1]] = column
    return nested


def as_array(path: Path, leaf: Any) -> Array:
    """Return `leaf` as an array or tensor.

    Raises:
        ContractError: it holds something that is not numbers.
    """
    if isinstance(leaf, (np.ndarray, torch.Tensor)):
        array: Array = leaf
    else:
        array = np.asarray(leaf)
    if isinstance(array, np.ndarray) and array.dtype.kind not in "biuf":
        raise ContractError(
            f"the field {'.'.join(path)!r} holds {type(leaf).__name__} of dtype {array.dtype}; the "
            "buffer stores numbers. Encode it as an array, or leave it out of the response"
        )
    return array


class Column:
    """One preallocated tensor ``[length, *shape]``.

    Args:
        path: the field, for messages.
        length: rows.
        example: one row; gives shape and dtype.
        device: where the tensor lives.
    """

    __slots__ = ("_path", "_shape", "_view", "tensor")

    def __init__(self, path: Path, length: int, example: Array, device: str) -> None:
        dtype = (
            torch.from_numpy(np.empty(0, dtype=example.dtype)).dtype
            if isinstance(example, np.ndarray)
            else example.dtype
        )
        dtype = torch.float32 if dtype == torch.float64 else dtype
        self.tensor = torch.zeros((length, *example.shape), dtype=dtype, device=device)
        self._path = path
        self._shape = tuple(example.shape)
        half = dtype == torch.bfloat16
        self._view = None if half or self.tensor.device.type != "cpu" else self.tensor.numpy()

    def __setitem__(self, row: Any, value: Array) -> None:
        if isinstance(value, torch.Tensor) and self._view is None:
            self.tensor[row] = value
        elif self._view is not None:
            self._view[row] = value.cpu().numpy() if isinstance(value, torch.Tensor) else value
        else:
            self.tensor[row] = torch.as_tensor(value)

    def write(self, row: int, value: Array) -> None:
        """Set one row.

        Raises:
            ContractError: its shape is not the first row's.
        """
        if tuple(value.shape) != self._shape:
            raise ContractError(
                f"the field {'.'.join(self._path)!r} has shape {tuple(value.shape)}; it had "
                f"{self._shape} before: keep the shape of every field stable"
            )
        self[row] = value

    def take(self, indices: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return the rows at `indices`, copied."""
        if self._view is not None:
            return torch.from_numpy(self._view[indices])
        return self.tensor[torch.as_tensor(indices, device=self.tensor.device)]

    def grow(self, length: int) -> None:
        """Lengthen to `length` rows, keeping what is written."""
        longer = Column(self._path, length, self.tensor[0], str(self.tensor.device))
        longer.tensor[: len(self.tensor)] = self.tensor
        self.tensor, self._view = longer.tensor, longer._view
