"""What the server checker says: messages as plain maps, honest or spoiled, over a bare WebSocket.

Nothing here goes through this package's encoder or sessions, so that it can say what they refuse.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from plugrl_protocol.codec import CLIENT_LIMITS, decode
from plugrl_protocol.conformance.clauses import ViolationError
from plugrl_protocol.errors import CodecError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self
    from websockets.sync.client import ClientConnection

RESYNC = (1001, "plugrl-server-resync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server under test, and what it wants to see."""

    url: str
    api_key: str | None = None
    timeout_s: float = 30.0
    state_key: str = "state"
    state_dim: int = 4
    image_key: str | None = None
    image_shape: tuple[int, int, int] = (64, 64, 3)
    text: str = ""
    state_dtype: str = "<f4"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of an honest handshake."""
        return {} if self.api_key is None else {"Authorization": f"Api-Key {self.api_key}"}

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        host, _, port = self.url.partition("://")[2].partition("/")[0].rpartition(":")
        return host, int(port)

    def observation(self, rows: int, value: float = 0.0) -> dict[str, Any]:
        """Build an honest ``obs`` map of some rows, all of one value."""
        images = {}
        if self.image_key is not None:
            images[self.image_key] = np.full((rows, *self.image_shape), int(value) % 256, np.uint8)
        states = {self.state_key: np.full((rows, self.state_dim), value, self.state_dtype)}
        return {"images": images, "states": states, "text": np.full(rows, self.text or "x")}


def plain(value: Any) -> Any:
    """Spell an array for msgpack."""
    if isinstance(value, np.ndarray):
        return spelled(value.tobytes(), value.dtype.str, list(value.shape))
    raise TypeError(f"cannot send a {type(value).__name__}")


def spelled(data: Any, dtype: Any, shape: Any) -> dict[bytes, Any]:
    """Spell an array piece by piece, which allows lies."""
    return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}


def pack(message: Any) -> bytes:
    """Encode anything."""
    frame: bytes = msgpack.packb(message, default=plain)
    return frame


def infer_map(target: Target, envs: list[int], **changes: Any) -> dict[str, Any]:
    """Build an infer; a change replaces a key, and None removes it."""
    message = {
        "message_type": "infer",
        "data": target.observation(len(envs)),
        "env_indices": np.array(envs, np.int64),
        "step_ids": np.zeros(len(envs), np.int64),
        **changes,
    }
    return {key: value for key, value in message.items() if value is not None}


def feedback_map(target: Target, envs: list[int], **changes: Any) -> dict[str, Any]:
    """Build a feedback; a change replaces a key at either level, and None removes it."""
    m = len(envs)
    content = {
        "obs": target.observation(m),
        "rewards": np.ones(m, np.float32),
        "terminated": np.zeros(m, np.bool_),
        "truncated": np.zeros(m, np.bool_),
        "info": {},
    }
    message = {
        "message_type": "feedback",
        "env_indices": np.array(envs, np.int64),
        "step_ids": np.zeros(m, np.int64),
    }
    for key, value in changes.items():
        (content if key in content else message)[key] = value
    content = {key: value for key, value in content.items() if value is not None}
    message = {key: value for key, value in message.items() if value is not None}
    return {**message, "data": content}


class RawClient:
    """A bare connection that sends what it is told and judges what comes back."""

    def __init__(self, target: Target, *, compression: str | None = None) -> None:
        self.target = target
        self._compression = compression
        self.metadata: dict[str, Any] = {}

    def __enter__(self) -> Self:
        target = self.target
        self.connection: ClientConnection = connect(
            target.url,
            compression=self._compression,
            max_size=None,
            additional_headers=target.headers,
            open_timeout=target.timeout_s,
            close_timeout=1.0,
            ping_interval=None,
            proxy=None,
        ).__enter__()
        try:
            self.metadata = self._first()
        except ViolationError:
            self.connection.close()
            raise
        return self

    def _first(self) -> dict[str, Any]:
        message = self._map(self._receive("metadata-first"), "metadata-first")
        content = message.get("data")
        if message.get("message_type") != "metadata" or not isinstance(content, dict):
            raise ViolationError("metadata-first", f"the first message was {_brief(message)}")
        return content

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.connection.close()

    @property
    def features(self) -> list[str]:
        """Features that the server listed."""
        listed = self.metadata.get("features")
        return listed if isinstance(listed, list) else []

    def send(self, message: Any) -> None:
        """Send a map, or bytes or text as they are."""
        with contextlib.suppress(ConnectionClosed):
            self.connection.send(message if isinstance(message, (bytes, str)) else pack(message))

    def _receive(self, clause: str, timeout_s: float | None = None) -> bytes | str:
        timeout_s = self.target.timeout_s if timeout_s is None else timeout_s
        try:
            return self.connection.recv(timeout=timeout_s)
        except TimeoutError:
            raise ViolationError(clause, f"nothing came within {timeout_s:g} s") from None
        except ConnectionClosed as error:
            raise ViolationError(clause, f"the connection ended with {_ending(error)}") from None

    def _map(self, frame: bytes | str, clause: str) -> dict[str, Any]:
        if isinstance(frame, str):
            raise ViolationError(clause, f"a text frame came: {frame[:60]!r}")
        try:
            message = decode(frame, CLIENT_LIMITS)
        except CodecError as error:
            raise ViolationError(clause, f"an undecodable frame came: {error}") from None
        if not isinstance(message, dict):
            raise ViolationError(clause, f"the root of a frame was a {type(message).__name__}")
        return message

    def action(self, clause: str, envs: list[int]) -> np.ndarray[Any, Any]:
        """Expect the action for some envs; give ``[H, n, ...]``."""
        message = self._map(self._receive(clause), clause)
        content = message.get("data")
        if message.get("message_type") != "action" or not isinstance(content, dict):
            raise ViolationError(clause, f"expected an action, got {_brief(message)}")
        found, action = content.get("env_ids"), content.get("action")
        if not isinstance(found, np.ndarray) or found.dtype != np.int64:
            raise ViolationError("env-ids", f"env_ids is {_brief(found)}, expected <i8 [n]")
        if found.tolist() != envs:
            raise ViolationError("env-ids", f"env_ids is {found.tolist()}, the infer asked {envs}")
        if not isinstance(action, np.ndarray) or action.ndim < 2 or action.shape[1] != len(envs):
            raise ViolationError(
                "action-shape", f"the action is {_brief(action)}, expected [H, {len(envs)}, ...]"
            )
        if action.dtype.kind == "f" and not np.isfinite(action).all():
            raise ViolationError("action-shape", "the action holds a NaN or an infinity")
        return action

    def round(self, clause: str, envs: list[int], **changes: Any) -> np.ndarray[Any, Any]:
        """Send an infer, spoiled or not, and expect its action."""
        self.send(infer_map(self.target, envs, **changes))
        return self.action(clause, envs)

    def report(self, envs: list[int], **changes: Any) -> None:
        """Send a feedback, spoiled or not."""
        self.send(feedback_map(self.target, envs, **changes))

    def silence(self, clause: str, seconds: float) -> None:
        """Expect that nothing comes for a while."""
        try:
            frame = self.connection.recv(timeout=seconds)
        except TimeoutError:
            return
        except ConnectionClosed as error:
            raise ViolationError(clause, f"the connection ended with {_ending(error)}") from None
        raise ViolationError(clause, f"{_brief(self._map(frame, clause))} came unasked")

    def closing(self, clause: str, expected: tuple[int, str] = RESYNC) -> None:
        """Expect the server to close, with this code and this reason."""
        try:
            frame = self.connection.recv(timeout=self.target.timeout_s)
        except TimeoutError:
            found = f"the connection stayed open for {self.target.timeout_s:g} s"
        except ConnectionClosed as error:
            if error.rcvd is not None and (error.rcvd.code, error.rcvd.reason) == expected:
                return
            found = f"the connection ended with {_ending(error)}"
        else:
            found = f"it was accepted: {_brief(self._map(frame, clause))} came"
        code, reason = expected
        raise ViolationError(clause, f"{found}, expected close {code} {reason!r}")


def reset_socket(connection: ClientConnection) -> None:
    """Drop a connection without a close frame."""
    connection.socket.shutdown(socket.SHUT_RDWR)


def _ending(error: ConnectionClosed) -> str:
    if error.rcvd is None:
        return "no close frame"
    return f"close {error.rcvd.code} {error.rcvd.reason!r}"


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        kind = value.get("message_type")
        return f"a {kind!r} message" if kind is not None else f"a map of {sorted(map(str, value))}"
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype.str} {list(value.shape)}"
    return f"a {type(value).__name__}"
