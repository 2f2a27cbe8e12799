"""Server links over ``websockets.asyncio``, without its queues: frames are taken as they arrive.

The library gives each connection a queue, and wakes a task for each message. Clients and server
alternate here, so there is nothing to queue: a message is handed over in the call that brought its
last byte, and the answer is written in that call too.

Most messages are one frame that arrives in one piece. Those are read and written here, because the
library's parser takes longer for them than decoding and answering does. Whatever is not just so is
the library's: handshake, fragments, pieces, control frames, and everything that breaks a rule.
"""

from __future__ import annotations

import asyncio
import http
from collections import deque
from functools import partial
from struct import Struct
from typing import TYPE_CHECKING, Any

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.frames import (  # type: ignore[attr-defined]  # apply_mask: C or Python
    Frame,
    Opcode,
    apply_mask,
)
from websockets.protocol import State

from plugrl_protocol.errors import ABNORMAL, MESSAGE_TOO_BIG, Close

if TYPE_CHECKING:
    from collections.abc import Callable

    from websockets.exceptions import ConnectionClosed
    from websockets.http11 import Request, Response
    from websockets.protocol import Event
    from websockets.server import ServerProtocol

    from plugrl_protocol.links.base import Receiver, ServerLink, ServerOptions

# Clients and server alternate, so more unread frames than this are a fault; each may be large.
_MAX_UNREAD_FRAMES = 4
# A cap of 256 MiB in fragments of 64 KiB.
_MAX_FRAGMENTS = 4096

_WHOLE_BINARY = 0x82
"""How a frame begins that is a whole binary message."""
_MEDIUM_HEAD, _LARGE_HEAD = Struct(">BBH"), Struct(">BBQ")


async def listen(
    options: ServerOptions, accept: Callable[[ServerLink], Receiver]
) -> WebsocketsServerLinks:
    """Listen; see `ServerLibrary.listen`."""

    async def handle(connection: ServerConnection) -> None:
        assert isinstance(connection, _Connection)
        await WebsocketsServerLink(connection, options.close_timeout_s).serve(accept)

    server = await serve(
        handle,
        options.host,
        options.port,
        compression=None,
        max_size=options.max_bytes,
        process_request=partial(_admit, options),
        open_timeout=options.open_timeout_s,
        ping_interval=options.ping_interval_s,
        ping_timeout=options.ping_timeout_s,
        close_timeout=options.close_timeout_s,
        ssl=options.ssl_context,
        create_connection=partial(_Connection, too_big=options.too_big),  # type: ignore[arg-type]  # a factory serves as well as a class
    )
    return WebsocketsServerLinks(server)


def _admit(
    options: ServerOptions, connection: ServerConnection, request: Request
) -> Response | None:
    given = request.headers.get_all("Authorization")
    host = _address(connection.remote_address).rpartition(":")[0]
    verdict = options.admit(request.path, given, host or "a client")
    if verdict is None:
        return None
    status, body = verdict
    return connection.respond(http.HTTPStatus(status), body)


