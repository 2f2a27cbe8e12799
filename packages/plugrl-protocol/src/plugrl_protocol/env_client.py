"""A blocking client for a program that holds environments: connect, infer, feedback, close.

The facade joins a `ClientSession` (what may be said) with a link (how it travels) and adds the one
thing neither has: patience. It waits for a server with back-off and jitter, up to a limit. When a
connection is lost it says so once, with `ConnectionReplaced`; the next ``infer`` connects anew.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from plugrl_protocol.client_session import ClientSession
from plugrl_protocol.errors import (
    CLOSE_FINISHED,
    Close,
    ClosedError,
    ConnectionReplaced,
    MalformedMessageError,
    ProtocolError,
    ServerNotFoundError,
    ServerStopped,
    close_refused,
)
from plugrl_protocol.links import (
    ClientLink,
    ClientOptions,
    ConnectFailedError,
    choose,
    keep_freed_memory,
)
from plugrl_protocol.messages import Action, Metadata

if TYPE_CHECKING:
    import ssl
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self

    from plugrl_protocol.links.base import Library
    from plugrl_protocol.messages import Feedback, Infer

_PROTOCOL_ERROR: Final = 1002


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """How long to wait between attempts to find a server, and for how long in all."""

    first_s: float = 0.2
    longest_s: float = 5.0
    factor: float = 2.0
    limit_s: float | None = 300.0
    """Give up after this long; None never gives up."""

    def delays(self, rng: random.Random) -> Iterator[float]:
        """Yield the wait before each further attempt, in seconds.

        Every wait is drawn between half and the whole of a growing step, so that many clients
        which lost one server do not come back in the same instant.
        """
        step = self.first_s
        while True:
            yield step * rng.uniform(0.5, 1.0)
            step = min(self.longest_s, step * self.factor)


class EnvClient:
    """One environment program's connection to a training server.

    Use it as a context manager, or call `close`. Not for use by two threads at once.

    Args:
        url: ``ws://host:port`` or ``wss://host:port``.
        api_key: sent in the handshake.
        reuse: leave out observations that the server already has.
        wait_for_next_run: after ``plugrl-server-stop`` wait for the next server instead of raising
            `ServerStopped`.
        backoff: how patiently to look for a server.
        ssl_context: for ``wss``.
        library: ``"websockets"``, or ``"picows"`` with the extra ``[fast]``.

    Raises:
        MisuseError: `url` is no address of a server.

    Attributes:
        options: how it connects; replace it before the first connection to change timeouts.
        connections: how many connections there have been.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        reuse: bool = True,
        wait_for_next_run: bool = False,
        backoff: Backoff | None = None,
        ssl_context: ssl.SSLContext | None = None,
        library: Library = "websockets",
    ) -> None:
        self.options = ClientOptions(url=url, api_key=api_key, ssl_context=ssl_context)
        self.connections = 0
        self._library = choose(library)
        self._reuse = reuse
        self._wait_for_next_run = wait_for_next_run
        self._backoff = backoff or Backoff()
        self._rng = random.Random()
        self._link: ClientLink | None = None
        self._session = ClientSession(reuse=reuse)

    def __enter__(self) -> Self:
        self.connect()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def metadata(self) -> Metadata:
        """What the current (or else the last) connection's server said about itself."""
        return self._session.metadata

    @property
    def holding(self) -> frozenset[int]:
        """Envs that hold an action of the current connection."""
        return self._session.holding if self._link is not None else frozenset()

    def connect(self) -> Metadata:
        """Connect, if there is no connection, waiting for a server as `Backoff` says.

        Returns:
            The server's metadata.

        Raises:
            ServerNotFoundError: none came within the limit.
            ServerStopped: the run is finished, and nobody asked to wait for the next.
            HandshakeError: the server refused, for example the API key.
            ProtocolError: what answered does not speak this protocol.
        """
        if self._link is not None:
            return self.metadata
        started_s = time.monotonic()
        limit_s = self._backoff.limit_s
        for attempts, delay_s in enumerate(self._backoff.delays(self._rng), start=1):
            try:
                return self._connect_once()
            except (ConnectFailedError, ConnectionReplaced, ServerStopped) as error:
                if isinstance(error, ServerStopped) and not self._wait_for_next_run:
                    raise
                waited_s = time.monotonic() - started_s
                if limit_s is not None and waited_s + delay_s > limit_s:
                    raise ServerNotFoundError(
                        self.options.url, attempts=attempts, waited_s=waited_s, last=str(error)
                    ) from error
            time.sleep(delay_s)
        raise AssertionError("delays never end")

    def _connect_once(self) -> Metadata:
        keep_freed_memory()
        session = ClientSession(reuse=self._reuse)
        link = self._library.connect(self.options)
        self._link, self._session = link, session
        try:
            session.receive(link.receive(self.options.open_timeout_s))
        except TimeoutError as error:
            self._drop(CLOSE_FINISHED)
            raise ConnectFailedError("no metadata came") from error
        except ClosedError:
            self._drop(CLOSE_FINISHED)
            raise
        except ProtocolError as error:
            self._drop(Close(_PROTOCOL_ERROR, str(error)))
            raise
        self.connections += 1
        return session.metadata

    def infer(self, request: Infer, *, timeout_s: float | None = None) -> Action:
        """Ask for actions, connecting first if there is no connection.

        Args:
            request: the envs whose chunk ran out; on a new connection all envs.
            timeout_s: give up on this connection after so long. None waits as long as the server
                answers pings: it may be learning.

        Returns:
            The action chunk, a read-only view on the frame.

        Raises:
            ConnectionReplaced: the connection was lost: drop all chunks, then ``infer`` anew.
            ServerStopped: the run is finished.
            ObservationRefusedError: the server cannot use these observations.
            ServerFailedError: the server broke.
            ProtocolError: the server broke the protocol.
        """
        if self._link is None:
            self.connect()
        frame = self._session.infer(request)
        link = self._require_link()
        try:
            link.send(frame)
            reply = self._session.receive(link.receive(timeout_s))
        except TimeoutError:
            lost = Close(1006, f"no action within {timeout_s:g} s")
            self._drop(CLOSE_FINISHED)
            raise ConnectionReplaced(lost) from None
        except ProtocolError as error:
            self._drop(Close(_PROTOCOL_ERROR, str(error)))
            raise
        except ClosedError as error:
            self._drop(CLOSE_FINISHED)
            raise self._as_seen(error) from error
        if not isinstance(reply, Action):
            raise MalformedMessageError("the server answered an infer with metadata")
        return reply

    def feedback(self, report: Feedback) -> None:
        """Report finished chunks; nothing is answered and nothing is retried.

        Args:
            report: rows of envs that hold an action of this connection.

        Raises:
            ConnectionReplaced: the connection was lost; ``must_reset`` names the envs of this
                report whose episode had ended.
            ServerStopped: the run is finished.
            ObservationRefusedError: the server cannot use these observations.
            ServerFailedError: the server broke.
        """
        if self._link is None:
            raise ConnectionReplaced(Close(1006), _done_envs(report))
        frame = self._session.feedback(report)
        try:
            self._link.send(frame)
        except ClosedError as error:
            self._drop(CLOSE_FINISHED)
            raise self._as_seen(error, _done_envs(report)) from error

    def refuse(self, reason: str) -> None:
        """End the connection because what the server sends cannot be used (1008).

        Args:
            reason: names both sides; the server logs it. Cut to 123 bytes.
        """
        self._drop(close_refused(reason))

    def close(self) -> None:
        """End the connection the normal way (1000). May be called twice."""
        self._drop(CLOSE_FINISHED)

    def _require_link(self) -> ClientLink:
        if self._link is None:
            raise ConnectionReplaced(Close(1006))
        return self._link

    def _drop(self, close: Close) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(close)

    def _as_seen(self, error: ClosedError, must_reset: frozenset[int] = frozenset()) -> ClosedError:
        """Turn the end of a connection into what this caller asked to see."""
        stopped = isinstance(error, ServerStopped)
        if isinstance(error, ConnectionReplaced) or (stopped and self._wait_for_next_run):
            return ConnectionReplaced(error.close, must_reset)
        return error


def _done_envs(report: Feedback) -> frozenset[int]:
    return frozenset(report.env_indices[report.done].tolist())
