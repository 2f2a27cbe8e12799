"""`CPUWeightBuffer`: the newest published weights in shared memory, for all processes of a machine.

One process publishes; any number on the same machine read, each through a buffer of its own that is
attached to the first (`CPUWeightBuffer.attach`, or by pickling it). Two versions fit: the newest,
which readers lock while they copy it on, and the one before, whose memory the next version is
written to once its last reader is done. A version becomes visible when it is complete, so nobody
sees half of one, not even where the publisher was killed while it wrote. A reader that was killed
blocks nobody: its lock ends with it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlightning.weights import shared_memory
from rlightning.weights.address import WeightAddress
from rlightning.weights.layout import Layout, copy_into, memory_for
from rlightning.weights.transfer import PackedWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["CPUWeightBuffer"]

_SLOTS = 2
_PAGE = 4096
_HEAD_BYTES = 64
_NEWEST, _VERSION = range(2)
"""Words of the header: the number of the newest slot, and the version in it."""
_IN_SLOT, _OUTLINE_BYTES, _DATA_START = range(3)
"""Words of a slot: its version, -1 while it is written; then where its parts are."""
_NOTHING, _CLOSED = -1, -2


class _Slot:
    """One piece of shared memory as this process sees it: words, outline, tensors.

    Slots are numbered on; two with one generation (their number without its last bit) take turns,
    and a new generation replaces them where a set does not fit.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.memory = shared_memory.look_at(name)
        self.words: np.ndarray[Any, np.dtype[np.int64]] = (
            self.memory[:_HEAD_BYTES].numpy().view(np.int64)
        )
        self._parsed: tuple[bytes, Layout, list[torch.Tensor]] | None = None

    def describe(self, text: bytes, layout: Layout) -> list[torch.Tensor]:
        """Say what lies in the slot; return the tensors to copy it into."""
        if self._parsed is not None and self._parsed[0] == text:
            return self._parsed[2]
        room = self.memory[_HEAD_BYTES : _HEAD_BYTES + len(text)]
        room.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        self.words[_OUTLINE_BYTES] = len(text)
        self._parsed = (text, layout, layout.views(self.data))
        return self._parsed[2]

    def parse(self) -> tuple[Layout, list[torch.Tensor]]:
        """Return the layout of its set and the tensors in it; cheap where the outline is known."""
        text = self.text
        parsed = self._parsed  # one reference: threads may come here at once
        if parsed is None or parsed[0] != text:
            layout = Layout.from_json(text)
            parsed = self._parsed = (text, layout, layout.views(self.data))
        return parsed[1], parsed[2]

    @property
    def text(self) -> bytes:
        """The layout of its set, as text."""
        size = int(self.words[_OUTLINE_BYTES])
        return self.memory[_HEAD_BYTES : _HEAD_BYTES + size].numpy().tobytes()

    @property
    def data(self) -> torch.Tensor:
        """The memory of its tensors."""
        return self.memory[int(self.words[_DATA_START]) :]