class _Connection(ServerConnection):
    """A connection that hands over whole messages, and refuses those over the cap.

    Attributes:
        take: takes a message; until it is set, and while answers are not read, frames wait.
        reads_frames: whether the library's parser waits for the first byte of a message, so that
            whole messages can pass it by.
    """

    def __init__(
        self, protocol: ServerProtocol, server: Server, *, too_big: Close, **more: Any
    ) -> None:
        super().__init__(protocol, server, **more)
        fail = protocol.fail

        def fail_in_our_words(code: int, reason: str = "") -> None:
            fail(code, too_big.reason if code == MESSAGE_TOO_BIG else reason)

        self.take: Callable[[bytes | str], None] | None = None
        self.reads_frames = False
        self._waiting: deque[Frame] = deque()
        self._parts: list[bytes] = []
        self._is_text = False
        # websockets offers no hook for the reason of 1009.
        protocol.fail = fail_in_our_words  # type: ignore[method-assign]

    def data_received(self, data: bytes) -> None:
        """Hand over the whole messages that `data` begins with; the library reads on from there."""
        read = self._take_whole(data) if self.reads_frames else 0
        if read < len(data):
            super().data_received(data[read:] if read else data)
            self.reads_frames = _is_between_messages(self.protocol)

    def _take_whole(self, data: bytes) -> int:
        """Hand over messages of one frame each; give how many bytes they were."""
        position, size, most = 0, len(data), self.protocol.max_message_size or 0
        while size - position > 6 and data[position] == _WHOLE_BINARY:
            if self.take is None or self.paused or self.protocol.state is not State.OPEN:
                break
            length, start = data[position + 1] - 0x80, position + 6
            if length < 0:
                break  # not masked
            if length > 125:
                start += 2 if length == 126 else 8
                length = int.from_bytes(data[position + 2 : start - 4], "big")
            end = start + length
            if end > size or length > most:
                break
            self.take(apply_mask(data[start:end], data[start - 4 : start]))
            position = end
        return position

    def process_event(self, event: Event) -> None:
        """Take a frame of data at once; leave the handshake and pongs to the library."""
        if not isinstance(event, Frame) or event.opcode.value > Opcode.BINARY.value:
            super().process_event(event)
        elif self.take is None or self.paused:
            self._waiting.append(event)
            if len(self._waiting) == _MAX_UNREAD_FRAMES:
                self.transport.pause_reading()
        else:
            self._join(event, self.take)

    def start(self, take: Callable[[bytes | str], None]) -> None:
        """Hand over messages from now on, first those that waited."""
        self.take = take
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and self.take is not None and not self.paused:
            self._join(self._waiting.popleft(), self.take)
        if not self.paused:
            self.transport.resume_reading()

    def _join(self, frame: Frame, take: Callable[[bytes | str], None]) -> None:
        """Put the frames of a message together; the protocol checks their order and size."""
        data = frame.data if type(frame.data) is bytes else bytes(frame.data)
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
            if frame.fin:
                take(data.decode(errors="replace") if self._is_text else data)
                return
        # The cap counts bytes, and an empty fragment has none.
        self._parts.append(data)
        if frame.fin:
            data = b"".join(self._parts)
            self._parts.clear()
            take(data.decode(errors="replace") if self._is_text else data)
        elif len(self._parts) >= _MAX_FRAGMENTS:
            self._parts.clear()
            self.take = _ignore
            self.protocol.fail(MESSAGE_TOO_BIG)
            self.send_data()

    def pause_writing(self) -> None:
        """Read no more requests from a peer that does not read the answers."""
        super().pause_writing()
        self.transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on."""
        super().resume_writing()
        self._go_on()


def _head(size: int) -> bytes:
    """Give the first bytes of a whole binary message that a server sends."""
    if size < 126:
        return bytes((_WHOLE_BINARY, size))
    if size < 1 << 16:
        return _MEDIUM_HEAD.pack(_WHOLE_BINARY, 126, size)
    return _LARGE_HEAD.pack(_WHOLE_BINARY, 127, size)


def _is_between_messages(protocol: ServerProtocol) -> bool:
    """Whether the parser waits for the first byte of a message, and nobody wants to see frames.

    A parser that is built in another way than this one is never found waiting.
    """
    waits_in: Any = protocol.parser
    while (inner := waits_in.gi_yieldfrom) is not None:
        waits_in = inner
    return (
        waits_in.__name__ == "at_eof"
        and protocol.current_size is None
        and protocol.state is State.OPEN
        and not (protocol.reader.buffer or protocol.extensions or protocol.debug)
    )


def _ignore(data: bytes | str) -> None:
    """Take nothing more: the connection is failing."""


class WebsocketsServerLink:
    """See `ServerLink`."""

    def __init__(self, connection: _Connection, close_timeout_s: float) -> None:
        self.remote = _address(connection.remote_address)
        self._close_timeout_s = close_timeout_s
        self._hangup: asyncio.TimerHandle | None = None
        self._connection = connection
        self._protocol = connection.protocol
        self._closing: asyncio.Task[None] | None = None

    def send(self, frame: bytes) -> None:
        """See `ServerLink.send`."""
        if self._closing is None and self._protocol.state is State.OPEN:
            if self._connection.reads_frames:
                self._connection.transport.write(_head(len(frame)) + frame)
            else:
                self._protocol.send_binary(frame)
                self._connection.send_data()

    def close(self, close: Close) -> None:
        """See `ServerLink.close`."""
        if self._closing is None:
            self._connection.take = _ignore
            loop = asyncio.get_running_loop()
            self._closing = loop.create_task(self._connection.close(close.code, close.reason))
            # A peer that reads nothing would keep the queued frames, and the close, for ever.
            self._hangup = loop.call_later(2 * self._close_timeout_s, self.abort)

    def abort(self) -> None:
        """See `ServerLink.abort`."""
        self._connection.transport.abort()

    async def serve(self, accept: Callable[[ServerLink], Receiver]) -> None:
        """Hand over messages until the connection ends."""
        receiver = accept(self)
        if self._closing is None:
            self._connection.start(receiver.frame)
        try:
            await self._connection.wait_closed()
            receiver.closed(_first_close(self._protocol.close_exc))
        finally:
            if self._closing is not None:
                await self._closing
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
