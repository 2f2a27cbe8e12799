"""Both halves over ``picows`` (the extra ``[fast]``).

picows works on an event loop only, so the blocking client runs one in a thread of its own: it
answers pings, and the caller waits on a queue.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import ssl
import threading
from typing import TYPE_CHECKING, Any, cast

import picows

from plugrl_protocol.errors import ABNORMAL, Close, HandshakeError, closed_error
from plugrl_protocol.links.base import ConnectFailedError, connect_failed

if TYPE_CHECKING:
    from collections.abc import Callable

    from picows.picows import WSCloseInfo

    from plugrl_protocol.links.base import ClientOptions, Receiver, ServerLink, ServerOptions

_NO_STATUS = 1005
# Looked up once: an attribute of an enum costs as much as a call.
_BINARY = picows.WSMsgType.BINARY
_CLOSE = picows.WSMsgType.CLOSE
_PONG = picows.WSMsgType.PONG
_FRAGMENT_BYTES = 64


class _Joiner:
    """Join the frames of a message, up to a number of bytes."""

    def __init__(self, too_big: Close, max_bytes: int | None) -> None:
        self._too_big = too_big
        self._max_bytes = max_bytes
        self._parts: list[bytes] = []
        self._size = 0
        self._is_text = False

    def whole(self, kind: picows.WSMsgType, frame: picows.WSFrame) -> bytes | None:
        """Take a frame that is a whole binary message within the cap; others are for `add`."""
        if kind != _BINARY or self._parts or not frame.fin:
            return None
        if self._max_bytes is not None and frame.payload_size > self._max_bytes:
            return None
        payload: bytes = frame.get_payload_as_bytes()
        return payload

    def add(self, frame: picows.WSFrame) -> bytes | str | None:
        """Take a data frame; give the message that it completes."""
        kind = frame.msg_type
        continues = kind == picows.WSMsgType.CONTINUATION
        if continues != bool(self._parts):
            raise picows.WSProtocolError(
                picows.WSCloseCode.PROTOCOL_ERROR, "fragments out of order"
            )
        # An empty fragment costs memory too.
        self._size += frame.payload_size + _FRAGMENT_BYTES * continues
        if self._max_bytes is not None and self._size > self._max_bytes:
            raise picows.WSProtocolError(
                picows.WSCloseCode(self._too_big.code), self._too_big.reason
            )
        if not continues:
            self._is_text = kind == picows.WSMsgType.TEXT
        payload: bytes = frame.get_payload_as_bytes()
        if frame.fin and not continues:
            self._size = 0
            return self._finish(payload)
        self._parts.append(payload)
        if not frame.fin:
            return None
        whole = b"".join(self._parts)
        self._parts, self._size = [], 0
        return self._finish(whole)

    def _finish(self, payload: bytes) -> bytes | str:
        if not self._is_text:
            return payload
        try:
            return payload.decode()
        except UnicodeDecodeError as error:
            raise picows.WSProtocolError(
                picows.WSCloseCode.INVALID_TEXT, "text that is not UTF-8"
            ) from error


def _close_of(transport: picows.WSTransport) -> Close:
    """Tell who ended the connection and how."""
    handshake = transport.close_handshake
    if handshake is None:
        return Close(ABNORMAL)
    first = handshake.recv if handshake.recv_then_sent else handshake.sent or handshake.recv
    return _as_close(first)


def _as_close(info: WSCloseInfo | None) -> Close:
    if info is None:
        return Close(ABNORMAL)
    # picows declares an enum and gives an int.
    code = int(cast("int", info.code))
    return Close(code or _NO_STATUS, info.reason or "")


def _answer_close(transport: picows.WSTransport, frame: picows.WSFrame) -> None:
    """Echo a close frame and hang up."""
    if not transport.is_close_frame_sent:
        code = frame.get_close_code()
        transport.send_close(code) if code else transport.send(_CLOSE, b"")
    transport.disconnect()


# --------------------------------------------------------------------------------------- client


class _ClientListener(picows.WSListener):
    """Put what arrives into a queue."""

    def __init__(self) -> None:
        self.was_connected = False
        self.inbox: queue.SimpleQueue[bytes | str | Close] = queue.SimpleQueue()
        self._joiner = _Joiner(Close(ABNORMAL), None)

    def on_ws_connected(self, transport: picows.WSTransport) -> None:
        """Called by picows."""
        self.was_connected = True

    def on_ws_frame(self, transport: picows.WSTransport, frame: picows.WSFrame) -> None:
        """Called by picows."""
        kind = frame.msg_type
        whole = self._joiner.whole(kind, frame)
        if whole is not None:
            self.inbox.put(whole)
        elif kind == _CLOSE:
            _answer_close(transport, frame)
        elif kind != _PONG:
            message = self._joiner.add(frame)
            if message is not None:
                self.inbox.put(message)

    def on_ws_disconnected(self, transport: picows.WSTransport) -> None:
        """Called by picows."""
        handshake = transport.close_handshake
        self.inbox.put(_as_close(None if handshake is None else handshake.recv))


def connect(options: ClientOptions) -> PicowsClientLink:
    """Connect once; see `ClientLibrary.connect`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="plugrl-link", daemon=True)
    thread.start()
    try:
        future = asyncio.run_coroutine_threadsafe(_open(options), loop)
        transport, listener = future.result()
    except BaseException:
        _end(loop, thread)
        raise
    return PicowsClientLink(loop, thread, transport, listener, options)


