"""Every error of the wire, and the close frame that each one means.

::

    WireError
    ├── CodecError (ValueError)           bytes that do not decode, objects that cannot be encoded
    ├── ProtocolError                     the peer broke a rule of the page: close with resync
    │   ├── MalformedMessageError (ValueError)
    │   └── OutOfTurnError
    ├── MisuseError (RuntimeError)        our own caller broke a rule: a programming error
    ├── HandshakeError (ConnectionError)  the server answered with an HTTP status, e.g. 401
    ├── ServerNotFoundError (ConnectionError)  no server within the limit
    └── ClosedError (ConnectionError)     the connection is gone; carries code and reason
        ├── ServerStopped                 the run is finished
        ├── ConnectionReplaced            reconnect and start with an ``infer``
        ├── ObservationRefusedError       1008 or 1009: reconnecting would not help
        └── ServerFailedError             1011, or a peer that speaks another protocol

Exceptions carry data; ``__str__`` renders it. This module knows nothing of sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NORMAL: Final = 1000
GOING_AWAY: Final = 1001
UNSUPPORTED_DATA: Final = 1003
ABNORMAL: Final = 1006
POLICY_VIOLATION: Final = 1008
MESSAGE_TOO_BIG: Final = 1009
INTERNAL_ERROR: Final = 1011

STOP_REASON: Final = "plugrl-server-stop"
RESYNC_REASON: Final = "plugrl-server-resync"
FEEDBACK_TIMEOUT_REASON: Final = "Feedback timeout"
SHUTDOWN_REASON: Final = "Server shutdown"
INTERNAL_ERROR_REASON: Final = "Internal server error."

MAX_REASON_BYTES: Final = 123


def fit_reason(reason: str) -> str:
    """Cut a close reason to the 123 bytes of UTF-8 that a close frame has room for."""
    encoded = reason.encode("utf-8", "replace")
    if len(encoded) <= MAX_REASON_BYTES:
        return encoded.decode("utf-8")
    return encoded[: MAX_REASON_BYTES - 3].decode("utf-8", "ignore") + "..."


@dataclass(frozen=True, slots=True)
class Close:
    """A close frame: its code and its reason (at most 123 bytes of UTF-8)."""

    code: int
    reason: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", fit_reason(self.reason))

    def __str__(self) -> str:
        return f"{self.code} {self.reason}".rstrip()


CLOSE_FINISHED: Final = Close(NORMAL)
CLOSE_STOP: Final = Close(GOING_AWAY, STOP_REASON)
CLOSE_RESYNC: Final = Close(GOING_AWAY, RESYNC_REASON)
CLOSE_FEEDBACK_TIMEOUT: Final = Close(GOING_AWAY, FEEDBACK_TIMEOUT_REASON)
CLOSE_SHUTDOWN: Final = Close(GOING_AWAY, SHUTDOWN_REASON)
CLOSE_INTERNAL_ERROR: Final = Close(INTERNAL_ERROR, INTERNAL_ERROR_REASON)


def close_refused(reason: str) -> Close:
    """Build the close by which one side refuses what the other cannot but send (1008).

    A server refuses observations that its policy was not built for, a client actions that its
    environments were not. The reason names both sides.
    """
    return Close(POLICY_VIOLATION, reason)


def close_too_big(max_message_mb: float) -> Close:
    """Build the close of a frame over the cap (1009, ``message over N MiB``)."""
    return Close(MESSAGE_TOO_BIG, f"message over {max_message_mb:g} MiB")


class WireError(Exception):
    """Root of everything that this distribution raises."""


class CodecError(WireError, ValueError):
    """Bytes that are no valid message, or an object that has no place on the wire."""


class ProtocolError(WireError):
    """The peer broke a rule of the page; the connection ends with ``plugrl-server-resync``."""

    @property
    def close(self) -> Close:
        """The close frame that answers this violation."""
        return CLOSE_RESYNC


class MalformedMessageError(ProtocolError, ValueError):
    """A frame that does not decode, or a message whose content breaks the page."""


class OutOfTurnError(ProtocolError):
    """A message of the right form at the wrong moment."""


class MisuseError(WireError, RuntimeError):
    """The caller of this package did something that the protocol does not allow."""


class HandshakeError(WireError, ConnectionError):
    """The handshake failed, and would fail again.

    Attributes:
        status: the HTTP status of the server's refusal, for example 401; 495 if its certificate is
            not trusted.
    """

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status

    def __str__(self) -> str:
        if self.status == 495:
            return (
                "the server's certificate is not trusted here: is it self-signed, expired or of "
                "another host? Say which certificates to trust (ca_file, --ca-file, ssl_context)"
            )
        key = " (wrong or missing API key: api_key, --api-key or PLUGRL_API_KEY)"
        hint = key if self.status == 401 else ""
        return f"the server refused the handshake with HTTP {self.status}{hint}"


class ServerNotFoundError(WireError, ConnectionError):
    """No server answered within the limit.

    Attributes:
        url: the address that was tried.
        attempts: how many times.
        waited_s: for how long, in seconds.
    """

    def __init__(self, url: str, *, attempts: int, waited_s: float, last: str) -> None:
        super().__init__(url, attempts, waited_s, last)
        self.url, self.attempts, self.waited_s, self.last = url, attempts, waited_s, last

    def __str__(self) -> str:
        return (
            f"no server at {self.url} after {self.attempts} attempts in {self.waited_s:.1f} s "
            f"(last: {self.last}); start the server or raise the limit"
        )


class ClosedError(WireError, ConnectionError):
    """The connection is gone.

    Attributes:
        close: the close frame received; ``Close(1006)`` when the connection was lost without one.
    """

    def __init__(self, close: Close) -> None:
        super().__init__(close)
        self.close = close

    def __str__(self) -> str:
        return f"connection closed: {self.close}"


class ServerStopped(ClosedError):  # noqa: N818 (the name that users catch)
    """The run is finished (1001 ``plugrl-server-stop``): leave with success."""


class ConnectionReplaced(ClosedError):  # noqa: N818 (the name that users catch)
    """The connection is lost and every action it carried is void.

    Drop all chunks and held feedback, reset the envs in ``must_reset``, then ``infer`` for all.

    Attributes:
        must_reset: env indices whose dropped feedback was a done.
    """

    def __init__(self, close: Close, must_reset: frozenset[int] = frozenset()) -> None:
        super().__init__(close)
        self.must_reset = must_reset


class ObservationRefusedError(ClosedError):
    """The server cannot use what this client sends (1008, 1009); reconnecting would not help."""


class ServerFailedError(ClosedError):
    """The server broke (1011), or what answers does not speak this protocol."""


def closed_error(close: Close, must_reset: frozenset[int] = frozenset()) -> ClosedError:
    """Choose the exception that a client raises for a close frame.

    Args:
        close: what the server sent; code 1006 for a connection lost without a close frame.
        must_reset: env indices whose dropped feedback was a done.

    Returns:
        The most specific subclass of `ClosedError`.
    """
    if close.code == GOING_AWAY and close.reason == STOP_REASON:
        return ServerStopped(close)
    if close.code in (POLICY_VIOLATION, MESSAGE_TOO_BIG):
        return ObservationRefusedError(close)
    if close.code in (GOING_AWAY, ABNORMAL, NORMAL, 1005, 1012, 1013):
        return ConnectionReplaced(close, must_reset)
    return ServerFailedError(close)
