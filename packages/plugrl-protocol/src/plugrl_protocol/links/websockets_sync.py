"""A blocking client over ``websockets.sync``: its own thread answers pings.

That thread hands whole messages to a queue which the caller waits on; the library's own queue, of
frames, costs several locks a message.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import ssl
import struct
import sys
import time
from typing import TYPE_CHECKING, Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as websockets_connect

from plugrl_protocol.errors import (
    ABNORMAL,
    Close,
    HandshakeError,
    closed_error,
)
from plugrl_protocol.links.base import ConnectFailedError, connect_failed

if TYPE_CHECKING:
    from websockets.protocol import Event

    from plugrl_protocol.links.base import ClientOptions

# A server answers one message at a time: more than this are a flood.
_MAX_UNREAD = 16
_FLOOD_PAUSE_S = 0.01


def connect(options: ClientOptions) -> WebsocketsClientLink:
    """Connect once.

    Raises:
        ConnectFailedError: nobody answered, or not as a WebSocket server does (yet).
        HandshakeError: the server refused, and would again.
    """
    more: dict[str, Any] = {}
    if options.url.startswith("wss"):
        more["ssl"] = options.ssl_context or ssl.create_default_context()
    stack = contextlib.ExitStack()
    try:
        # Entered, not just called: a bare connect() is deprecated.
        connection = stack.enter_context(
            websockets_connect(
                options.url,
                compression=None,
                max_size=None,
                additional_headers=options.headers,
                open_timeout=options.open_timeout_s,
                ping_interval=options.ping_interval_s,
                ping_timeout=options.ping_timeout_s,
                close_timeout=options.close_timeout_s,
                proxy=None,
                create_connection=_Connection,
                **more,
            )
        )
    except InvalidStatus as error:
        status = error.response.status_code
        if status >= 500:
            raise ConnectFailedError(f"HTTP {status}") from error
        raise HandshakeError(status) from error
    except ssl.SSLCertVerificationError as error:
        raise HandshakeError(495) from error
    except (OSError, TimeoutError, InvalidHandshake, ConnectionClosed, EOFError) as error:
        raise connect_failed(options.url, error) from error
    assert isinstance(connection, _Connection)
    # The server may have closed already; the first receive will tell why.
    with contextlib.suppress(OSError):
        _bound_sends(connection.socket, options.send_timeout_s)
    return WebsocketsClientLink(connection, stack)


def _bound_sends(sock: socket.socket, timeout_s: float) -> None:
    """Let a send to a server that stopped reading fail, instead of blocking for ever."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "win32":
        sock.setsockopt(socket.SOL_SOCKET, 0x1005, int(timeout_s * 1000))
    else:
        seconds = int(timeout_s)
        micros = int((timeout_s - seconds) * 1e6)
        limit = struct.pack("@ll", seconds, micros)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


class _Connection(ClientConnection):
    """A connection that queues whole messages.

    Attributes:
        inbox: the messages, and None at the end.
        is_left: nobody reads any more.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        self.inbox: queue.SimpleQueue[bytes | str | None] = queue.SimpleQueue()
        self.is_left = False
        self._parts: list[bytes] = []
        self._is_text = False
        super().__init__(*arguments, **more)

    def process_event(self, event: Event) -> None:
        """Take a frame of data; leave the handshake and pongs to the library."""
        if not isinstance(event, Frame) or event.opcode.value > Opcode.BINARY.value:
            super().process_event(event)
            return
        data = event.data if type(event.data) is bytes else bytes(event.data)
        if event.opcode is not Opcode.CONT:
            self._is_text = event.opcode is Opcode.TEXT
        if not event.fin or self._parts:
            self._parts.append(data)
            if not event.fin:
                return
            data = b"".join(self._parts)
            self._parts.clear()
        # The socket fills up meanwhile: the server is held back.
        while self.inbox.qsize() >= _MAX_UNREAD and self._may_wait():
            time.sleep(_FLOOD_PAUSE_S)
        if not self.is_left:
            self.inbox.put(data.decode(errors="replace") if self._is_text else data)

    def _may_wait(self) -> bool:
        return not self.is_left and self.protocol.state is State.OPEN

    def recv_events(self) -> None:
        """Run the library's thread, then tell the caller that nothing more comes."""
        try:
            super().recv_events()
        finally:
            self.inbox.put(None)


class WebsocketsClientLink:
    """See `ClientLink`."""

    def __init__(self, connection: _Connection, stack: contextlib.ExitStack) -> None:
        self._connection = connection
        self._stack = stack
        self._inbox = connection.inbox

    def send(self, frame: bytes) -> None:
        """See `ClientLink.send`."""
        connection = self._connection
        is_broken = False
        with connection.protocol_mutex:
            if connection.protocol.state is State.OPEN:
                try:
                    connection.protocol.send_binary(frame)
                    connection.send_data()
                    return
                except OSError:
                    is_broken = True
        if is_broken:
            connection.close_socket()
        try:
            connection.send(frame)  # it is not open any more; the library tells how it ended
        except ConnectionClosed as error:
            raise closed_error(received_close(error)) from error

    def receive(self, timeout_s: float | None) -> bytes | str:
        """See `ClientLink.receive`."""
        try:
            item = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if item is None:
            self._inbox.put(None)  # for whoever asks again
            raise closed_error(received_close(self._connection.protocol.close_exc))
        return item

    def close(self, close: Close) -> None:
        """See `ClientLink.close`."""
        self._connection.is_left = True
        self._connection.close(close.code, close.reason)
        self._stack.close()


def received_close(error: ConnectionClosed) -> Close:
    """Read what the server said at the end; nothing said is a lost connection."""
    if error.rcvd is None:
        return Close(ABNORMAL)
    return Close(error.rcvd.code, error.rcvd.reason)
