"""Frames: values as bytes, for processes of one run on one machine. No pickle.

A frame is an outline of nested containers, in the form of `marshal`, which carries plain data and
nothing that runs, and the raw memory of every array, aligned, so that who receives it looks at the
memory it arrived in. Knows: numbers, strings, bytes-free containers, numpy arrays and scalars,
torch tensors on the CPU, `EnvRet`, `PolicyResponse` and TensorDicts. Everything else is refused,
and travels another way.

An `EnvRet` and a `PolicyResponse` are frames inside the frame. Who only passes them on may leave
them sealed (`rlightning.runtime.sealed`); they are written again as they came.
"""

from __future__ import annotations

import collections
import marshal
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.runtime.sealed import (
    SealedEnvRet,
    SealedResponse,
    content_of,
    seal_env_ret,
    seal_response,
)
from rlightning.types import EnvRet, PolicyResponse, to_numpy

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "ALIGNMENT",
    "UnframeableError",
    "aligned",
    "decode",
    "encode",
    "opened",
    "sealed_copy",
    "with_arrays",
]

ALIGNMENT = 64
"""Every array begins at a multiple of so many bytes."""
_COPIED_BYTES = 4096
"""Arrays of up to that many bytes are copied, which is quicker than to refer to them."""
_FORMAT = 0
"""Of `marshal`: the one without references between objects, which is the quickest."""
_PLAIN = frozenset((str, int, float, bool, type(None)))
_DTYPES = {char: np.dtype(char) for char in "?bBhHiIlLqQefdgFDG"}
"""What arrays may hold: booleans and numbers, by the letter for them."""
_BFLOAT16 = "bfloat16"
Buffer = Any
"""Something that has the buffer protocol."""
Memory = Any
"""``[size]`` uint8, aligned to 64 bytes, writable."""


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
    return marshal.dumps(outline, _FORMAT), writer.buffers, writer.size


def decode(outline: bytes | bytearray, memory: Memory, *, sealed: bool = False) -> Any:
    """Return the value that `encode` was given; its arrays are views of `memory`.

    Args:
        outline: what `encode` returned first.
        memory: ``[size]`` uint8, aligned to 64 bytes, writable.
        sealed: whether each `EnvRet` and `PolicyResponse` stays closed until it is read.
    """
    return _Reader(memory, sealed=sealed).value(marshal.loads(outline))


def aligned(size: int) -> np.ndarray[Any, Any]:
    """Return ``[size]`` uint8 of new memory that begins at a multiple of 64 bytes."""
    room = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT if size else 0
    return room[start : start + size]


def with_arrays(response: PolicyResponse) -> PolicyResponse:
    """Return the same response with its tensors as arrays; a sealed one stays sealed."""
    content = content_of(response)
    if content is None:
        return PolicyResponse(response.env_id, **to_numpy(response.extras))
    arrays = _Content(content.outline, content.memory, as_arrays=True)
    return seal_response(response.env_id, response.ts_policy_sent_ns, arrays)


def sealed_copy(value: Any) -> Any:
    """Return `value`, an `EnvRet` or a `PolicyResponse` sealed, with memory of its own.

    Raises:
        UnframeableError: something in it is of no known type.
    """
    outline, buffers, size = encode(value)
    memory = aligned(size)
    start = 0
    for buffer in buffers:
        memory[start : start + len(buffer)] = np.frombuffer(buffer, np.uint8)
        start += len(buffer) + -len(buffer) % ALIGNMENT
    return decode(outline, memory, sealed=True)


def opened(response: Any, *, as_arrays: bool = False) -> Any:
    """Return a copy of a sealed response, with memory of its own; other values as they are.

    Args:
        response: may be a `PolicyResponse` that is sealed.
        as_arrays: whether its tensors become arrays.
    """
    content = content_of(response) if isinstance(response, PolicyResponse) else None
    if content is None:
        return response
    memory = aligned(len(content.memory))
    memory[:] = content.memory
    inside = (content.outline, 0, len(memory), as_arrays or content.as_arrays)
    return _Reader(memory).response(("R", response.env_id, response.ts_policy_sent_ns, *inside))