async def _open(options: ClientOptions) -> tuple[picows.WSTransport, _ClientListener]:
    context = options.ssl_context
    if options.url.startswith("wss") and context is None:
        context = ssl.create_default_context()
    try:
        listener = _ClientListener()
        transport, _ = await asyncio.wait_for(
            picows.ws_connect(
                lambda: listener,
                options.url,
                ssl_context=context,
                websocket_handshake_timeout=options.open_timeout_s,
                enable_auto_ping=options.ping_interval_s is not None,
                auto_ping_idle_timeout=options.ping_interval_s or 20.0,
                auto_ping_reply_timeout=options.ping_timeout_s,
                max_frame_size=2**62,
                extra_headers=options.headers,
                max_redirects=0,
            ),
            options.open_timeout_s,
        )
    except picows.WSInvalidStatusError as error:
        status = 0 if error.response is None else int(error.response.status)
        if status >= 500 or status == 0:
            raise ConnectFailedError(f"HTTP {status}") from error
        raise HandshakeError(status) from error
    except ssl.SSLCertVerificationError as error:
        raise HandshakeError(495) from error
    except (OSError, asyncio.TimeoutError, picows.WSError) as error:
        raise connect_failed(options.url, error) from error
    if not listener.was_connected:  # picows gives a transport also where nobody agreed to anything
        raise connect_failed(options.url, EOFError("no valid HTTP response"))
    return transport, listener


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class PicowsClientLink:
    """See `ClientLink`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        thread: threading.Thread,
        transport: picows.WSTransport,
        listener: _ClientListener,
        options: ClientOptions,
    ) -> None:
        self._loop, self._thread = loop, thread
        self._transport, self._inbox = transport, listener.inbox
        self._context = contextvars.copy_context()  # made once, not for each message
        self._close_timeout_s = options.close_timeout_s
        self._closed: Close | None = None

    def send(self, frame: bytes) -> None:
        """See `ClientLink.send`."""
        if self._closed is not None or self._transport.is_disconnected:
            raise closed_error(self._drain())
        # picows ignores what is sent to a connection that is gone.
        self._loop.call_soon_threadsafe(self._transport.send, _BINARY, frame, context=self._context)

    def receive(self, timeout_s: float | None) -> bytes | str:
        """See `ClientLink.receive`."""
        if self._closed is not None:
            raise closed_error(self._closed)
        try:
            item = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError from None
        if isinstance(item, Close):
            self._closed = item
            raise closed_error(item)
        return item

    def _drain(self) -> Close:
        """Find how the connection ended, behind what was never read."""
        while self._closed is None:
            item = self._inbox.get()
            if isinstance(item, Close):
                self._closed = item
        return self._closed

    def close(self, close: Close) -> None:
        """See `ClientLink.close`."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(self._hang_up(close), self._loop).result()
        _end(self._loop, self._thread)
        self._closed = self._closed or close

    async def _hang_up(self, close: Close) -> None:
        transport = self._transport
        if transport.is_disconnected:
            return
        transport.send_close(picows.WSCloseCode(close.code), close.reason.encode())
        await _gone(transport, self._close_timeout_s)


async def _gone(transport: picows.WSTransport, timeout_s: float) -> None:
    """Wait for the peer to hang up, then do it ourselves."""
    waiting = asyncio.ensure_future(transport.wait_disconnected())
    _, pending = await asyncio.wait([waiting], timeout=timeout_s)
    if pending:
        transport.disconnect(graceful=False)
        await asyncio.wait([waiting])
    # Retrieved, because picows stores protocol errors there; the close frame already told.
    waiting.exception()


