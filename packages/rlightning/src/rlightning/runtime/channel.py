"""`Channel`: frames over a socket between processes of one machine, in order, with deadlines."""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import select
import shutil
import socket
import struct
import tempfile
from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.runtime.frames import ALIGNMENT, aligned, decode, encode

if TYPE_CHECKING:
    from rlightning.runtime.frames import Buffer

__all__ = ["Channel", "ChannelClosedError", "Listener", "Watch", "connect", "packed", "unpacked"]

_HEADER = struct.Struct("<IQ")
_JOINED_BYTES = 1 << 16
"""Frames below that size are copied together and sent with one call."""
_READ_AHEAD_BYTES = 1 << 17
"""How much is read at once: a small frame whole."""
_ZEROS = bytes(ALIGNMENT)


class ChannelClosedError(ConnectionError):
    """The other end is gone."""


def packed(value: Any) -> list[Buffer]:
    """Return `value` as pieces of memory to send one after the other; few, where it is small.

    Raises:
        UnframeableError: it holds what a frame cannot carry.
    """
    outline, buffers, size = encode(value)
    pieces: list[Buffer] = [_HEADER.pack(len(outline), size) + outline]
    for buffer in buffers:
        pieces.append(buffer)
        rest = -len(buffer) % ALIGNMENT
        if rest:
            pieces.append(_ZEROS[:rest])
    return [b"".join(pieces)] if size <= _JOINED_BYTES else pieces


def unpacked(frame: bytes, *, as_arrays: bool = False) -> Any:
    """Return what was `packed`, with memory of its own.

    Args:
        frame: all pieces of it, one after the other.
        as_arrays: whether tensors of a response become arrays.
    """
    length, size = _HEADER.unpack_from(frame)
    start = _HEADER.size + length
    memory = aligned(size)
    memory[:] = np.frombuffer(frame, np.uint8, size, start)
    return decode(frame[_HEADER.size : start], memory, as_arrays=as_arrays)


