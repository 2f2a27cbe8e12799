"""Read and write what looks like an earlier frame: compare what stands still, take the rest.

Frames of one connection look alike: same keys, dtypes and shapes, other data. A `Template` is made
from a frame that passed every check of the decoder. It compares the bytes between the arrays in one
step and lays views on the data in another. Small arrays of indices, flags and text seldom change:
those are pinned, that is, compared along with the rest and handed out again. A `Stencil` does the
same for writing. The module knows nothing of msgpack or messages: it neither widens nor narrows
what the codec accepts.
"""

from __future__ import annotations

import math
from operator import attrgetter
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from plugrl_protocol.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Array: TypeAlias = npt.NDArray[Any]
Spec: TypeAlias = "tuple[type, np.dtype[Any], tuple[int, ...]]"

_MAX_PINNED_BYTES: Final = 256
# numpy counts the bytes and the sizes of a record in 31 bits.
_MAX_RECORD_SIZE: Final = 2**31 - 1
# A pinned array that changes in more than one frame of so many is read each time instead.
_FRAMES_PER_CHANGE: Final = 8
# Below this size a copy is cheaper than a buffer object.
SMALL_BYTES: Final = 4096

spec_of: Callable[[Any], Spec] = attrgetter("__class__", "dtype", "shape")
_to_bytes = np.ndarray.tobytes


