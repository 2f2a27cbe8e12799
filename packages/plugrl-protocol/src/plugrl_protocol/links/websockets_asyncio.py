"""Server links over ``websockets.asyncio``: one task per connection moves its frames."""

from __future__ import annotations

import asyncio
import contextlib
import http
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.frames import Frame, Opcode

from plugrl_protocol.errors import ABNORMAL, MESSAGE_TOO_BIG, Close

if TYPE_CHECKING:
    from collections.abc import Callable

    from websockets.http11 import Request, Response
    from websockets.protocol import Event
    from websockets.server import ServerProtocol

    from plugrl_protocol.links.base import Receiver, ServerLink, ServerOptions

# Clients and server alternate, so more unread frames than this are a fault; each may be large.
_MAX_UNREAD_FRAMES = 4
# A cap of 256 MiB in fragments of 64 KiB.
_MAX_FRAGMENTS = 4096


async def listen(
    options: ServerOptions, accept: Callable[[ServerLink], Receiver]
) -> WebsocketsServerLinks:
    """Listen; see `ServerLibrary.listen`."""
    links: set[WebsocketsServerLink] = set()

    async def handle(connection: ServerConnection) -> None:
        link = WebsocketsServerLink(connection, options.close_timeout_s)
        links.add(link)
        try:
            await link.pump(accept)
        finally:
            links.discard(link)

    server = await serve(
        handle,
        options.host,
        options.port,
        compression=None,
        max_size=options.max_bytes,
        max_queue=_MAX_UNREAD_FRAMES,
        process_request=partial(_admit, options),
        open_timeout=options.open_timeout_s,
        ping_interval=options.ping_interval_s,
        ping_timeout=options.ping_timeout_s,
        close_timeout=options.close_timeout_s,
        ssl=options.ssl_context,
        create_connection=partial(_CappedConnection, too_big=options.too_big),  # type: ignore[arg-type]  # a factory serves as well as a class
    )
    return WebsocketsServerLinks(server)


def _admit(
    options: ServerOptions, connection: ServerConnection, request: Request
) -> Response | None:
    verdict = options.admit(request.path, request.headers.get_all("Authorization"))
    if verdict is None:
        return None
    status, body = verdict
    return connection.respond(http.HTTPStatus(status), body)


class _CappedConnection(ServerConnection):
    """A connection that refuses a frame over the cap with the reason of the page."""

    def __init__(
        self, protocol: ServerProtocol, server: Server, *, too_big: Close, **more: Any
    ) -> None:
        super().__init__(protocol, server, **more)
        fail = protocol.fail

        def fail_in_our_words(code: int, reason: str = "") -> None:
            fail(code, too_big.reason if code == MESSAGE_TOO_BIG else reason)

        self._fragments = 0
        # websockets offers no hook for the reason of 1009.
        protocol.fail = fail_in_our_words  # type: ignore[method-assign]

    def process_event(self, event: Event) -> None:
        """Count fragments: the cap of websockets counts bytes, and an empty fragment has none."""
        if isinstance(event, Frame) and event.opcode is Opcode.CONT:
            self._fragments += 1
            if self._fragments == _MAX_FRAGMENTS:
                self.protocol.fail(MESSAGE_TOO_BIG)
                self.send_data()
            if self._fragments >= _MAX_FRAGMENTS:
                return
            if event.fin:
                self._fragments = 0
        super().process_event(event)


class WebsocketsServerLink:
    """See `ServerLink`."""

    def __init__(self, connection: ServerConnection, close_timeout_s: float) -> None:
        self.remote = _address(connection.remote_address)
        self._close_timeout_s = close_timeout_s
        self._hangup: asyncio.TimerHandle | None = None
        self._connection = connection
        self._outbox: deque[bytes] = deque()
        self._close: Close | None = None
        self._receiving = False
        self._flusher: asyncio.Task[None] | None = None

    def send(self, frame: bytes) -> None:
        """See `ServerLink.send`."""
        self._outbox.append(frame)
        self._kick()

    def close(self, close: Close) -> None:
        """See `ServerLink.close`."""
        if self._close is None:
            self._close = close
            self._kick()
            # A peer that reads nothing would keep the queued frames, and the close, for ever.
            loop = asyncio.get_running_loop()
            self._hangup = loop.call_later(2 * self._close_timeout_s, self.abort)

    def abort(self) -> None:
        """See `ServerLink.abort`."""
        self._connection.transport.abort()

    def _kick(self) -> None:
        # While the receiver runs, the pump itself sends afterwards: no task is needed.
        if not self._receiving and self._flusher is None:
            self._flusher = asyncio.get_running_loop().create_task(self._flush())

    async def _flush(self) -> None:
        try:
            with contextlib.suppress(ConnectionClosed):
                while self._outbox:
                    await self._connection.send(self._outbox.popleft())
                if self._close is not None:
                    await self._connection.close(self._close.code, self._close.reason)
        finally:
            self._flusher = None

    async def pump(self, accept: Callable[[ServerLink], Receiver]) -> None:
        """Move frames until the connection ends."""
        self._receiving = True
        receiver = accept(self)
        try:
            while True:
                self._receiving = False
                if self._flusher is None:
                    while self._outbox:
                        await self._connection.send(self._outbox.popleft())
                    if self._close is not None:
                        await self._flush()
                frame = await self._connection.recv()
                self._receiving = True
                if self._close is None:
                    receiver.frame(frame)
        except ConnectionClosed as error:
            receiver.closed(_first_close(error))
        finally:
            if self._flusher is not None:
                self._flusher.cancel()
            if self._hangup is not None:
                self._hangup.cancel()


def _address(address: Any) -> str:
    return f"{address[0]}:{address[1]}" if isinstance(address, tuple) else str(address)


def _first_close(error: ConnectionClosed) -> Close:
    """Tell who ended the connection and how."""
    frame = error.rcvd if error.rcvd_then_sent else error.sent or error.rcvd
    return Close(ABNORMAL) if frame is None else Close(frame.code, frame.reason)


class WebsocketsServerLinks:
    """See `ServerLinks`."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.port: int = server.sockets[0].getsockname()[1]

    async def stop_listening(self) -> None:
        """See `ServerLinks.stop_listening`."""
        self._server.close(close_connections=False)

    async def wait_closed(self) -> None:
        """See `ServerLinks.wait_closed`."""
        await self._server.wait_closed()
