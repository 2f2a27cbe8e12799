"""Move nested data between numpy and torch. Torch is loaded only when a device is asked for."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_LEAVES = (np.ndarray, np.generic, float, int, bool, str)
"""Frequent leaves, told apart before containers are looked for."""

__all__ = ["device_mover", "is_tensor", "map_leaves", "to_device", "to_numpy"]


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
    return device_mover(device)(value)


@functools.lru_cache(maxsize=32)
def device_mover(device: str | torch.device) -> Callable[[Any], Any]:
    """Return the function that `to_device` is for this device; who moves much keeps it."""
    import torch  # only who moves data to a device needs torch

    from_numpy, on_cpu = torch.from_numpy, device == "cpu"

    def move_leaf(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray):
            dtype = leaf.dtype
            if dtype.kind not in "bifu":
                return leaf
            # Torch reads no negative strides and no swapped bytes, and warns of read-only memory.
            shareable = leaf.flags.carray and dtype.isnative
            tensor = from_numpy(leaf if shareable else _native_copy(leaf))
            return tensor if on_cpu else tensor.to(device)
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device)
        if isinstance(leaf, np.generic) and leaf.dtype.kind in "bifu":
            return torch.as_tensor(leaf).to(device)
        return leaf

    def move(value: Any) -> Any:
        return move_leaf(value) if type(value) is np.ndarray else map_leaves(move_leaf, value)

    return move


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
