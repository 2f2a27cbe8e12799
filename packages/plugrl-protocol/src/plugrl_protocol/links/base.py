"""What a link promises, whichever library carries it.

This module imports no library; `choose` imports the one asked for.
"""

from __future__ import annotations

import hmac
import logging
import ssl
import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

from plugrl_protocol.errors import Close, MisuseError, WireError, close_too_big

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Library: TypeAlias = Literal["websockets", "picows"]
HEALTH_PATH = "/healthz"
# glibc learns from freed blocks of up to 32 MiB.
_LARGE_BLOCK_BYTES = 31 * 2**20
_REFUSALS_EVERY_S = 60.0
_MOST_REFUSED = 256

logger = logging.getLogger(__name__)


class ConnectFailedError(WireError, ConnectionError):
    """One attempt to connect failed in a way that a later attempt may not."""


def connect_failed(url: str, error: BaseException) -> ConnectFailedError:
    """Word a failed attempt; where something answered in another way, with the other scheme.

    Args:
        url: what was tried.
        error: what a library raised.
    """
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    if url.startswith("wss"):
        answered = isinstance(error, (ssl.SSLError, ConnectionResetError, EOFError, TimeoutError))
        hint = "; does the server speak without TLS? Then its address begins with ws://"
    else:
        answered = not isinstance(error, OSError)
        hint = "; does the server speak TLS? Then its address begins with wss://"
    return ConnectFailedError(text + hint * answered)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """How a client connects."""

    url: str
    """``ws://host:port`` or ``wss://host:port``."""
    api_key: str | None = None
    """Sent as ``Authorization: Api-Key <key>``."""
    ssl_context: ssl.SSLContext | None = None
    """For ``wss``; None trusts what the system trusts."""
    open_timeout_s: float = 10.0
    ping_interval_s: float | None = 20.0
    ping_timeout_s: float = 20.0
    close_timeout_s: float = 2.0
    send_timeout_s: float = 60.0
    """Longest that a full socket may block a send."""

    @property
    def headers(self) -> dict[str, str]:
        """Headers to add to the handshake."""
        return {} if self.api_key is None else {"Authorization": f"Api-Key {self.api_key}"}

    def __post_init__(self) -> None:
        """Refuse what is no address of a server.

        Raises:
            MisuseError: says what is wrong with it.
        """
        wrong = _what_is_wrong(self.url)
        if wrong:
            raise MisuseError(
                f"{self.url!r} is no address of a server ({wrong}); expected ws://host:port or "
                "wss://host:port"
            )
        if self.ssl_context is not None and self.url.startswith("ws:"):
            raise MisuseError(f"certificates are for wss://, and the server is at {self.url}")


class ClientLink(Protocol):
    """A blocking connection to a server, used by one thread."""

    def send(self, frame: bytes) -> None:
        """Send one binary frame; raises `ClosedError` when the connection is gone."""

    def receive(self, timeout_s: float | None) -> bytes | str:
        """Wait for one message; raises `ClosedError`, or `TimeoutError` after ``timeout_s``."""

    def close(self, close: Close) -> None:
        """Close, waiting at most a moment for the server to agree. May be called twice."""


class ClientLibrary(Protocol):
    """The module of a library: its client half."""

    def connect(self, options: ClientOptions) -> ClientLink:
        """Connect once; raises `ConnectFailedError` or `HandshakeError`."""


def _what_is_wrong(url: str) -> str:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("ws", "wss"):
        return f"its scheme is {parts.scheme!r}"
    if not parts.hostname:
        return "it names no host"
    return "its port is 0" if port == 0 else "it has a fragment" if parts.fragment else ""