# --------------------------------------------------------------------------------------- server


class _ServerListener(picows.WSListener):
    """See `ServerLink`."""

    def __init__(
        self,
        options: ServerOptions,
        accept: Callable[[ServerLink], Receiver],
        open_links: set[_ServerListener],
    ) -> None:
        self.remote = ""
        self._options = options
        self._accept = accept
        self._open_links = open_links
        self._joiner = _Joiner(options.too_big, options.max_bytes)
        self._transport: picows.WSTransport | None = None
        self._receiver: Receiver | None = None
        self._closing = False

    def on_ws_connected(self, transport: picows.WSTransport) -> None:
        """Called by picows."""
        peer = transport.underlying_transport.get_extra_info("peername")
        self.remote = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer)
        self._transport = transport
        self._open_links.add(self)
        self._receiver = self._accept(self)

    def on_ws_frame(self, transport: picows.WSTransport, frame: picows.WSFrame) -> None:
        """Called by picows."""
        kind, receiver = frame.msg_type, self._receiver
        if kind == _CLOSE:
            _answer_close(transport, frame)
        elif kind != _PONG and not self._closing and receiver is not None:
            whole = self._joiner.whole(kind, frame)
            message = self._joiner.add(frame) if whole is None else whole
            if message is not None:
                receiver.frame(message)

    def on_ws_disconnected(self, transport: picows.WSTransport) -> None:
        """Called by picows."""
        self._open_links.discard(self)
        if self._receiver is not None:
            self._receiver.closed(_close_of(transport))

    def pause_writing(self) -> None:
        """Read no more requests from a peer that does not read the answers."""
        if self._transport is not None:
            self._transport.underlying_transport.pause_reading()

    def resume_writing(self) -> None:
        """Go on reading."""
        if self._transport is not None:
            self._transport.underlying_transport.resume_reading()

    def send(self, frame: bytes) -> None:
        """See `ServerLink.send`."""
        transport = self._transport
        if transport is not None and not (self._closing or transport.is_disconnected):
            transport.send(_BINARY, frame)

    def close(self, close: Close) -> None:
        """See `ServerLink.close`."""
        transport = self._transport
        if transport is None or self._closing or transport.is_disconnected:
            return
        self._closing = True
        transport.send_close(picows.WSCloseCode(close.code), close.reason.encode())
        loop = asyncio.get_running_loop()
        loop.call_later(self._options.close_timeout_s, self.abort)

    def abort(self) -> None:
        """See `ServerLink.abort`."""
        if self._transport is not None and not self._transport.is_disconnected:
            self._transport.disconnect(graceful=False)


async def listen(
    options: ServerOptions, accept: Callable[[ServerLink], Receiver]
) -> PicowsServerLinks:
    """Listen; see `ServerLibrary.listen`."""
    open_links: set[_ServerListener] = set()

    def route(request: picows.WSUpgradeRequest) -> Any:
        given = request.headers.getall("Authorization", [])
        verdict = options.admit(request.path.decode("latin-1"), given)
        if verdict is None:
            return _ServerListener(options, accept, open_links)
        status, body = verdict
        make = picows.WSUpgradeResponse
        if status == 200:
            response = make.create_ok_response(body.encode())
        else:
            response = make.create_error_response(status, body.encode())
        return picows.WSUpgradeResponseWithListener(response, None)

    server = await picows.ws_create_server(
        route,
        options.host,
        options.port,
        ssl=options.ssl_context,
        websocket_handshake_timeout=options.open_timeout_s,
        enable_auto_ping=options.ping_interval_s is not None,
        auto_ping_idle_timeout=options.ping_interval_s or 20.0,
        auto_ping_reply_timeout=options.ping_timeout_s,
        # picows words the refusal of what exceeds its own limit; up to twice the cap we word it.
        max_frame_size=2 * options.max_bytes,
    )
    return PicowsServerLinks(server, open_links)


class PicowsServerLinks:
    """See `ServerLinks`."""

    def __init__(self, server: asyncio.Server, open_links: set[_ServerListener]) -> None:
        self._server = server
        self._open_links = open_links
        self.port: int = server.sockets[0].getsockname()[1]

    async def stop_listening(self) -> None:
        """See `ServerLinks.stop_listening`."""
        self._server.close()

    async def wait_closed(self) -> None:
        """See `ServerLinks.wait_closed`."""
        while self._open_links:
            link = next(iter(self._open_links))
            if link._transport is not None:
                await link._transport.wait_disconnected()
