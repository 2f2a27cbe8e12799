"""Read frames that look like an earlier one, by comparing what stands still and taking the rest.

Frames of one connection look alike: same keys, dtypes and shapes, other data. A `Template` is made
from a frame that passed every check of the decoder. It compares the bytes between the arrays in one
step and lays views on the data in another. Small arrays of indices, flags and text seldom change:
those are pinned, that is, compared along with the rest and handed out again. The module knows
nothing of msgpack or messages: a template neither widens nor narrows what the decoder accepts.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from plugrl_protocol.errors import CodecError

if TYPE_CHECKING:
    from collections.abc import Callable

Array: TypeAlias = npt.NDArray[Any]

_MAX_PINNED_BYTES: Final = 256
# numpy counts the bytes and the sizes of a record in 31 bits.
_MAX_RECORD_SIZE: Final = 2**31 - 1
# A pinned array that changes in more than one frame of so many is read each time instead.
_FRAMES_PER_CHANGE: Final = 8


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