class Slot:
    """Where one array lies in a frame, and what it is."""

    __slots__ = ("dtype", "end", "is_plain", "shape", "start")

    def __init__(self, start: int, end: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.start, self.end, self.dtype, self.shape = start, end, dtype, shape
        self.is_plain = dtype.kind not in "bU" and dtype.isnative

    @property
    def can_be_pinned(self) -> bool:
        """Whether it is small and of a kind that often repeats."""
        return self.dtype.kind in "biU" and 0 < self.end - self.start <= _MAX_PINNED_BYTES

    def view(self, frame: bytes) -> Array:
        """Lay a read-only view on the frame, after checking the content."""
        array: Array = np.ndarray(self.shape, self.dtype, frame, self.start)
        return array if self.is_plain else self.checked(array, frame)

    def pin(self, frame: bytes) -> Array:
        """Keep the array of a frame without the frame."""
        kept: Array = np.ndarray(self.shape, self.dtype, frame[self.start : self.end])
        return kept if self.dtype.isnative else self._as_native(kept)

    def checked(self, array: Array, frame: bytes) -> Array:
        """Refuse content that is no boolean or no text; convert big-endian numbers.

        Args:
            array: the view on the frame.
            frame: the frame.
        """
        if self.dtype.kind == "b":
            if frame[self.start : self.end].strip(b"\x00\x01"):
                raise CodecError("a boolean array holds bytes other than 0 and 1")
        elif self.dtype.kind == "U":
            _check_text(frame[self.start : self.end], self.dtype)
        return array if self.dtype.isnative else self._as_native(array)

    def _as_native(self, array: Array) -> Array:
        array = array.astype(self.dtype.newbyteorder("="))
        array.flags.writeable = False
        return array


def _check_text(data: bytes, dtype: np.dtype[Any]) -> None:
    """Refuse code points that no string can hold: numpy would fail much later."""
    try:
        data.decode("utf-32-be" if dtype.str[0] == ">" else "utf-32-le")
    except UnicodeDecodeError as error:
        raise CodecError("a text array holds something that is not Unicode") from error


class _Matcher:
    """Compare all bytes of a frame but those of some slots.

    Attributes:
        parts: gives the compared bytes of a frame of the right length, as a tuple.
        expected: what that must be.
    """

    __slots__ = ("expected", "parts")

    def __init__(self, frame: bytes, skipped: list[Slot]) -> None:
        layout, position = "", 0
        for slot in skipped:
            layout += f"{slot.start - position}s{slot.end - slot.start}x"
            position = slot.end
        layout += f"{len(frame) - position}s"
        self.parts: Callable[[bytes], tuple[bytes, ...]] = Struct(layout).unpack
        self.expected = self.parts(frame)


class Template:
    """What frames of one form have in common; see the module.

    Args:
        frame: one that was decoded.
        slots: its arrays, in order.
        tree: what it was decoded to, a map.

    Attributes:
        memo: for whoever decodes: what is known of all frames of this form; None at first.
    """

    def __init__(self, frame: bytes, slots: list[Slot], tree: dict[str, Any]) -> None:
        self.memo: Any = None
        self._slots = slots
        self._tree = _Tree(tree)
        self._every = _Matcher(frame, slots)
        self._frames_seen = 1
        self._changes = [0] * len(slots)
        self._pinned = {p: slot.pin(frame) for p, slot in enumerate(slots) if slot.can_be_pinned}
        self._prepare(frame)

    @property
    def between(self) -> tuple[bytes, ...]:
        """The unchanging bytes before, between and behind the arrays."""
        return self._every.expected

    def _prepare(self, frame: bytes) -> None:
        """Prepare the short way for the slots that are pinned now."""
        places = range(len(self._slots))
        loose = [(place, self._slots[place]) for place in places if place not in self._pinned]
        self._quick = _Matcher(frame, [slot for _, slot in loose])
        self._arrays: list[Any] = [self._pinned.get(place) for place in places]
        self._record = _record_of(loose, len(frame))
        self._loose = [
            (place, str(place), None if slot.is_plain else slot.checked) for place, slot in loose
        ]

    def read(self, frame: bytes) -> list[Array] | None:
        """Read a frame of the same length.

        Args:
            frame: as it came.

        Returns:
            Its arrays in order, read-only: views on the frame, or pinned ones. None for a frame
            of another form.

        Raises:
            CodecError: a frame of this form with content that is refused.
        """
        quick = self._quick
        if self._record is None or quick.parts(frame) != quick.expected:
            return self._read_anew(frame)
        self._frames_seen += 1
        arrays = self._arrays.copy()
        record: Array = np.ndarray((), self._record, frame)
        for place, name, check in self._loose:
            array = record[name]
            arrays[place] = array if check is None else check(array, frame)
        return arrays

    def _read_anew(self, frame: bytes) -> list[Array] | None:
        """Read a frame in which pinned arrays may have changed."""
        every = self._every
        if every.parts(frame) != every.expected:
            return None
        self._frames_seen += 1
        arrays = [slot.view(frame) for slot in self._slots]
        changed = [p for p, kept in self._pinned.items() if kept.tobytes() != arrays[p].tobytes()]
        for place in changed:
            self._changes[place] += 1
            if self._changes[place] * _FRAMES_PER_CHANGE > self._frames_seen:
                del self._pinned[place]
            else:
                self._pinned[place] = self._slots[place].pin(frame)
        if changed:
            self._prepare(frame)
        return arrays

    def tree(self, arrays: list[Array]) -> dict[str, Any]:
        """Build the tree around the arrays of a frame."""
        return self._tree.fill(arrays)


def _record_of(slots: list[tuple[int, Slot]], size_bytes: int) -> np.dtype[Any] | None:
    """Describe a frame as one numpy record, whose fields are laid out in one step.

    Returns:
        None where numpy has no such record: frames or shapes of 2 GiB.
    """
    if size_bytes > _MAX_RECORD_SIZE or any(
        d > _MAX_RECORD_SIZE for _, s in slots for d in s.shape
    ):
        return None
    return np.dtype(
        {
            "names": [str(place) for place, _ in slots],
            "formats": [(slot.dtype, slot.shape) for _, slot in slots],
            "offsets": [slot.start for _, slot in slots],
            "itemsize": size_bytes,
        }
    )


class _Tree:
    """A tree of maps and lists, to be copied with other arrays."""

    __slots__ = ("_links", "_maps", "_places")

    def __init__(self, root: dict[str, Any]) -> None:
        self._maps: list[Any] = []
        self._links: list[tuple[int, Any, int]] = []
        self._places: list[tuple[int, Any]] = []
        self._add(root)

    def _add(self, container: Any) -> int:
        """Note a map or list and all that is in it, depth first; give its number."""
        number = len(self._maps)
        self._maps.append(container.copy())
        items = container.items() if isinstance(container, dict) else enumerate(container)
        for key, child in items:
            if isinstance(child, (dict, list)):
                self._links.append((number, key, self._add(child)))
            elif isinstance(child, np.ndarray):
                self._places.append((number, key))
                self._maps[number][key] = None
        return number

    def fill(self, arrays: list[Array]) -> dict[str, Any]:
        """Copy every container and put the arrays, in order, where arrays were."""
        maps = [container.copy() for container in self._maps]
        for number, key, child in self._links:
            maps[number][key] = maps[child]
        for (number, key), array in zip(self._places, arrays, strict=True):
            maps[number][key] = array
        root: dict[str, Any] = maps[0]
        return root


# ---------------------------------------------------------------------------------------- writing


class Filler:
    """Put frames together from prepared bytes and the data of arrays.

    Args:
        specs: class, dtype and shape of each array, as `spec_of` gives them.
        between: the bytes before, between and behind the data of the arrays.
    """

    __slots__ = ("_are_large", "_parts", "specs")

    def __init__(self, specs: list[Spec], between: Sequence[bytes]) -> None:
        self.specs = specs
        are_large = [d.itemsize * math.prod(shape) > SMALL_BYTES for _, d, shape in specs]
        self._are_large = are_large if any(are_large) else None
        self._parts: list[Any] = [part for fixed in between for part in (fixed, None)][:-1]

    def fill(self, arrays: list[Array]) -> bytes:
        """Put a frame together."""
        parts = self._parts.copy()
        if self._are_large is None:
            parts[1::2] = map(_to_bytes, arrays)
        else:
            parts[1::2] = [
                np.ascontiguousarray(array) if is_large else array.tobytes()
                for array, is_large in zip(arrays, self._are_large, strict=True)
            ]
        return b"".join(parts)


class Stencil:
    """Write maps that differ from an earlier one in the data of their arrays alone.

    Args:
        message: a map that was encoded.
        between: the bytes before, between and behind the data of its arrays.

    Raises:
        ValueError: it holds more than maps, arrays, strings, integers, booleans and None.
    """

    def __init__(self, message: dict[str, Any], between: Sequence[bytes]) -> None:
        self._keys = tuple(message)
        self._maps: list[tuple[int, str, tuple[str, ...]]] = []
        self._constants: list[tuple[int, str, type, Any]] = []
        self._places: list[tuple[int, str]] = []
        specs: list[Spec] = []
        self._add(message, 0, specs)
        self._filler = Filler(specs, between)

    def _add(self, container: dict[str, Any], number: int, specs: list[Spec]) -> None:
        """Note what is in a map, depth first, as its data lies in the frame."""
        for key, child in container.items():
            if type(child) is dict:
                self._maps.append((number, key, tuple(child)))
                self._add(child, len(self._maps), specs)
            elif type(child) is np.ndarray:
                self._places.append((number, key))
                specs.append(spec_of(child))
            elif child is None or type(child) in (str, int, bool):
                self._constants.append((number, key, type(child), child))
            else:
                raise ValueError(f"{key} is a {type(child).__name__}")

    def fill(self, message: dict[str, Any]) -> bytes | None:
        """Encode a map, or give None for one that has another form."""
        if tuple(message) != self._keys:
            return None
        maps = [message]
        for number, key, keys in self._maps:
            child = maps[number][key]
            if type(child) is not dict or tuple(child) != keys:
                return None
            maps.append(child)
        for number, key, kind, value in self._constants:
            found = maps[number][key]
            if type(found) is not kind or found != value:
                return None
        arrays = [maps[number][key] for number, key in self._places]
        try:
            if list(map(spec_of, arrays)) != self._filler.specs:
                return None
        except AttributeError:  # something that is no array
            return None
        return self._filler.fill(arrays)
