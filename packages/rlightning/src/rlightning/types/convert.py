"""Move nested data between numpy and torch. Torch is loaded only when a device is asked for."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["is_tensor", "map_leaves", "to_device", "to_numpy"]


def is_tensor(value: Any) -> bool:
    """Return whether `value` is a torch tensor, without loading torch."""
    torch_module = sys.modules.get("torch")
    return torch_module is not None and isinstance(value, torch_module.Tensor)


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply `function` to every leaf of nested dicts, lists and tuples; keep the containers."""
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
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device)
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "bifu":
            if not leaf.flags.writeable or not leaf.dtype.isnative or _negative_stride(leaf):
                leaf = np.array(leaf, dtype=leaf.dtype.newbyteorder("="))
            return torch.from_numpy(leaf).to(device)
        if isinstance(leaf, np.generic) and leaf.dtype.kind in "bifu":
            return torch.as_tensor(leaf).to(device)
        return leaf

    return map_leaves(move, value)


def _negative_stride(array: np.ndarray[Any, Any]) -> bool:
    return any(stride < 0 for stride in array.strides)


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
