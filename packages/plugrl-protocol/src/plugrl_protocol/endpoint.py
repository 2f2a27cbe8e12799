"""An asyncio server for the wire: sockets and turns, nothing else.

It accepts connections, gives each a `ServerSession`, and hands decoded requests to an `Application`
through four short calls. It knows nothing of policies, batches or learning: an application that
takes long keeps the `Connection` and answers later, from any thread.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from plugrl_protocol.errors import (
    CLOSE_INTERNAL_ERROR,
    CLOSE_SHUTDOWN,
    POLICY_VIOLATION,
    Close,
    MisuseError,
    ProtocolError,
    close_refused,
)
from plugrl_protocol.links import (
    Receiver,
    ServerLink,
    ServerLinks,
    ServerOptions,
    choose,
    keep_freed_memory,
)
from plugrl_protocol.messages import Feedback, Infer, Metadata, make_metadata
from plugrl_protocol.server_session import EnvRecord, ServerSession, SessionConfig

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from plugrl_protocol.links.base import Library
    from plugrl_protocol.templates import Array

logger = logging.getLogger(__name__)

_SWEEP_S = 0.25
_STOP_TIMEOUT_S = 4.0


class Application(Protocol):
    """What a server does with requests.

    Every call comes on the event loop and must return at once. An exception closes that one
    connection: a `ProtocolError` with resync, anything else with 1011 and a traceback in the log.
    """

    def connected(self, connection: Connection) -> None:
        """A client came; its metadata is on the way."""

    def infer(self, connection: Connection, request: Infer) -> None:
        """A client waits for ``connection.answer``."""

    def feedback(self, connection: Connection, report: Feedback) -> None:
        """A client reported finished chunks; ``connection.records`` is up to date."""

    def disconnected(self, connection: Connection, close: Close) -> None:
        """The connection is gone, and with it all that it held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """Where and how to serve."""

    listen: ServerOptions = field(default_factory=ServerOptions)
    session: SessionConfig = field(default_factory=SessionConfig)
    library: Library = "websockets"


class Connection:
    """One client, as an application sees it.

    Attributes:
        remote: its address, for logs.
        serial: counts connections of this endpoint from 1; unique in its life.
    """

    def __init__(self, endpoint: Endpoint, link: ServerLink, serial: int) -> None:
        self.remote = link.remote
        self.serial = serial
        self._endpoint = endpoint
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._session = ServerSession(metadata=endpoint.metadata, config=endpoint.config.session)
        self._gone = False
        self._closing = False

    def __repr__(self) -> str:
        return f"<Connection {self.serial} {self.remote}>"

    @property
    def records(self) -> dict[int, EnvRecord]:
        """Env index to what is known of that env; ``owner`` is free for the application."""
        return self._session.records

    @property
    def reused_rows(self) -> int:
        """Observation rows that this client left out so far."""
        return self._session.reused_rows

    @property
    def is_open(self) -> bool:
        """Whether an answer could still arrive."""
        return not (self._gone or self._closing)

    def answer(self, action: Array) -> None:
        """Answer the open infer; on the event loop only.

        Args:
            action: ``[H, n, *da]``, time-major, in the order of the request.

        Raises:
            MisuseError: no infer is open, or the array does not fit it.
        """
        if not (self._gone or self._closing):
            self._link.send(self._session.answer(action, self._loop.time()))

    def answer_soon(self, action: Array) -> None:
        """Answer from another thread; a mistake closes the connection with 1011."""
        self._loop.call_soon_threadsafe(self._guarded_answer, action)

    def _guarded_answer(self, action: Array) -> None:
        try:
            self.answer(action)
        except MisuseError:
            logger.exception("%r: an action that cannot be sent", self)
            self.close(CLOSE_INTERNAL_ERROR)

    def refuse(self, reason: str) -> None:
        """Close with 1008: the policy cannot use these observations. Name both sides."""
        self.close(close_refused(reason))

    def close(self, close: Close) -> None:
        """Close; on the event loop only. The first close decides."""
        self._closing = True
        self._link.close(close)

    def close_soon(self, close: Close) -> None:
        """Close from another thread."""
        self._loop.call_soon_threadsafe(self.close, close)


