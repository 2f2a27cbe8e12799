"""`Channel`: frames over a socket between processes of one machine, in order, with deadlines."""

from __future__ import annotations

import contextlib
import os
import pathlib
import select
import shutil
import socket
import struct
import tempfile
import time
from typing import TYPE_CHECKING, Any

from rlightning.runtime.frames import ALIGNMENT, aligned, decode, encode

if TYPE_CHECKING:
    import numpy as np

    from rlightning.runtime.frames import Buffer

__all__ = ["Channel", "ChannelClosedError", "Listener", "connect", "packed"]

_HEADER = struct.Struct("<IQ")
_JOINED_BYTES = 1 << 16
"""Frames below that size are copied together and sent with one call."""
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


class Channel:
    """One end of a connection. Sending and receiving are each for one thread at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._timeout_s: float | None = -1.0

    def send(self, pieces: list[Buffer], timeout_s: float | None = None) -> None:
        """Send what `packed` returned.

        Raises:
            TimeoutError: the other end does not read.
            ChannelClosedError: the other end is gone.
        """
        self._set_timeout(timeout_s)
        try:
            for piece in pieces:
                self._socket.sendall(piece)
        except (BrokenPipeError, ConnectionError) as error:
            raise ChannelClosedError(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """Return the next value.

        Args:
            timeout_s: longest wait for each part of it; None waits until the other end is gone.

        Raises:
            TimeoutError: nothing came; the channel is of no use after that where a part had come.
            ChannelClosedError: the other end is gone.
        """
        self._set_timeout(timeout_s)
        header = bytearray(_HEADER.size)
        self._fill(memoryview(header))
        length, size = _HEADER.unpack(header)
        outline = bytearray(length)
        self._fill(memoryview(outline))
        memory: np.ndarray[Any, Any] = aligned(size)
        if size:
            self._fill(memoryview(memory.data))
        return decode(outline, memory)

    def poll(self, timeout_s: float) -> bool:
        """Return whether something has come, or the other end is gone, within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            if poller.poll(left_s * 1000):
                return True
            if left_s == 0.0:
                return False

    def close(self) -> None:
        """Close this end; the other one is told."""
        self._socket.close()

    def _set_timeout(self, timeout_s: float | None) -> None:
        if timeout_s != self._timeout_s:
            self._socket.settimeout(timeout_s)
            self._timeout_s = timeout_s

    def _fill(self, view: memoryview) -> None:
        try:
            while view.nbytes:
                count = self._socket.recv_into(view)
                if count == 0:
                    raise ChannelClosedError("the other end is gone")
                view = view[count:]
        except ChannelClosedError:
            raise
        except ConnectionError as error:
            raise ChannelClosedError(str(error)) from error


class Listener:
    """Waits for one other process of the same user to connect; leaves nothing on the disk."""

    def __init__(self) -> None:
        self._folder = pathlib.Path(tempfile.mkdtemp(prefix="rl-"))  # for its owner only
        self.path = str(self._folder / "s")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        self._socket.listen(1)

    def accept(self, timeout_s: float) -> Channel:
        """Return the connection; nobody else can connect after that.

        Raises:
            TimeoutError: nobody did.
        """
        try:
            self._socket.settimeout(timeout_s)
            connection, _ = self._socket.accept()
        finally:
            self.close()
        return Channel(connection)

    def close(self) -> None:
        """Stop waiting."""
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def connect(path: str, timeout_s: float) -> Channel:
    """Return a connection to the `Listener` at `path`.

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
    return Channel(connection)
