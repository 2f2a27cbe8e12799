"""Turn messages into msgpack frames and back; arrays come out as views on the frame.

Encoding goes through ``msgpack``. Decoding is written by hand, because msgpack copies every ``bin``
and applies no bound to depth or to the number of keys: here each array is a read-only view on the
frame, each bound is checked before anything is built, and nothing but maps, lists, scalars, strings
and plain numeric arrays can come out. The module knows nothing of messages, sockets or time.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from struct import Struct
from struct import error as struct_error
from typing import Any, Final

import msgpack
import numpy as np

from plugrl_protocol.errors import CodecError
from plugrl_protocol.templates import SMALL_BYTES, Array, Slot, Stencil, Template

# An empty array may claim any trailing shape; what it claims must still fit this many bytes.
_MAX_EMPTY_BYTES: Final = 2**32
_MAX_DIMENSIONS: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a frame may cost to decode."""

    max_depth: int = 16
    """Nested maps and lists; an array costs no level."""
    max_nodes: int = 65_536
    """Values in the whole tree; an array counts as one."""


SERVER_LIMITS: Final = Limits()
# Metadata of several megabytes must pass at the client.
CLIENT_LIMITS: Final = Limits(max_nodes=1_048_576)

_DTYPES: Final[dict[str, np.dtype[Any]]] = {
    order + kind: np.dtype(order + kind)
    for kind in ("b1", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
    for order in (("|", "<", ">") if kind[1] == "1" else ("<", ">"))
}
_TEXT_DTYPE: Final = re.compile(r"[<>]U[1-9][0-9]{0,8}")


def _lookup_dtype(name: Any) -> np.dtype[Any]:
    """Find the dtype of a typestr, or refuse it: only ``b u i f U`` are numbers and text."""
    if isinstance(name, str):
        found = _DTYPES.get(name)
        if found is not None:
            return found
        if _TEXT_DTYPE.fullmatch(name) and int(name[2:]) < 2**29:
            return np.dtype(name)
    raise CodecError(
        f"dtype {_short(name)} is refused; expected a typestr of kind b, u, i, f or U such as '<f4'"
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


# ---------------------------------------------------------------------------------------- encode

# How every known encoder begins an array: a map of four, the mark, then the key of the data.
_ARRAY_HEAD: Final = b"\x84\xc4\x0b__ndarray__\xc3\xc4\x04data"
_DTYPE_KEY: Final = b"\xc4\x05dtype"
_SHAPE_KEY: Final = b"\xc4\x05shape"
_MAX_CACHED: Final = 1024
_MAX_STENCILS: Final = 16


def _is_allowed(dtype: np.dtype[Any]) -> bool:
    return dtype.str in _DTYPES or _TEXT_DTYPE.fullmatch(dtype.str) is not None


class Encoder:
    """Encode messages. What does not change from message to message is prepared once.

    Not for use by two threads at once.
    """

    def __init__(self, limits: Limits = SERVER_LIMITS) -> None:
        self._packer = msgpack.Packer()
        self._max_depth = limits.max_depth
        self._keys: dict[str, bytes] = {}
        self._around: dict[tuple[np.dtype[Any], tuple[int, ...]], tuple[bytes, bytes]] = {}
        # Where the data of each array stands in the parts of the message being encoded.
        self._data_at: list[int] = []
        # By message_type; the length of the last frame until a second one of that length comes.
        self._stencils: dict[str | None, Stencil | int | None] = {}

    def encode(self, message: dict[str, Any]) -> bytes:
        """Encode one message.

        Args:
            message: a map with str keys; values are maps, lists, scalars, strings and arrays.

        Returns:
            The frame, byte-identical to openpi's codec.

        Raises:
            CodecError: an object, dtype, key or depth that the wire does not carry.
        """
        kind = message.get("message_type") if type(message) is dict else None
        if kind is not None and type(kind) is not str:
            kind = None
        known = self._stencils.get(kind, 0)
        if type(known) is Stencil:
            frame = known.fill(message)
            if frame is not None:
                return frame
        parts: list[Any] = []
        self._data_at.clear()
        try:
            self._put(message, parts, self._max_depth)
        except (TypeError, ValueError, OverflowError) as error:
            if isinstance(error, CodecError):
                raise
            raise CodecError(f"the message cannot be encoded: {error}") from error
        frame = b"".join(parts)
        if known is not None and type(message) is dict:
            self._keep(kind, message, parts, len(frame))
        return frame

    def _keep(
        self, kind: str | None, message: dict[str, Any], parts: list[Any], length: int
    ) -> None:
        """Note what a frame looks like; at the second of its length keep what will not change."""
        if self._stencils.get(kind) != length:
            if kind in self._stencils or len(self._stencils) < _MAX_STENCILS:
                self._stencils[kind] = length
            return
        starts = [0, *(place + 1 for place in self._data_at)]
        ends = [*self._data_at, len(parts)]
        between = [b"".join(parts[a:b]) for a, b in zip(starts, ends, strict=True)]
        try:
            self._stencils[kind] = Stencil(message, between)
        except ValueError:
            self._stencils[kind] = None  # no message of this kind is tried again

    def _put(self, value: Any, parts: list[Any], levels_left: int) -> None:
        if isinstance(value, np.ndarray):
            self._put_array(value, parts)
        elif isinstance(value, dict):
            _check_levels(levels_left)
            parts.append(self._packer.pack_map_header(len(value)))
            for key, child in value.items():
                parts.append(self._keys.get(key) or self._pack_key(key))
                self._put(child, parts, levels_left - 1)
        elif isinstance(value, (list, tuple)):
            _check_levels(levels_left)
            parts.append(self._packer.pack_array_header(len(value)))
            for child in value:
                self._put(child, parts, levels_left - 1)
        elif isinstance(value, np.generic) and not isinstance(value, (float, str, bytes)):
            parts.append(self._pack_scalar(value))
        else:
            parts.append(self._packer.pack(value))

    def _pack_key(self, key: Any) -> bytes:
        if not isinstance(key, str):
            raise CodecError(f"map key {_short(key)} is not a string; the wire has str keys")
        packed: bytes = self._packer.pack(key)
        if len(self._keys) < _MAX_CACHED:
            self._keys[key] = packed
        return packed

    def _put_array(self, array: Array, parts: list[Any]) -> None:
        around = self._around.get((array.dtype, array.shape))
        if around is None:
            around = self._pack_around(array)
        parts.append(around[0])
        self._data_at.append(len(parts))
        if array.nbytes <= SMALL_BYTES:
            parts.append(array.tobytes())
        else:
            parts.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        parts.append(around[1])

    def _pack_around(self, array: Array) -> tuple[bytes, bytes]:
        """Pack what stands before and after the data of an array."""
        if not _is_allowed(array.dtype):
            raise CodecError(
                f"an array of dtype {array.dtype} cannot travel; kinds b, u, i, f and U can"
            )
        pack = self._packer.pack
        around = (
            _ARRAY_HEAD + self._pack_bin_header(array.nbytes),
            _DTYPE_KEY + pack(array.dtype.str) + _SHAPE_KEY + pack(array.shape),
        )
        if len(self._around) >= _MAX_CACHED:
            self._around.clear()
        self._around[array.dtype, array.shape] = around
        return around

    @staticmethod
    def _pack_bin_header(length: int) -> bytes:
        for code, field in ((0xC4, Struct(">BB")), (0xC5, Struct(">BH")), (0xC6, Struct(">BI"))):
            if length < 1 << 8 * (field.size - 1):
                return field.pack(code, length)
        raise CodecError(f"an array of {length} bytes cannot travel; msgpack ends at 4 GiB")

    def _pack_scalar(self, value: np.generic) -> bytes:
        if value.dtype.str not in _DTYPES:
            raise CodecError(
                f"a numpy scalar of dtype {value.dtype} cannot travel; kinds b, u, i and f can"
            )
        packed: bytes = self._packer.pack(
            {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
        )
        return packed


def _check_levels(levels_left: int) -> None:
    if levels_left <= 0:
        raise CodecError("the tree is too deep to travel; flatten it")


def encode(message: dict[str, Any]) -> bytes:
    """Encode one message; see `Encoder.encode`."""
    return Encoder().encode(message)


# ---------------------------------------------------------------------------------------- decode

_NUMBERS: Final[dict[int, Struct]] = {
    0xCA: Struct(">f"),
    0xCB: Struct(">d"),
    0xCC: Struct(">B"),
    0xCD: Struct(">H"),
    0xCE: Struct(">I"),
    0xCF: Struct(">Q"),
    0xD0: Struct(">b"),
    0xD1: Struct(">h"),
    0xD2: Struct(">i"),
    0xD3: Struct(">q"),
}
_CONSTANTS: Final[dict[int, Any]] = {0xC0: None, 0xC2: False, 0xC3: True}
# Byte widths of the length fields: bin 8/16/32, str 8/16/32, array 16/32, map 16/32.
_LENGTHS: Final[dict[int, Struct]] = {
    **dict.fromkeys((0xC4, 0xD9), Struct(">B")),
    **dict.fromkeys((0xC5, 0xDA, 0xDC, 0xDE), Struct(">H")),
    **dict.fromkeys((0xC6, 0xDB, 0xDD, 0xDF), Struct(">I")),
}
_ARRAY_KEYS: Final = frozenset((b"__ndarray__", b"data", b"dtype", b"shape"))
_SCALAR_KEYS: Final = frozenset((b"__npgeneric__", b"data", b"dtype"))
_HEAD_SIZE: Final = len(_ARRAY_HEAD)


class _Bin:
    """A ``bin`` inside an array map: where it lies, not what it holds."""

    __slots__ = ("end", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end


class _Reader:
    """One pass over one frame."""

    __slots__ = ("frame", "nodes_left", "position", "size", "slots")

    def __init__(self, frame: bytes, max_nodes: int) -> None:
        self.frame = frame
        self.slots: list[Slot] = []
        self.size = len(frame)
        self.position = 0
        self.nodes_left = max_nodes

    def value(self, levels_left: int) -> Any:
        """Read one value; every branch moves ``position`` behind it."""
        frame, position = self.frame, self.position
        code = frame[position]
        self.position = position + 1
        if code < 0x80:
            return code
        if code == 0x84 and frame.startswith(_ARRAY_HEAD, position):
            found = self._common_array(position + _HEAD_SIZE)
            if found is not None:
                return found
            self.position = position + 1
        if code < 0x90:
            return self._map(code & 0x0F, levels_left)
        if code < 0xA0:
            return self._list(code & 0x0F, levels_left)
        if code < 0xC0:
            return self._text(code & 0x1F)
        if code >= 0xE0:
            return code - 0x100
        return self._long_form(code, levels_left)

    def _long_form(self, code: int, levels_left: int) -> Any:
        if code in _CONSTANTS:
            return _CONSTANTS[code]
        number = _NUMBERS.get(code)
        if number is not None:
            (value,) = number.unpack_from(self.frame, self.position)
            self.position += number.size
            return value
        length_field = _LENGTHS.get(code)
        if length_field is None:
            raise CodecError(f"msgpack type 0x{code:02x} (an extension) is refused")
        (length,) = length_field.unpack_from(self.frame, self.position)
        self.position += length_field.size
        if code <= 0xC6:
            return self.frame[self.position : self._advance(length)]
        if code <= 0xDB:
            return self._text(length)
        if code <= 0xDD:
            return self._list(length, levels_left)
        return self._map(length, levels_left)

    def _advance(self, length: int) -> int:
        end = self.position + length
        if end > self.size:
            raise CodecError(
                f"the frame ends early: {length} bytes announced at {self.position}, "
                f"{self.size - self.position} left"
            )
        self.position = end
        return end

    def _text(self, length: int) -> str:
        start = self.position
        try:
            return str(self.frame[start : self._advance(length)], "utf-8")
        except UnicodeDecodeError as error:
            raise CodecError(f"a string at {start} is not UTF-8") from error

    def _spend(self, nodes: int, levels_left: int) -> None:
        """Pay for a container before building it."""
        if levels_left <= 0:
            raise CodecError("the tree is too deep")
        self.nodes_left -= nodes
        # Each element takes at least one byte: a huge count in a short frame is a lie.
        if self.nodes_left < 0 or nodes > self.size - self.position:
            raise CodecError("the tree has too many values for its frame or its limit")

    def _list(self, length: int, levels_left: int) -> list[Any]:
        self._spend(length, levels_left)
        value, below = self.value, levels_left - 1
        return [value(below) for _ in range(length)]

    def _map(self, length: int, levels_left: int) -> Any:
        if length in (3, 4) and self.frame[self.position] in (0xC4, 0xC5, 0xC6):
            return self._numpy_map(length)
        self._spend(2 * length, levels_left)
        result: dict[str, Any] = {}
        value, below = self.value, levels_left - 1
        for _ in range(length):
            key = value(0)
            if not isinstance(key, str):
                raise CodecError(f"map key {_short(key)} is not a string")
            result[key] = value(below)
        if len(result) != length:
            raise CodecError("a map repeats a key")
        return result

    def _numpy_map(self, length: int) -> Any:
        """Read a scalar, or an array whose keys come in another order than usual."""
        self._spend(2 * length, levels_left=1)
        found: dict[bytes, Any] = {}
        for _ in range(length):
            key = self.value(0)
            if not isinstance(key, bytes) or key in found:
                raise CodecError(f"{_short(key)} is no key of an array map")
            found[key] = self._data_or_value() if key == b"data" else self.value(1)
        if found.keys() == _ARRAY_KEYS and found[b"__ndarray__"] is True:
            where, shape = found[b"data"], found[b"shape"]
            if not isinstance(where, _Bin) or not isinstance(shape, list):
                raise CodecError("an array needs data of type bin and shape of type list")
            return self._build(where.start, where.end, _lookup_dtype(found[b"dtype"]), shape)
        if found.keys() == _SCALAR_KEYS and found[b"__npgeneric__"] is True:
            return _build_scalar(found[b"data"], found[b"dtype"])
        raise CodecError(f"a map with bin keys {_short(sorted(found))} is no array and no scalar")

    def _data_or_value(self) -> Any:
        length_field = _LENGTHS.get(code := self.frame[self.position])
        if length_field is None or code > 0xC6:
            return self.value(0)
        (length,) = length_field.unpack_from(self.frame, self.position + 1)
        self.position += 1 + length_field.size
        start = self.position
        return _Bin(start, self._advance(length))

    def _common_array(self, position: int) -> Array | None:
        """Read an array laid out the usual way, or give None to leave it to the general reader."""
        frame = self.frame
        length_field = _LENGTHS.get(code := frame[position])
        if length_field is None or code > 0xC6:
            return None
        (length,) = length_field.unpack_from(frame, position + 1)
        start = position + 1 + length_field.size
        end = start + length
        if not frame.startswith(_DTYPE_KEY, end):
            return None
        position = end + 8 + (frame[end + 7] & 0x1F)
        if not frame.startswith(_SHAPE_KEY, position):
            return None
        dimensions = frame[position + 7]
        # fixstr then fixarray; anything else takes the slow way.
        if frame[end + 7] & 0xE0 != 0xA0 or dimensions & 0xF0 != 0x90:
            return None
        dtype = _lookup_dtype(frame[end + 8 : position].decode("latin-1"))
        self.position = position + 8
        value = self.value
        shape = [value(0) for _ in range(dimensions & 0x0F)]
        return self._build(start, end, dtype, shape)

    def _build(self, start: int, end: int, dtype: np.dtype[Any], shape: list[Any]) -> Array:
        """Lay a read-only view on the frame, after every check."""
        count = 1
        claimed = dtype.itemsize
        for size in shape:
            if type(size) is not int or size < 0:
                raise CodecError(f"shape {_short(shape)} is refused; sizes are non-negative ints")
            count *= size
            claimed *= size or 1
        if len(shape) > _MAX_DIMENSIONS or (count == 0 and claimed > _MAX_EMPTY_BYTES):
            raise CodecError(f"shape {_short(shape)} is refused; it is larger than any frame")
        if count * dtype.itemsize != end - start:
            raise CodecError(
                f"an array of shape {_short(shape)} and dtype {dtype.str} takes "
                f"{_short(count * dtype.itemsize)} bytes, its data has {end - start}"
            )
        slot = Slot(start, end, dtype, tuple(shape))
        self.slots.append(slot)
        return slot.view(self.frame)


def _build_scalar(value: Any, name: Any) -> np.generic:
    """Build a numpy scalar; the value must fit its dtype without a change."""
    dtype = _lookup_dtype(name)
    kind = dtype.kind
    if kind == "b":
        fits = isinstance(value, bool)
    elif kind == "f":
        fits = type(value) in (int, float)
        if fits and math.isfinite(value):
            fits = abs(value) <= float(np.finfo(dtype).max)
    elif kind in "iu":
        limits = np.iinfo(dtype)
        fits = type(value) is int and limits.min <= value <= limits.max
    else:
        fits = False
    if not fits:
        raise CodecError(f"{_short(value)} is no scalar of dtype {name}")
    scalar: np.generic = dtype.newbyteorder("=").type(value)
    return scalar


class Decoder:
    """Decode the frames of one connection, reading what they have in common only once.

    Args:
        limits: what decoding one frame may cost.

    Attributes:
        templates: by the length of a frame.
        fitting: the template that the frame decoded last fits; None if there is none.
    """

    _MAX_TEMPLATES: Final = 64
    _MAX_TEMPLATE_NODES: Final = 256
    _MAX_TEMPLATE_BYTES: Final = 16_384

    def __init__(self, limits: Limits = SERVER_LIMITS) -> None:
        self._limits = limits
        self.templates: dict[int, Template] = {}
        self._lengths: set[int] = set()
        self.fitting: Template | None = None

    def decode(self, frame: bytes | bytearray | memoryview) -> Any:
        """Decode one frame.

        Args:
            frame: the whole frame. Arrays in the result are read-only views on it (big-endian ones
                are converted, which copies them); a frame that is not ``bytes`` is copied first,
                because its owner could change it.

        Returns:
            Maps (``dict`` with str keys), lists, numbers, strings, bytes, None, arrays, scalars.

        Raises:
            CodecError: anything else.
        """
        if not isinstance(frame, bytes):
            frame = bytes(frame)
        self.fitting = None
        template = self.templates.get(len(frame))
        if template is not None:
            arrays = template.read(frame)
            if arrays is not None:
                self.fitting = template
                return template.tree(arrays)
        reader = _Reader(frame, self._limits.max_nodes)
        try:
            value = reader.value(self._limits.max_depth)
        except (IndexError, struct_error) as error:
            raise CodecError(f"the frame ends early, after {len(frame)} bytes") from error
        if reader.position != len(frame):
            raise CodecError(f"{len(frame) - reader.position} bytes follow the message")
        if isinstance(value, dict):
            self._keep(frame, value, reader)
        return value

    def _keep(self, frame: bytes, value: dict[str, Any], reader: _Reader) -> None:
        """Make a template of a frame, unless it is the first of its length or costly to keep."""
        length = len(frame)
        if length not in self._lengths:
            if len(self._lengths) >= self._MAX_TEMPLATES:
                self._lengths.clear()
            self._lengths.add(length)
            return
        nodes = self._limits.max_nodes - reader.nodes_left
        fixed_bytes = length - sum(slot.end - slot.start for slot in reader.slots)
        if nodes <= self._MAX_TEMPLATE_NODES and fixed_bytes <= self._MAX_TEMPLATE_BYTES:
            if len(self.templates) >= self._MAX_TEMPLATES:
                del self.templates[next(iter(self.templates))]
            self.fitting = Template(frame, reader.slots, value)
            self.templates[length] = self.fitting


def decode(frame: bytes | bytearray | memoryview, limits: Limits = SERVER_LIMITS) -> Any:
    """Decode one frame; see `Decoder.decode`."""
    return Decoder(limits).decode(frame)