class _Content:
    """A frame inside a frame: the fields of an `EnvRet` or a `PolicyResponse`."""

    __slots__ = ("as_arrays", "memory", "outline")

    def __init__(self, outline: bytes, memory: Memory, *, as_arrays: bool) -> None:
        self.outline = outline
        self.memory = memory
        self.as_arrays = as_arrays

    def read(self) -> list[Any]:
        reader = _Reader(self.memory, as_arrays=self.as_arrays)
        return [reader.value(node) for node in marshal.loads(self.outline)]


class _Writer:
    """Collects memory while it makes the outline: plain values, and tuples for all others."""

    __slots__ = ("buffers", "size")

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self.size = 0

    def outline(self, value: Any) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        write = _WRITERS.get(kind)
        if write is not None:
            return write(self, value)
        if isinstance(value, np.generic):
            return self.array(np.asarray(value), "s")
        return self._of_torch(value)

    def array(self, array: np.ndarray[Any, Any], tag: str = "a", name: str = "") -> Any:
        dtype = array.dtype
        char = dtype.char
        if char not in _DTYPES or not dtype.isnative:
            raise UnframeableError(f"an array has the dtype {dtype}")
        size, start = array.nbytes, self.size
        taken = size + -size % ALIGNMENT
        self.buffers.append(
            array.tobytes().ljust(taken, b"\0") if size <= _COPIED_BYTES else _flat(array)
        )
        self.size = start + taken
        return (tag, name or char, array.shape, start)

    def dictionary(self, value: dict[Any, Any]) -> Any:
        if not _PLAIN.issuperset(map(type, value)):
            raise UnframeableError("a dictionary has keys that are no strings or numbers")
        return ("d", tuple(value), tuple(map(self.outline, value.values())))

    def ordered(self, value: collections.OrderedDict[Any, Any]) -> Any:
        """A module's state is one; its attribute says of which versions the modules are."""
        return ("o", self.dictionary(value), self.dictionary(vars(value)))

    def list_(self, value: list[Any]) -> Any:
        return ("l", *map(self.outline, value))

    def tuple_(self, value: tuple[Any, ...]) -> Any:
        return ("u", *map(self.outline, value))

    def env_ret(self, value: EnvRet) -> Any:
        content = content_of(value)
        if content is not None:
            return self._again("E", value.env_id, value.ts_env_sent_ns, content)
        fields = (
            value.observation,
            value.last_reward,
            value.last_terminated,
            value.last_truncated,
            value.info,
            value._extra,
        )
        return self._inside("E", value.env_id, value.ts_env_sent_ns, fields)

    def response(self, value: PolicyResponse) -> Any:
        content = content_of(value)
        if content is not None:
            return self._again("R", value.env_id, value.ts_policy_sent_ns, content)
        return self._inside("R", value.env_id, value.ts_policy_sent_ns, (value.extras,))

    def _inside(self, tag: str, env_id: str, sent_ns: int, fields: tuple[Any, ...]) -> Any:
        writer = _Writer()
        outline = marshal.dumps(tuple(map(writer.outline, fields)), _FORMAT)
        start = self.size
        self.buffers += writer.buffers
        self.size = start + writer.size
        return (tag, env_id, sent_ns, outline, start, writer.size, False)

    def _again(self, tag: str, env_id: str, sent_ns: int, content: _Content) -> Any:
        start, size = self.size, len(content.memory)
        if size:
            self.buffers.append(content.memory)
            self.size = start + size
        return (tag, env_id, sent_ns, content.outline, start, size, content.as_arrays)

    def _of_torch(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and type(value) is torch.Tensor:
            if value.layout is not torch.strided or value.is_quantized:
                raise UnframeableError("a tensor is sparse or quantised")
            if value.dtype is torch.bfloat16:
                bits = _plain(value).view(torch.int16).numpy()
                return self.array(bits, "t", _BFLOAT16)
            simple = not value.requires_grad and value.is_cpu and not value.is_complex()
            return self.array((value if simple else _plain(value)).numpy(), "t")
        tensordict = sys.modules.get("tensordict")
        if tensordict is not None and type(value) is tensordict.TensorDict:
            return ("T", tuple(value.batch_size), self.outline(value.to_dict()))
        raise UnframeableError(f"a {type(value).__name__} is no number, string, array or container")


_WRITERS: dict[type[Any], Callable[[_Writer, Any], Any]] = {
    np.ndarray: _Writer.array,
    dict: _Writer.dictionary,
    collections.OrderedDict: _Writer.ordered,
    list: _Writer.list_,
    tuple: _Writer.tuple_,
    EnvRet: _Writer.env_ret,
    SealedEnvRet: _Writer.env_ret,
    PolicyResponse: _Writer.response,
    SealedResponse: _Writer.response,
}


def _plain(tensor: Any) -> Any:
    """Return `tensor` on the CPU, without a gradient, as its memory says."""
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def _flat(array: np.ndarray[Any, Any]) -> Buffer:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


class _Reader:
    __slots__ = ("_as_arrays", "_memory", "_sealed")

    def __init__(self, memory: Memory, *, sealed: bool = False, as_arrays: bool = False) -> None:
        self._memory = memory
        self._sealed = sealed
        self._as_arrays = as_arrays

    def value(self, node: Any) -> Any:
        return node if type(node) is not tuple else _READERS[node[0]](self, node)

    def array(self, node: Any) -> np.ndarray[Any, Any]:
        _, char, shape, start = node
        return np.ndarray(shape, _DTYPES[char], self._memory, start)

    def scalar(self, node: Any) -> Any:
        return self.array(node)[()]

    def dictionary(self, node: Any) -> Any:
        return dict(zip(node[1], map(self.value, node[2]), strict=True))

    def ordered(self, node: Any) -> Any:
        value = collections.OrderedDict(self.dictionary(node[1]))
        vars(value).update(self.dictionary(node[2]))
        return value

    def list_(self, node: Any) -> Any:
        return [self.value(item) for item in node[1:]]

    def tuple_(self, node: Any) -> Any:
        return tuple([self.value(item) for item in node[1:]])

    def tensor(self, node: Any) -> Any:
        tag, name, shape, start = node
        if name != _BFLOAT16:
            array = self.array(node)
            return array if self._as_arrays else _tensor_of(array)
        bits = self.array((tag, "h", shape, start))
        if self._as_arrays:  # as `to_numpy` has it: the same numbers in 32 bits
            return (bits.astype(np.uint32) << 16).view(np.float32)
        tensor = _tensor_of(bits)
        return tensor.view(sys.modules["torch"].bfloat16)

    def tensordict(self, node: Any) -> Any:
        from tensordict import TensorDict

        return TensorDict(self.value(node[2]), batch_size=node[1])

    def env_ret(self, node: Any) -> EnvRet:
        _, env_id, sent_ns, *inside = node
        content = self._content(*inside)
        if self._sealed:
            return seal_env_ret(env_id, sent_ns, content)
        return EnvRet(env_id, *content.read(), sent_ns)  # type: ignore[call-arg]  # six of them

    def response(self, node: Any) -> PolicyResponse:
        _, env_id, sent_ns, *inside = node
        content = self._content(*inside)
        if self._sealed:
            return seal_response(env_id, sent_ns, content)
        response = PolicyResponse(env_id, **content.read()[0])
        response.ts_policy_sent_ns = sent_ns
        return response

    def _content(self, outline: bytes, start: int, size: int, as_arrays: bool) -> _Content:  # noqa: FBT001  # as it stands in the frame
        return _Content(outline, self._memory[start : start + size], as_arrays=as_arrays)


_READERS: dict[str, Callable[[_Reader, Any], Any]] = {
    "a": _Reader.array,
    "s": _Reader.scalar,
    "t": _Reader.tensor,
    "d": _Reader.dictionary,
    "o": _Reader.ordered,
    "l": _Reader.list_,
    "u": _Reader.tuple_,
    "T": _Reader.tensordict,
    "E": _Reader.env_ret,
    "R": _Reader.response,
}


def _tensor_of(array: np.ndarray[Any, Any]) -> Any:
    import torch

    return torch.from_numpy(array)
