"""Frames: values as bytes, for processes of one run on one machine. No pickle.

A frame is a JSON outline of nested containers and the raw memory of every array, aligned, so that
who receives it looks at the memory it arrived in. Knows: numbers, strings, bytes-free containers,
numpy arrays and scalars, torch tensors on the CPU, `EnvRet`, `PolicyResponse` and TensorDicts.
Everything else is refused, and travels another way.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.types import EnvRet, PolicyResponse

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ALIGNMENT", "UnframeableError", "decode", "encode"]

ALIGNMENT = 64
"""Every array begins at a multiple of so many bytes."""
_COPIED_BYTES = 4096
"""Arrays of up to that many bytes are copied, which is quicker than to refer to them."""
_PLAIN = (str, int, float, bool, type(None))
_KINDS = "biufc"
Buffer = Any
"""Something that has the buffer protocol."""


class UnframeableError(TypeError):
    """A value holds something that a frame cannot carry."""


def encode(value: Any) -> tuple[bytes, list[Buffer], int]:
    """Return the outline of `value`, the memory of its arrays in order, and that memory's size.

    Every array takes a multiple of `ALIGNMENT` bytes; who writes it fills up what is missing.

    Raises:
        UnframeableError: something in it is of no known type.
    """
    writer = _Writer()
    outline = writer.outline(value)
    return json.dumps(outline, separators=(",", ":")).encode(), writer.buffers, writer.size


def decode(outline: bytes | bytearray, memory: np.ndarray[Any, Any]) -> Any:
    """Return the value that `encode` was given; its arrays are views of `memory`.

    Args:
        outline: what `encode` returned first.
        memory: ``[size]`` uint8, aligned to 64 bytes, writable.
    """
    return _read(json.loads(outline), memory)


def aligned(size: int) -> np.ndarray[Any, Any]:
    """Return ``[size]`` uint8 of new memory that begins at a multiple of 64 bytes."""
    room = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT if size else 0
    return room[start : start + size]


class _Writer:
    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.size = 0

    def outline(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is np.ndarray:
            return self._array("a", value)
        if kind is dict:
            return ["d", self._plain_keys(value), [self.outline(item) for item in value.values()]]
        if kind is list or kind is tuple:
            return ["l" if kind is list else "u", [self.outline(item) for item in value]]
        if kind is EnvRet:
            return ["E", *[self.outline(item) for item in vars(value).values()]]
        if kind is PolicyResponse:
            return ["R", value.env_id, self.outline(value.extras), value.ts_policy_sent_ns]
        if isinstance(value, np.generic):
            return self._array("s", np.asarray(value))
        return self._of_torch(value)

    def _plain_keys(self, value: dict[Any, Any]) -> list[Any]:
        keys = list(value)
        if any(type(key) not in _PLAIN for key in keys):
            raise UnframeableError("a dictionary has keys that are no strings or numbers")
        return keys

    def _array(self, tag: str, array: np.ndarray[Any, Any], name: str = "") -> Any:
        dtype = array.dtype
        if dtype.kind not in _KINDS or not dtype.isnative:
            raise UnframeableError(f"an array has the dtype {dtype}")
        size = array.nbytes
        small = size <= _COPIED_BYTES
        self.buffers.append(array.tobytes() if small else _flat(array))
        start = self.size
        self.size = start + size + -size % ALIGNMENT
        return [tag, name or dtype.str, array.shape, start]

    def _of_torch(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor:
            if value.layout is not torch.strided or value.is_quantized:
                raise UnframeableError("a tensor is sparse or quantised")
            if value.dtype is torch.bfloat16:
                return self._array("t", _plain(value).view(torch.int16).numpy(), "bfloat16")
            simple = not value.requires_grad and value.is_cpu and not value.is_complex()
            return self._array("t", (value if simple else _plain(value)).numpy())
        tensordict = sys.modules.get("tensordict")
        if tensordict is not None and type(value) is tensordict.TensorDict:
            return ["T", list(value.batch_size), self.outline(value.to_dict())]
        raise UnframeableError(f"a {type(value).__name__} is no number, string, array or container")


def _plain(tensor: Any) -> Any:
    """Return `tensor` on the CPU, without a gradient, as its memory says."""
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def _flat(array: np.ndarray[Any, Any]) -> Buffer:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _read(node: Any, memory: np.ndarray[Any, Any]) -> Any:
    if type(node) is not list:
        return node
    tag = node[0]
    if tag == "a":
        return _view(node, memory)
    if tag == "d":
        return dict(zip(node[1], [_read(item, memory) for item in node[2]], strict=True))
    if tag == "l":
        return [_read(item, memory) for item in node[1]]
    if tag == "u":
        return tuple(_read(item, memory) for item in node[1])
    if tag == "E":
        return EnvRet(*[_read(item, memory) for item in node[1:]])
    if tag == "R":
        response = PolicyResponse(node[1], **_read(node[2], memory))
        response.ts_policy_sent_ns = node[3]
        return response
    return _view(node, memory)[()] if tag == "s" else _read_torch(node, memory)


def _view(node: Sequence[Any], memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    _, name, shape, start = node
    dtype = np.dtype(name)
    count = 1
    for length in shape:
        count *= length
    part: np.ndarray[Any, Any] = memory[start : start + count * dtype.itemsize]
    array: np.ndarray[Any, Any] = part.view(dtype).reshape(shape)
    return array


def _read_torch(node: Any, memory: np.ndarray[Any, Any]) -> Any:
    import torch

    if node[0] == "t":
        if node[1] == "bfloat16":
            return torch.from_numpy(_view(["a", "<i2", *node[2:]], memory)).view(torch.bfloat16)
        return torch.from_numpy(_view(node, memory))
    from tensordict import TensorDict

    return TensorDict(_read(node[2], memory), batch_size=node[1])