class CPUWeightBuffer:
    """Holds the newest version of the weights in shared memory.

    Args:
        timeout_s: how long a publisher waits for readers of the version before the newest.
    """

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        shared_memory.sweep()
        name = f"{shared_memory.PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        shared_memory.create(f"{name}-header", _PAGE)
        self._connect(name, timeout_s, shared_memory.hold(f"{name}-header"))
        self._header[_NEWEST] = 1
        self._header[_VERSION] = _NOTHING

    @classmethod
    def attach(cls, name: str, *, timeout_s: float = 30.0) -> CPUWeightBuffer:
        """Return the buffer that another process of this machine made, by its `name`.

        Raises:
            RuntimeError: it does not exist, or no longer.
        """
        self = cls.__new__(cls)
        self._connect(name, timeout_s, None)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _attach, (self.name, self.timeout_s)

    def _connect(self, name: str, timeout_s: float, hold: int | None) -> None:
        self.name = name
        self.timeout_s = timeout_s
        try:
            memory = shared_memory.look_at(f"{name}-header")
        except FileNotFoundError as error:
            raise self._gone() from error
        self._header: np.ndarray[Any, np.dtype[np.int64]] = (
            memory[:_HEAD_BYTES].numpy().view(np.int64)
        )
        self._slots: dict[int, _Slot] = {}
        self._outlined: tuple[Layout, bytes] | None = None
        self._room = (0, 0)  # bytes of outline and of tensors that this process's slots take
        self._generation = -1
        self._created: list[str] = [] if hold is None else [f"{name}-header"]
        self._publishing = threading.Lock()
        self._end: Callable[[], Any] = weakref.finalize(
            self, _end, name, self._created, self._header, os.getpid(), hold
        )

    @property
    def address(self) -> WeightAddress:
        """What another process of this machine opens it by."""
        return WeightAddress(type(self), self.name)

    @property
    def version(self) -> int:
        """The newest version, or -1 before the first."""
        return max(_NOTHING, int(self._header[_VERSION]))

    def staleness(self, version: int) -> int:
        """Return by how many versions `version` is older than the newest."""
        return self.version - version

    def close(self) -> None:
        """Remove what this process created of it; done anyway where the process ends."""
        self._end()

    # ---- publishing ----------------------------------------------------------------------------

    def publish(self, version: int, weights: Any) -> None:
        """Make a copy of `weights` visible as `version`; one process does that at a time.

        Raises:
            ValueError: `version` is not newer than the published one.
            ContractError: `weights` holds something that does not travel between processes.
            TimeoutError: somebody has been reading the version before the newest for too long.
            OSError: there is not enough shared memory.
        """
        with self._publishing:
            if version <= self.version:
                raise ValueError(f"version {version} was published after version {self.version}")
            layout, tensors = Layout.of(weights)
            if self._outlined is None or self._outlined[0] != layout:
                self._outlined = (layout, layout.to_json())
            text = self._outlined[1]
            number = self._next_slot(len(text), layout.size_bytes)
            slot = self._slot(number)
            with self._reserved(slot):
                slot.words[_IN_SLOT] = _NOTHING
                copy_into(slot.describe(text, layout), tensors)
                slot.words[_IN_SLOT] = version
            former = int(self._header[_NEWEST]) // _SLOTS
            self._header[_NEWEST] = number
            self._header[_VERSION] = version
            if former != number // _SLOTS:
                self._drop(former)

    def _next_slot(self, outline_bytes: int, data_bytes: int) -> int:
        """Return the number of the slot for the next version; make larger ones where needed."""
        newest = int(self._header[_NEWEST])
        if outline_bytes <= self._room[0] and data_bytes <= self._room[1]:
            first = self._generation * _SLOTS
            return first + (newest + 1) % _SLOTS if newest >= first else first
        room = (2 * outline_bytes, data_bytes)
        self._generation = max(self._generation, newest // _SLOTS) + 1
        while True:
            try:
                self._create_slots(*room)
            except FileExistsError:  # left by a publisher that died before its first version
                self._drop(self._generation)
            else:
                self._room = room
                return self._generation * _SLOTS

    def _create_slots(self, outline_bytes: int, data_bytes: int) -> None:
        start = -(-(_HEAD_BYTES + outline_bytes) // _PAGE) * _PAGE
        made: list[str] = []
        try:
            for number in range(self._generation * _SLOTS, (self._generation + 1) * _SLOTS):
                shared_memory.create(f"{self.name}-{number}", start + max(1, data_bytes))
                made.append(f"{self.name}-{number}")
                slot = self._slot(number)
                slot.words[_DATA_START] = start
                slot.words[_IN_SLOT] = _NOTHING
        except OSError:
            for name in made:
                shared_memory.remove(name)
            raise
        self._created += made

    @contextlib.contextmanager
    def _reserved(self, slot: _Slot) -> Iterator[None]:
        """Keep readers out of a slot, once the last has left it."""
        for _ in shared_memory.until(self.timeout_s):
            with shared_memory.locked(slot.name, exclusive=True) as free:
                if free:
                    yield
                    return
        raise TimeoutError(
            f"a reader has held the weights before version {self.version} for {self.timeout_s:g} "
            "s; weights are lent for as long as it takes to load them (`with buffer.read()`)"
        )

    def _drop(self, generation: int) -> None:
        """Remove the slots of a generation that was replaced, whoever created them."""
        for number in range(generation * _SLOTS, (generation + 1) * _SLOTS):
            name = f"{self.name}-{number}"
            self._slots.pop(number, None)
            if name in self._created:
                self._created.remove(name)
                shared_memory.remove(name)
            else:
                shared_memory.discard(name)

    # ---- reading -------------------------------------------------------------------------------

    def get(self) -> tuple[int, Any]:
        """Return the newest version and a copy of its weights.

        `read` is cheaper where the weights are copied on at once.

        Raises:
            RuntimeError: nothing has been published, or the publisher has ended.
        """
        version, packed = self.pack()
        return version, packed.unpack()

    def pack(self) -> tuple[int, PackedWeights]:
        """Return the newest version and a copy of its weights, ready for another machine.

        Raises:
            RuntimeError: nothing has been published, or the publisher has ended.
        """
        with contextlib.ExitStack() as lent:
            slot = self._newest(lent)
            layout, _ = slot.parse()
            memory = memory_for(layout, "cpu")
            memory.copy_(slot.data[: layout.size_bytes])
            return int(slot.words[_IN_SLOT]), PackedWeights(slot.text, memory.numpy())

    @contextlib.contextmanager
    def read(self) -> Iterator[tuple[int, Any]]:
        """Lend the newest version and its weights, for the length of a ``with`` block.

        The tensors lie in the shared memory; they are another version's soon after the block.

        Raises:
            RuntimeError: nothing has been published, or the publisher has ended.
        """
        with contextlib.ExitStack() as lent:
            slot = self._newest(lent)
            layout, tensors = slot.parse()
            yield int(slot.words[_IN_SLOT]), layout.build(tensors)

    def lend(self, version: int, lent: contextlib.ExitStack) -> Any | None:
        """Return the weights of one version, lent until `lent` is closed; None where it is gone.

        Raises:
            RuntimeError: nothing has been published, or the publisher has ended.
        """
        self.check()
        newest = int(self._header[_NEWEST])
        for number in (newest, newest ^ 1):
            slot = self._locked(number, lent, version)
            if slot is not None:
                layout, tensors = slot.parse()
                return layout.build(tensors)
        return None

    def wait_for(self, version: int, timeout_s: float) -> bool:
        """Wait until at least `version` is visible; return whether it is."""
        return (
            any(self.version >= version for _ in shared_memory.until(timeout_s))
            or self.version >= version
        )

    def _newest(self, lent: contextlib.ExitStack) -> _Slot:
        for _ in shared_memory.until(self.timeout_s):
            self.check()
            number = int(self._header[_NEWEST])
            slot = self._locked(number, lent, None)
            if slot is not None:
                return slot
            if number == int(self._header[_NEWEST]) and not shared_memory.exists(
                f"{self.name}-{number}"
            ):
                raise self._gone()
        raise TimeoutError(f"no version of {self.name} could be locked in {self.timeout_s:g} s")

    def check(self) -> None:
        """See that there is something to read.

        Raises:
            RuntimeError: nothing has been published, or the publisher has ended.
        """
        if int(self._header[_VERSION]) == _CLOSED:
            raise self._gone()
        if self.version < 0:
            raise RuntimeError("no weights have been published; call publish first")

    def _locked(self, number: int, lent: contextlib.ExitStack, version: int | None) -> _Slot | None:
        """Lock a slot against writing until `lent` is closed, if it holds what is wanted."""
        with contextlib.ExitStack() as attempt:
            try:
                slot = self._slot(number)
                locked = attempt.enter_context(shared_memory.locked(slot.name, exclusive=False))
            except FileNotFoundError:  # replaced by a larger one meanwhile, or gone
                return None
            held = int(slot.words[_IN_SLOT])
            newest = number == int(self._header[_NEWEST]) and held >= 0
            if not locked or not (newest if version is None else held == version):
                return None
            lent.enter_context(attempt.pop_all())
            return slot

    def _slot(self, number: int) -> _Slot:
        slot = self._slots.get(number)
        if slot is None:
            slot = _Slot(f"{self.name}-{number}")
            kept = {n: s for n, s in list(self._slots.items()) if n > number - 2 * _SLOTS}
            self._slots = {**kept, number: slot}
        return slot

    def _gone(self) -> RuntimeError:
        return RuntimeError(
            f"the weights {self.name} are gone: their publisher has ended, or is on another machine"
        )


def _attach(name: str, timeout_s: float) -> CPUWeightBuffer:
    return CPUWeightBuffer.attach(name, timeout_s=timeout_s)


def _end(name: str, created: list[str], header: Any, owner_pid: int, hold: int | None) -> None:
    if os.getpid() != owner_pid:
        return  # a fork of the process that created it
    if hold is not None:
        header[_VERSION] = _CLOSED
    while created:
        shared_memory.remove(created.pop())
    if hold is not None:
        shared_memory.remove_family(name)  # what a publisher that was killed has left
        os.close(hold)