class Refusals:
    """Log who was not let in, an address once a minute at most, and never what it showed."""

    def __init__(self) -> None:
        self._told_s: dict[str, float] = {}

    def tell(self, remote: str, what: str) -> None:
        """Log one, unless its address was in the log a moment ago, or very many were."""
        now_s = time.monotonic()
        told = {at: s for at, s in self._told_s.items() if now_s - s < _REFUSALS_EVERY_S}
        if remote not in told and len(told) < _MOST_REFUSED:
            told[remote] = now_s
            logger.warning("%s was refused with HTTP 401: %s", remote, what)
        self._told_s = told


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """How a server listens."""

    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None
    ssl_context: ssl.SSLContext | None = None
    max_message_mb: float = 256.0
    ping_interval_s: float | None = 20.0
    ping_timeout_s: float = 20.0
    open_timeout_s: float = 10.0
    close_timeout_s: float = 2.0
    ready: Callable[[], bool] = lambda: True
    """Whether the server can infer: what ``/healthz`` answers."""
    refusals: Refusals = field(default_factory=Refusals, repr=False, compare=False)

    @property
    def max_bytes(self) -> int:
        """The cap of one message, in bytes."""
        return int(self.max_message_mb * 2**20)

    @property
    def too_big(self) -> Close:
        """How a message over the cap is refused."""
        return close_too_big(self.max_message_mb)

    def admit(
        self, path: str, authorizations: Sequence[str], remote: str = "a client"
    ) -> tuple[int, str] | None:
        """Decide on a handshake, before any frame is read.

        Args:
            path: what is asked for.
            authorizations: every ``Authorization`` header.
            remote: who asks, without its port; for the log.

        Returns:
            An HTTP status and body to answer with, or None to go on to the WebSocket.
        """
        if path.partition("?")[0] == HEALTH_PATH:
            return (200, "ok\n") if self.ready() else (503, "not ready\n")
        if self.api_key is None:
            return None
        # As bytes and in constant time: neither length nor content may leak.
        expected = f"Api-Key {self.api_key}".encode()
        given = "\n".join(authorizations).encode("utf-8", "surrogateescape")
        if hmac.compare_digest(expected, given):
            return None
        self.refusals.tell(remote, "another API key" if authorizations else "no API key")
        return 401, "wrong or missing API key\n"


class Receiver(Protocol):
    """What a server does with one connection; called on the event loop, must not block."""

    def frame(self, data: bytes | str) -> None:
        """Take one message."""

    def closed(self, close: Close) -> None:
        """Take the end of the connection: the first close frame of either side, or code 1006."""


class ServerLink(Protocol):
    """One accepted connection; for use on the event loop only."""

    remote: str

    def send(self, frame: bytes) -> None:
        """Queue one binary frame; a closed connection swallows it."""

    def close(self, close: Close) -> None:
        """Begin to close, after what was queued. The first call decides."""

    def abort(self) -> None:
        """Drop the connection at once."""


class ServerLinks(Protocol):
    """A listening server."""

    port: int

    async def stop_listening(self) -> None:
        """Accept no more connections; those that are open stay."""

    async def wait_closed(self) -> None:
        """Wait until every connection is gone."""


class ServerLibrary(Protocol):
    """The module of a library: its server half."""

    async def listen(
        self, options: ServerOptions, accept: Callable[[ServerLink], Receiver]
    ) -> ServerLinks:
        """Listen; ``accept`` is called for each connection whose handshake is done."""


class LinkLibrary(ClientLibrary, ServerLibrary, Protocol):
    """Both halves."""


@dataclass(frozen=True, slots=True)
class _Halves:
    """Two modules as one library."""

    client: ClientLibrary
    server: ServerLibrary

    def connect(self, options: ClientOptions) -> ClientLink:
        return self.client.connect(options)

    async def listen(
        self, options: ServerOptions, accept: Callable[[ServerLink], Receiver]
    ) -> ServerLinks:
        return await self.server.listen(options, accept)


def keep_freed_memory() -> None:
    """Tell the allocator that large blocks come and go, as frames with images do.

    The C library of Linux (glibc) returns large blocks to the system when they are freed, unless a
    larger one was freed before; to fault a frame's memory in again costs many times the copying of
    the frame. The block that is freed here is never touched, so it takes no memory.
    """
    bytes(_LARGE_BLOCK_BYTES)


def choose(library: Library) -> LinkLibrary:
    """Import a library.

    Raises:
        MisuseError: an unknown name, or ``picows`` without the extra ``[fast]``.
    """
    here = "plugrl_protocol.links"
    if library == "websockets":
        return _Halves(
            import_module(f"{here}.websockets_sync"), import_module(f"{here}.websockets_asyncio")
        )
    if library != "picows":
        raise MisuseError(f"unknown library {library!r}; choose 'websockets' or 'picows'")
    try:
        module = import_module(f"{here}.fast")
    except ModuleNotFoundError as error:
        raise MisuseError(
            f"{error.name} is not installed; pip install 'plugrl-protocol[fast]'"
        ) from error
    return _Halves(module, module)
