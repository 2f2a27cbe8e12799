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
    import pathlib
    from collections.abc import Iterator, Mapping

__all__ = [
    "Array",
    "Column",
    "Indices",
    "Path",
    "as_array",
    "as_numpy",
    "dotted",
    "leaves",
    "nest",
    "take_rows",
    "torch_dtype",
]

Path: TypeAlias = tuple[str, ...]
"""Where a leaf stands: the field's name, then the keys inside it."""

Array: TypeAlias = "np.ndarray[Any, Any] | torch.Tensor"
Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


def dotted(path: Path) -> str:
    """Return `path` as messages show it, for example ``observation.camera``."""
    return ".".join(path)


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
    array: Array = leaf if isinstance(leaf, (np.ndarray, torch.Tensor)) else np.asarray(leaf)
    if isinstance(array, np.ndarray) and (
        array.dtype.kind not in "biuf" or array.dtype.itemsize > 8
    ):
        raise ContractError(
            f"the field {dotted(path)!r} holds {type(leaf).__name__} of dtype {array.dtype}; the "
            "buffer stores numbers. Encode it as an array, or leave it out of the response"
        )
    return array


def as_numpy(value: Array) -> np.ndarray[Any, Any]:
    """Return `value` as a numpy array; bfloat16, which numpy lacks, as float32."""
    if isinstance(value, np.ndarray):
        return value
    try:
        return value.numpy()
    except (RuntimeError, TypeError):  # it needs a gradient, is elsewhere, or is bfloat16
        value = value.detach().cpu()
    array: np.ndarray[Any, Any] = (
        value.float() if value.dtype == torch.bfloat16 else value
    ).numpy()
    return array


def torch_dtype(dtype: np.dtype[Any] | torch.dtype) -> torch.dtype:
    """Return the torch dtype of the same numbers."""
    if isinstance(dtype, torch.dtype):
        return dtype
    return torch.from_numpy(np.empty(0, dtype=dtype.newbyteorder("="))).dtype


def take_rows(tensor: torch.Tensor, indices: Indices) -> torch.Tensor:
    """Return the rows of `tensor` at `indices`, copied.

    Through numpy on the CPU: torch indexes neither uint16 nor, in one thread, as fast.
    """
    if tensor.device.type == "cpu" and tensor.dtype != torch.bfloat16:
        return torch.from_numpy(np.take(tensor.numpy(), indices, axis=0))
    return tensor[torch.as_tensor(indices, device=tensor.device)]


class Column:
    """One preallocated tensor ``[length, *shape]``.

    Args:
        length: rows.
        shape: of one row.
        dtype: of the data; float64 is kept as float32.
        device: where the tensor lives.
        file: where given, the tensor is a memory map of this new file.
    """

    __slots__ = ("tensor", "view")

    def __init__(
        self,
        length: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        device: str = "cpu",
        file: pathlib.Path | None = None,
    ) -> None:
        dtype = torch.float32 if dtype == torch.float64 else dtype
        size = (length, *shape)
        if file is None:
            self.tensor = torch.zeros(size, dtype=dtype, device=device)
        else:
            self.tensor = _mapped(file, size, dtype)
        half = dtype == torch.bfloat16
        on_cpu = self.tensor.device.type == "cpu"
        self.view = self.tensor.numpy() if on_cpu and not half else None
        """The tensor's memory as an array, where there is such a thing."""

    def __setitem__(self, row: Any, value: Array) -> None:
        """Set rows; `value` broadcasts to them."""
        if self.view is None:
            rows = torch.as_tensor(row) if isinstance(row, np.ndarray) else row
            self.tensor[rows] = torch.as_tensor(value).to(self.tensor)
            return
        self.view[row] = value if type(value) is np.ndarray else as_numpy(value)

    def take(self, indices: Indices) -> torch.Tensor:
        """Return the rows at `indices`, copied."""
        return take_rows(self.tensor, indices)

    def grow(self, length: int, *, file: pathlib.Path | None = None) -> None:
        """Lengthen to `length` rows, keeping what is written."""
        shape, device = tuple(self.tensor.shape[1:]), str(self.tensor.device)
        longer = Column(length, shape, self.tensor.dtype, device=device, file=file)
        longer.tensor[: len(self.tensor)] = self.tensor
        self.tensor, self.view = longer.tensor, longer.view


def _mapped(file: pathlib.Path, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros that lives in `file`, which the file system fills on first write."""
    item = torch.empty(0, dtype=dtype).element_size()
    count = int(np.prod(size, dtype=np.int64))
    with file.open("wb") as handle:
        handle.truncate(max(1, count * item))
    flat = torch.from_file(str(file), shared=True, size=count * item, dtype=torch.uint8)
    return flat.view(dtype).reshape(size)