class _Turns:
    """Take the frames of one connection: the `Receiver` of its link."""

    def __init__(self, endpoint: Endpoint, connection: Connection) -> None:
        self._endpoint = endpoint
        self._connection = connection
        self._session = connection._session
        self._application = endpoint.application

    def open(self, link: ServerLink) -> None:
        """Speak first."""
        link.send(self._session.open())
        try:
            self._application.connected(self._connection)
        except ProtocolError as error:
            self._violated(error)
        except Exception:  # the border to the application's callbacks
            logger.exception("%r: the application failed", self._connection)
            self._connection.close(CLOSE_INTERNAL_ERROR)

    def frame(self, data: bytes | str) -> None:
        """See `Receiver.frame`."""
        try:
            event = self._session.receive(data)
            if isinstance(event, Infer):
                self._application.infer(self._connection, event)
            else:
                self._application.feedback(self._connection, event)
        except ProtocolError as error:
            self._violated(error)
        except Exception:  # the border to the application's callbacks
            logger.exception("%r: the application failed", self._connection)
            self._connection.close(CLOSE_INTERNAL_ERROR)

    def _violated(self, error: ProtocolError) -> None:
        logger.warning("%r: %s; closing with resync", self._connection, error)
        self._connection.close(error.close)

    def closed(self, close: Close) -> None:
        """See `Receiver.closed`."""
        connection = self._connection
        connection._gone = True
        self._endpoint._forget(connection)
        if close.code == POLICY_VIOLATION and not connection._closing:
            logger.error("%r: the client refuses this server, %s", connection, close.reason)
        else:
            logger.info("%r: closed with %s", connection, close)
        try:
            self._application.disconnected(connection, close)
        except Exception:  # the border to the application's callbacks
            logger.exception("%r: the application failed on a disconnect", connection)


class Endpoint:
    """Serve the wire on one port.

    Args:
        application: takes the requests.
        metadata: what each client hears first.
        config: where and how.

    Attributes:
        connections: those that are open, by serial.
        port: where it listens, once started.
    """

    def __init__(
        self,
        application: Application,
        *,
        metadata: Metadata | None = None,
        config: EndpointConfig | None = None,
    ) -> None:
        self.application = application
        self.metadata = metadata or make_metadata()
        self.config = config or EndpointConfig()
        self.connections: dict[int, Connection] = {}
        self.port = 0
        self._serial = 0
        self._links: ServerLinks | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self._suspended = False
        self._stopping: Close | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Begin to listen.

        Raises:
            OSError: the port is taken.
        """
        if self._links is not None:
            raise MisuseError("this endpoint is already started")
        keep_freed_memory()
        library = choose(self.config.library)
        self._links = await library.listen(self.config.listen, self._accept)
        self.port = self._links.port
        self._sweep_later()

    async def stop(self, close: Close = CLOSE_SHUTDOWN) -> None:
        """Close every connection and stop listening; waits a few seconds at most.

        Args:
            close: what clients hear: `CLOSE_STOP` when the run is finished.
        """
        links, self._links = self._links, None
        if links is None:
            return
        self._stopping = close
        if self._sweep is not None:
            self._sweep.cancel()
        await links.stop_listening()
        for connection in list(self.connections.values()):
            connection.close(close)
        try:
            await asyncio.wait_for(links.wait_closed(), _STOP_TIMEOUT_S)
        except asyncio.TimeoutError:
            for connection in list(self.connections.values()):
                connection._link.abort()
            await asyncio.wait_for(links.wait_closed(), _STOP_TIMEOUT_S)

    def suspend_feedback_clock(self) -> None:
        """Do not count time against clients while the server learns; on the event loop only."""
        self._suspended = True
        for connection in self.connections.values():
            connection._session.suspend(connection._loop.time())

    def resume_feedback_clock(self) -> None:
        """Count again, from where the clocks stood."""
        self._suspended = False
        for connection in self.connections.values():
            connection._session.resume(connection._loop.time())

    def _accept(self, link: ServerLink) -> Receiver:
        self._serial += 1
        connection = Connection(self, link, self._serial)
        self.connections[connection.serial] = connection
        logger.info("%r: connected", connection)
        turns = _Turns(self, connection)
        if self._suspended:
            connection._session.suspend(connection._loop.time())
        turns.open(link)
        if self._stopping is not None:
            link.close(self._stopping)
        return turns

    def _forget(self, connection: Connection) -> None:
        self.connections.pop(connection.serial, None)

    def _sweep_later(self) -> None:
        interval_s = min(_SWEEP_S, self.config.session.feedback_timeout_s / 4)
        loop = asyncio.get_running_loop()
        self._sweep = loop.call_later(interval_s, self._close_overdue)

    def _close_overdue(self) -> None:
        """One timer for all connections: a feedback costs no timer of its own."""
        for connection in list(self.connections.values()):
            close = connection._session.expired(connection._loop.time())
            if close is not None and connection.is_open:
                logger.warning("%r: no feedback in time", connection)
                connection.close(close)
        self._sweep_later()