class Channel:
    """One end of a connection. Sending and receiving are each for one thread at a time.

    Args:
        connection: the socket.
        sealed: whether what is received stays closed until it is read; see `frames.decode`.
    """

    def __init__(self, connection: socket.socket, *, sealed: bool = False) -> None:
        connection.settimeout(0.0)
        self._socket = connection
        self._sealed = sealed
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._begin = self._end = 0  # of what was read ahead, and is not taken yet
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)

    def send(self, pieces: list[Buffer], timeout_s: float | None = None) -> None:
        """Send what `packed` returned.

        Args:
            pieces: of the frame.
            timeout_s: longest wait for room on the way; None waits until the other end is gone.

        Raises:
            TimeoutError: the other end does not read.
            ChannelClosedError: the other end is gone.
        """
        for piece in pieces:
            view = memoryview(piece)
            while view.nbytes:
                try:
                    view = view[self._socket.send(view) :]
                except BlockingIOError:
                    self._wait_for_room(timeout_s)
                except OSError as error:
                    raise ChannelClosedError(str(error)) from error

    def _wait_for_room(self, timeout_s: float | None) -> None:
        writable = select.poll()
        writable.register(self._socket, select.POLLOUT)
        if not writable.poll(_milliseconds(timeout_s)):
            raise TimeoutError("the other end does not read")

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next value.

        Args:
            timeout_s: longest wait for each part of it; None waits until the other end is gone.

        Raises:
            TimeoutError: nothing came; the channel is of no use after that where a part had come.
            ChannelClosedError: the other end is gone.
        """
        while self._end - self._begin < _HEADER.size:
            self._read_ahead(timeout_s)
        length, size = _HEADER.unpack_from(self._ahead, self._begin)
        self._begin += _HEADER.size
        outline = self._take_bytes(length, timeout_s)
        memory: np.ndarray[Any, Any] = aligned(size)
        if size:
            self._take(memory.data, timeout_s)
        return decode(outline, memory, sealed=self._sealed)

    def receive_frame(self, timeout_s: float | None = None) -> bytes:
        """Return the next value as it was `packed`; otherwise as `receive`."""
        while self._end - self._begin < _HEADER.size:
            self._read_ahead(timeout_s)
        length, size = _HEADER.unpack_from(self._ahead, self._begin)
        return self._take_bytes(_HEADER.size + length + size, timeout_s)

    def _take_bytes(self, length: int, timeout_s: float | None) -> bytes:
        end = self._begin + length
        if end <= self._end:
            taken = bytes(self._ahead[self._begin : end])
            self._begin = end
            return taken
        room = bytearray(length)
        self._take(memoryview(room), timeout_s)
        return bytes(room)

    def _take(self, view: memoryview, timeout_s: float | None) -> None:
        """Fill `view`: with what was read ahead, and what is too long for that from the socket."""
        there = min(self._end - self._begin, view.nbytes)
        view[:there] = self._ahead[self._begin : self._begin + there]
        self._begin += there
        while there < view.nbytes:
            there += self._read(view[there:], timeout_s)

    def _read_ahead(self, timeout_s: float | None) -> None:
        """Read what has come, at least something, behind what was read ahead before."""
        if self._begin == self._end:
            self._begin = self._end = 0
        elif self._begin:  # the beginning of a header
            rest = bytes(self._ahead[self._begin : self._end])
            self._ahead[: len(rest)] = rest
            self._begin, self._end = 0, len(rest)
        self._end += self._read(self._ahead[self._end :], timeout_s)

    def _read(self, view: memoryview, timeout_s: float | None) -> int:
        while True:
            try:
                count = self._socket.recv_into(view)
            except BlockingIOError:
                if not self._readable.poll(_milliseconds(timeout_s)):
                    raise TimeoutError("the other end says nothing") from None
                continue
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if count == 0:
                raise ChannelClosedError("the other end is gone")
            return count

    def poll(self, timeout_s: float) -> bool:
        """Return whether something has come, or the other end is gone, within `timeout_s`."""
        return self.has_more or bool(self._readable.poll(_milliseconds(timeout_s)))

    @property
    def has_more(self) -> bool:
        """Whether something was read ahead."""
        return self._begin < self._end

    def fileno(self) -> int:
        """Return the socket's number, for `select`."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end; the other one is told, and so is a thread that waits at this one."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Watch:
    """Waits at several ends at once.

    Args:
        *ends: channels, and listeners that wait for a connection.
    """

    def __init__(self, *ends: Channel | Listener) -> None:
        self._ends = [(end, end.fileno()) for end in ends]
        self._readable = select.poll()
        for _, number in self._ends:
            self._readable.register(number, select.POLLIN)

    def wait(self, timeout_s: float | None = None) -> list[bool]:
        """Wait until something has come, or somebody is gone, and return at which ends.

        Args:
            timeout_s: longest wait; None waits for ever.
        """
        ahead = [isinstance(end, Channel) and end.has_more for end, _ in self._ends]
        longest = 0 if True in ahead else _milliseconds(timeout_s)
        ready = [number for number, _ in self._readable.poll(longest)]
        return [
            more or number in ready for more, (_, number) in zip(ahead, self._ends, strict=True)
        ]


def _milliseconds(timeout_s: float | None) -> float | None:
    """Return a timeout as `select.poll` takes it."""
    return None if timeout_s is None or timeout_s == math.inf else timeout_s * 1000.0


class Listener:
    """Waits for one other process of the same user to connect; leaves nothing on the disk."""

    def __init__(self) -> None:
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="rl-"))  # for its owner only
        self.path = str(self._folder / "s")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(1)

    def fileno(self) -> int:
        """Return the socket's number, for `select`."""
        return self._socket.fileno()

    def accept(self, timeout_s: float, *, sealed: bool = False) -> Channel:
        """Return the connection; nobody else can connect after that.

        Args:
            timeout_s: longest wait for it.
            sealed: see `Channel`.

        Raises:
            TimeoutError: nobody did.
        """
        try:
            self._socket.settimeout(timeout_s)
            connection, _ = self._socket.accept()
        finally:
            self.close()
        return Channel(connection, sealed=sealed)

    def close(self) -> None:
        """Stop waiting."""
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def connect(path: str, timeout_s: float, *, sealed: bool = False) -> Channel:
    """Return a connection to the `Listener` at `path`.

    Args:
        path: of the listener.
        timeout_s: longest wait for it.
        sealed: see `Channel`.

    Raises:
        ChannelClosedError: nobody listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise ChannelClosedError(f"cannot connect to a worker: {error}") from error
    with contextlib.suppress(OSError):
        os.unlink(path)
    return Channel(connection, sealed=sealed)
