"""A blocking client over ``websockets.sync``: its own thread answers pings."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import sys
from typing import TYPE_CHECKING, Any

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import ClientConnection
from websockets.sync.client import connect as websockets_connect

from plugrl_protocol.errors import (
    ABNORMAL,
    Close,
    HandshakeError,
    closed_error,
)
from plugrl_protocol.links.base import ConnectFailedError

if TYPE_CHECKING:
    from plugrl_protocol.links.base import ClientOptions


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
        raise ConnectFailedError(f"{type(error).__name__}: {error}") from error
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


class WebsocketsClientLink:
    """See `ClientLink`."""

    def __init__(self, connection: ClientConnection, stack: contextlib.ExitStack) -> None:
        self._connection = connection
        self._stack = stack

    def send(self, frame: bytes) -> None:
        """See `ClientLink.send`."""
        try:
            self._connection.send(frame)
        except ConnectionClosed as error:
            raise closed_error(received_close(error)) from error

    def receive(self, timeout_s: float | None) -> bytes | str:
        """See `ClientLink.receive`."""
        try:
            return self._connection.recv(timeout=timeout_s)
        except ConnectionClosed as error:
            raise closed_error(received_close(error)) from error

    def close(self, close: Close) -> None:
        """See `ClientLink.close`."""
        self._connection.close(close.code, close.reason)
        self._stack.close()


def received_close(error: ConnectionClosed) -> Close:
    """Read what the server said at the end; nothing said is a lost connection."""
    if error.rcvd is None:
        return Close(ABNORMAL)
    return Close(error.rcvd.code, error.rcvd.reason)
