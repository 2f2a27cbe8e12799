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
import functools
import marshal
import math
import struct
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

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
    from collections.abc import Sequence

__all__ = [
    "ALIGNMENT",
    "UnframeableError",
    "aligned",
    "decode",
    "encode",
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
_STAMP = struct.Struct("<q")
"""When an `EnvRet` or a `PolicyResponse` was sent: the first thing in its memory, since outlines
are those of the step before."""
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


def decode(outline: bytes, memory: Memory, *, sealed: bool = False, as_arrays: bool = False) -> Any:
    """Return the value that `encode` was given; its arrays are views of `memory`.

    Args:
        outline: what `encode` returned first.
        memory: ``[size]`` uint8, aligned to 64 bytes, writable.
        sealed: whether each `EnvRet` and `PolicyResponse` stays closed until it is read.
        as_arrays: whether the tensors of responses become arrays.
    """
    return _reader(outline, sealed=sealed, as_arrays=as_arrays)(memory)


def aligned(size: int) -> np.ndarray[Any, Any]:
    """Return ``[size]`` uint8 of new memory that begins at a multiple of 64 bytes."""
    if size > _SMALL_BYTES:
        return _new(size)
    with _piece_lock:
        piece: np.ndarray[Any, Any] = _pieces[0]
        if len(piece) < size:
            piece = _new(_PIECE_BYTES)
        _pieces[0] = piece[size + -size % ALIGNMENT :]
    return piece[:size]


def _new(size: int) -> np.ndarray[Any, Any]:
    room = np.empty(size + ALIGNMENT, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT if size else 0
    return room[start : start + size]


_SMALL_BYTES, _PIECE_BYTES = 1 << 12, 1 << 16
"""Small pieces of memory are cut from larger ones: to ask where memory begins takes longer than
all else that is done with it."""
_pieces = [_new(0)]
_piece_lock = threading.Lock()


def with_arrays(response: PolicyResponse) -> PolicyResponse:
    """Return the same response with its tensors as arrays; a sealed one stays sealed."""
    content = content_of(response)
    if content is None:
        return PolicyResponse(response.env_id, **to_numpy(response.extras))
    arrays = _Content(content.outline, content.memory, as_arrays=True)
    return seal_response(response.env_id, response.ts_policy_sent_ns, arrays)


class _Content:
    """A frame inside a frame: the fields of an `EnvRet` or a `PolicyResponse`."""

    __slots__ = ("as_arrays", "memory", "outline")

    def __init__(self, outline: bytes, memory: Memory, *, as_arrays: bool) -> None:
        self.outline = outline
        self.memory = memory
        self.as_arrays = as_arrays

    def read(self) -> Any:
        reader = _reader(self.outline, sealed=False, as_arrays=self.as_arrays)
        return reader(self.memory)


# ---- writing -------------------------------------------------------------------------------------


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
            return self._again("E", value.env_id, content)
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
            return self._again("R", value.env_id, content)
        return self._inside("R", value.env_id, value.ts_policy_sent_ns, (value.extras,))

    def _inside(self, tag: str, env_id: str, sent_ns: int, fields: tuple[Any, ...]) -> Any:
        outline, buffers, size = _inside((tag, env_id), fields)
        start = self.size
        self.buffers.append(_STAMP.pack(sent_ns).ljust(ALIGNMENT, b"\0"))
        self.buffers += buffers
        self.size = start + ALIGNMENT + size
        return (tag, env_id, outline, start, ALIGNMENT + size, False)

    def _again(self, tag: str, env_id: str, content: _Content) -> Any:
        start, size = self.size, len(content.memory)
        self.buffers.append(content.memory)
        self.size = start + size
        return (tag, env_id, content.outline, start, size, content.as_arrays)

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


def _inside(key: tuple[str, str], fields: tuple[Any, ...]) -> tuple[bytes, list[Buffer], int]:
    """Return what `encode` does of `fields`, which mostly look like those before under this key."""
    known = _known.get(key)
    if known is not None and known.write is not None:
        try:
            return known.outline, known.write(fields), known.size
        except _DiffersError:
            pass
    writer = _Writer()
    writer.size = ALIGNMENT  # behind the time stamp
    outline = marshal.dumps(writer.outline(fields), _FORMAT)
    size = writer.size - ALIGNMENT
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    again = known is not None and known.outline == outline
    _known[key] = _Known(outline, size, _writer(outline) if again else None)
    return outline, writer.buffers, size


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


class _DiffersError(Exception):
    """A value does not look like the one before."""


Write = Callable[[Any], list[Buffer]]
"""Returns the memory of a value's arrays, if it looks as expected."""


class _Known(NamedTuple):
    """What an `EnvRet` or a `PolicyResponse` of somebody looked like."""

    outline: bytes
    size: int
    write: Write | None
    """Writes the next one; None where there were not two of a kind yet."""


_known: dict[tuple[str, str], _Known] = {}
_MOST_KNOWN = 256


@functools.lru_cache(maxsize=_MOST_KNOWN)
def _writer(outline: bytes) -> Write | None:
    """Return what writes values with this outline; None where that saves nothing."""
    try:
        checks = _Expected().of(marshal.loads(outline))
    except KeyError:  # something seldom, or never the same
        return None

    def write(value: Any) -> list[Buffer]:
        buffers: list[Buffer] = []
        checks(value, buffers)
        return buffers

    return write


class _Expected:
    """Makes functions that check a value against an outline and collect its memory."""

    def of(self, node: Any) -> Callable[[Any, list[Buffer]], None]:
        if type(node) is tuple:
            return _EXPECTED[node[0]](self, node)
        kind = type(node)
        if kind is float:
            raise KeyError(node)  # of equal ones, 0.0 and -0.0 are not the same

        def check(value: Any, _: list[Buffer]) -> None:
            if type(value) is not kind or value != node:
                raise _DiffersError

        return check

    def array(self, node: Any) -> Callable[[Any, list[Buffer]], None]:
        _, char, shape, _ = node
        kind, dtype = np.ndarray, _DTYPES[char]
        size = dtype.itemsize * math.prod(shape)
        taken, small = size + -size % ALIGNMENT, size <= _COPIED_BYTES

        def check(value: Any, buffers: list[Buffer]) -> None:
            if type(value) is not kind or value.dtype is not dtype or value.shape != shape:
                raise _DiffersError
            buffers.append(value.tobytes().ljust(taken, b"\0") if small else _flat(value))

        return check

    def tensor(self, node: Any) -> Callable[[Any, list[Buffer]], None]:
        _, char, shape, start = node
        import torch

        kind, strided = torch.Tensor, torch.strided
        dtype = torch.from_numpy(np.empty(0, _DTYPES[char])).dtype
        collect = self.array(("a", char, shape, start))

        def check(value: Any, buffers: list[Buffer]) -> None:
            same = type(value) is kind and value.dtype is dtype and value.layout is strided
            if not same or value.requires_grad or not value.is_cpu:
                raise _DiffersError
            collect(value.numpy(), buffers)

        return check

    def dictionary(self, node: Any) -> Callable[[Any, list[Buffer]], None]:
        _, keys, nodes = node
        checks = [self.of(item) for item in nodes]

        def check(value: Any, buffers: list[Buffer]) -> None:
            if type(value) is not dict or tuple(value) != keys:
                raise _DiffersError
            for one, item in zip(checks, value.values(), strict=True):
                one(item, buffers)

        return check

    def tuple_(self, node: Any) -> Callable[[Any, list[Buffer]], None]:
        checks = [self.of(item) for item in node[1:]]

        def check(value: Any, buffers: list[Buffer]) -> None:
            if type(value) is not tuple or len(value) != len(checks):
                raise _DiffersError
            for one, item in zip(checks, value, strict=True):
                one(item, buffers)

        return check


_EXPECTED: dict[str, Callable[[_Expected, Any], Callable[[Any, list[Buffer]], None]]] = {
    "a": _Expected.array,
    "t": _Expected.tensor,
    "d": _Expected.dictionary,
    "u": _Expected.tuple_,
}


def _plain(tensor: Any) -> Any:
    """Return `tensor` on the CPU, without a gradient, as its memory says."""
    return tensor.detach().cpu().resolve_conj().resolve_neg()


def _flat(array: np.ndarray[Any, Any]) -> Buffer:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


# ---- reading -------------------------------------------------------------------------------------

Read = Callable[[Memory], Any]
"""Makes a value of the memory of a frame."""


@functools.lru_cache(maxsize=256)
def _reader(outline: bytes, *, sealed: bool, as_arrays: bool) -> Read:
    """Return what reads frames with this outline: most are like one that came before."""
    return _Form(sealed=sealed, as_arrays=as_arrays).of(marshal.loads(outline))


class _Form:
    """Makes readers of outlines."""

    def __init__(self, *, sealed: bool, as_arrays: bool) -> None:
        self._sealed = sealed
        self._as_arrays = as_arrays

    def of(self, node: Any) -> Read:
        if type(node) is not tuple:
            return lambda _: node
        return _FORMS[node[0]](self, node)

    def _several(self, nodes: Sequence[Any]) -> Callable[[Memory], list[Any]]:
        if tuple not in set(map(type, nodes)):
            return lambda _: list(nodes)
        readers = [self.of(node) for node in nodes]
        return lambda memory: [read(memory) for read in readers]

    def array(self, node: Any) -> Read:
        _, char, shape, start = node
        make, dtype = np.ndarray, _DTYPES[char]
        return lambda memory: make(shape, dtype, memory, start)

    def scalar(self, node: Any) -> Read:
        read = self.array(node)
        return lambda memory: read(memory)[()]

    def dictionary(self, node: Any) -> Read:
        keys, values = node[1], self._several(node[2])
        return lambda memory: dict(zip(keys, values(memory), strict=True))

    def ordered(self, node: Any) -> Read:
        items, attributes = self.dictionary(node[1]), self.dictionary(node[2])

        def read(memory: Memory) -> Any:
            value = collections.OrderedDict(items(memory))
            vars(value).update(attributes(memory))
            return value

        return read

    def list_(self, node: Any) -> Read:
        return self._several(node[1:])

    def tuple_(self, node: Any) -> Read:
        items = self._several(node[1:])
        return lambda memory: tuple(items(memory))

    def tensor(self, node: Any) -> Read:
        tag, name, shape, start = node
        if name == _BFLOAT16:
            bits = self.array((tag, "h", shape, start))
            if self._as_arrays:  # as `to_numpy` has it: the same numbers in 32 bits
                return lambda memory: (bits(memory).astype(np.uint32) << 16).view(np.float32)
            return lambda memory: _tensor_of(bits(memory)).view(sys.modules["torch"].bfloat16)
        array = self.array(node)
        return array if self._as_arrays else lambda memory: _tensor_of(array(memory))

    def tensordict(self, node: Any) -> Read:
        from tensordict import TensorDict

        batch_size, items = node[1], self.of(node[2])
        return lambda memory: TensorDict(items(memory), batch_size=batch_size)

    def exchanged(self, node: Any) -> Read:
        tag, env_id, outline, start, size, as_arrays = node
        as_arrays = as_arrays or self._as_arrays
        end, stamp = start + size, _STAMP.unpack_from
        if self._sealed:
            seal: Callable[[str, int, _Content], Any]
            seal = seal_env_ret if tag == "E" else seal_response

            def read(memory: Memory) -> Any:
                content = _Content(outline, memory[start:end], as_arrays=as_arrays)
                return seal(env_id, stamp(memory, start)[0], content)

            return read
        make = _env_ret if tag == "E" else _response
        fields = _reader(outline, sealed=False, as_arrays=as_arrays)
        return lambda memory: make(env_id, stamp(memory, start)[0], fields(memory[start:end]))


_FORMS: dict[str, Callable[[_Form, Any], Read]] = {
    "a": _Form.array,
    "s": _Form.scalar,
    "t": _Form.tensor,
    "d": _Form.dictionary,
    "o": _Form.ordered,
    "l": _Form.list_,
    "u": _Form.tuple_,
    "T": _Form.tensordict,
    "E": _Form.exchanged,
    "R": _Form.exchanged,
}


def _env_ret(env_id: str, sent_ns: int, fields: Any) -> Any:
    return EnvRet(env_id, *fields, sent_ns)  # type: ignore[call-arg]  # six of them


def _response(env_id: str, sent_ns: int, fields: Any) -> Any:
    response = PolicyResponse(env_id, **fields[0])
    response.ts_policy_sent_ns = sent_ns
    return response


def _tensor_of(array: np.ndarray[Any, Any]) -> Any:
    import torch

    return torch.from_numpy(array)
