"""Weights as two plain values, for whatever carries them from machine to machine.

A cluster's object store shares one large numpy array between processes without a copy, and is slow
with many torch tensors. So: `pack` a set into text and one array, send both, `unpack` at the other
end, where the tensors are views of what arrived. To be loaded or published at once; not changed.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rlightning.weights.layout import Layout, copy_into, memory_for

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["PackedWeights", "pack", "unpack"]


class PackedWeights(NamedTuple):
    """A set of weights, ready to travel."""

    layout: bytes
    """What is where in `data`."""
    data: npt.NDArray[np.uint8]
    """``[bytes]``: all tensors."""

    def unpack(self) -> Any:
        """Return the weights; their tensors are views of `data` and keep it alive."""
        layout = Layout.from_json(self.layout)
        return layout.build(layout.views(_tensor_of(self.data)))


def pack(weights: Any, into: PackedWeights | None = None) -> PackedWeights:
    """Return a copy of `weights` in one array.

    Args:
        weights: what `export_weights` of a policy returned, or any nesting of tensors.
        into: memory to use again, where it fits; it must not be on its way any more.

    Raises:
        ContractError: `weights` holds something that does not travel between processes.
    """
    layout, tensors = Layout.of(weights)
    if into is not None and into.data.nbytes == layout.size_bytes:
        memory = torch.from_numpy(into.data)
    else:
        memory = memory_for(layout, "cpu")
    copy_into(layout.views(memory), tensors)
    return PackedWeights(layout.to_json(), memory.numpy())


def unpack(packed: PackedWeights) -> Any:
    """Return the weights; their tensors are views of `packed.data` and keep it alive."""
    return packed.unpack()


def _tensor_of(data: npt.NDArray[np.uint8]) -> torch.Tensor:
    """Return a tensor over an array, also over one that is not to be written to.

    Torch has no read-only tensors and warns of such arrays; what an object store lends is one.
    """
    if data.flags.writeable or not data.nbytes:
        return torch.from_numpy(data if data.nbytes else data.copy())
    window = (ctypes.c_uint8 * data.nbytes).from_address(data.ctypes.data)
    window.owner = data  # type: ignore[attr-defined]  # the array lives as long as its window
    return torch.from_numpy(np.ctypeslib.as_array(window))
