"""Move nested data between numpy and torch. Torch is loaded only when a device is asked for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_LEAVES = (np.ndarray, np.generic, float, int, bool, str)
"""Frequent leaves, told apart before containers are looked for."""

__all__ = ["is_tensor", "map_leaves", "to_device", "to_numpy"]


def is_tensor(value: Any) -> bool:
    """Return whether `value` is a torch tensor, without loading torch."""
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(value, torch_module.Tensor)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply `function` to every leaf of nested dicts, lists and tuples; keep the containers."""
    if isinstance(value, _LEAVES):
        return function(value)
    if isinstance(value, dict):
        return {key: map_leaves(function, item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_leaves(function, item) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_leaves(function, item) for item in value)
    return function(value)


def to_device(value: Any, device: str | torch.device) -> Any:
    """Return `value` with arrays and tensors as tensors on `device`; other leaves unchanged.

    CPU arrays share memory with the result. Unsigned 16-bit arrays stay unsigned 16-bit.
    """
    import torch  # only who moves data to a device needs torch

    def move(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            if leaf.dtype.kind not in "bifu":
                return leaf
            tensor = torch.from_numpy(leaf if _can_be_shared(leaf) else _native_copy(leaf))
            return tensor if device == "cpu" else tensor.to(device)
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device)
        if isinstance(leaf, np.generic) and leaf.dtype.kind in "bifu":
            return torch.as_tensor(leaf).to(device)
        return leaf

    return map_leaves(move, value)


def _can_be_shared(array: np.ndarray[Any, Any]) -> bool:
    """Return whether torch can look at the array's memory.

    It reads no negative strides and no swapped bytes, and warns of memory it must not write.
    """
    flags = array.flags
    return bool(flags.c_contiguous and flags.writeable and array.dtype.isnative)


def _native_copy(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.array(array, dtype=array.dtype.newbyteorder("="), order="C")


def to_numpy(value: Any) -> Any:
    """Return `value` with every tensor as a numpy array; bfloat16, which numpy lacks, as float32.

    The upcast is exact: every bfloat16 number is a float32 number.
    """

    def convert(leaf: Any) -> Any:
        if not is_tensor(leaf):
            return leaf
        leaf = leaf.detach().cpu()
        if str(leaf.dtype) == "torch.bfloat16":
            leaf = leaf.float()
        return leaf.numpy()

    return map_leaves(convert, value)
