"""The client's half of one connection, without I/O: frames in, frames out.

Everything that changes the state of a client's connection lives in this file, in one table. The
session knows what it may say next, which envs hold an action, and what the server still remembers
of their observations. It knows nothing of sockets, threads or time.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Final

import numpy as np

from plugrl_protocol.codec import CLIENT_LIMITS
from plugrl_protocol.errors import (
    CodecError,
    MalformedMessageError,
    MisuseError,
    OutOfTurnError,
)
from plugrl_protocol.messages import (
    FEATURE_REUSE,
    FEATURE_STEPS,
    Action,
    Feedback,
    Infer,
    Metadata,
    Observation,
    parse_action,
    parse_feedback,
    parse_infer,
    parse_metadata,
)
from plugrl_protocol.sending import Sender
from plugrl_protocol.shortcuts import Reader

if TYPE_CHECKING:
    import numpy.typing as npt


class ClientState(Enum):
    """Where a client's connection stands."""

    AWAIT_METADATA = "waiting for the server's metadata"
    READY = "may send an infer"
    AWAIT_ACTION = "waiting for an action"
    ACTING = "acting; may send a feedback"

    # The hash of Enum is written in Python, and the tables below are read for every frame.
    __hash__ = object.__hash__


_S = ClientState
# (state, message) -> state. What is not here is not allowed.
TRANSITIONS: Final[dict[tuple[ClientState, str], ClientState]] = {
    (_S.AWAIT_METADATA, "metadata"): _S.READY,
    (_S.READY, "infer"): _S.AWAIT_ACTION,
    (_S.AWAIT_ACTION, "action"): _S.ACTING,
    (_S.ACTING, "feedback"): _S.READY,
}
_SENT: Final = frozenset(("infer", "feedback"))


class ClientSession:
    """One connection, seen from the client.

    Args:
        reuse: leave out observation rows that the server already has, when it offers that.

    Attributes:
        state: where the connection stands.
        metadata: what the server said first; empty before that.
    """

    def __init__(self, *, reuse: bool = True) -> None:
        self.state = ClientState.AWAIT_METADATA
        self.metadata = Metadata()
        self._sender = Sender(CLIENT_LIMITS)
        parsers = {"metadata": parse_metadata, "action": parse_action}
        self._reader = Reader(CLIENT_LIMITS, parsers, self._check_turn)
        self._wants_reuse = reuse
        self._offers_reuse = self._offers_steps = False
        self._asked: list[int] = []
        self._holding: set[int] = set()
        # Per env: the feedback row that the server would reuse. Done rows leave none.
        self._remembered: dict[int, tuple[Observation, int]] = {}

    @property
    def holding(self) -> frozenset[int]:
        """Envs that hold an action and owe a feedback."""
        return frozenset(self._holding)

    @property
    def reuses(self) -> bool:
        """Whether observation rows are left out on this connection."""
        return self._wants_reuse and self._offers_reuse

    @property
    def sends_steps(self) -> bool:
        """Whether the server reads the env steps of each chunk."""
        return self._offers_steps

    def receive(self, frame: bytes | str) -> Metadata | Action:
        """Take one frame from the server.

        Args:
            frame: as it came; a text frame (``str``) is fatal.

        Returns:
            The message.

        Raises:
            MalformedMessageError: the frame is no message of the page.
            OutOfTurnError: it is one, at the wrong moment or for other envs.
        """
        if isinstance(frame, str):
            raise MalformedMessageError(f"the server sent text: {frame[:60]!r}")
        try:
            message: Metadata | Action = self._reader.read(frame)
        except CodecError as error:
            raise MalformedMessageError(f"the server sent an undecodable frame: {error}") from error
        if isinstance(message, Action):
            indices = message.env_ids.tolist()
            if indices != self._asked:
                raise OutOfTurnError(
                    f"the action is for envs {indices[:8]}, the infer asked for {self._asked[:8]}"
                )
            self._holding.update(indices)
            self.state = TRANSITIONS[self.state, "action"]
        else:
            self.metadata = message
            self._offers_reuse = FEATURE_REUSE in message.features
            self._offers_steps = FEATURE_STEPS in message.features
            self.state = TRANSITIONS[self.state, "metadata"]
        return message

    def _check_turn(self, kind: str) -> ClientState:
        target = TRANSITIONS.get((self.state, kind))
        if target is None or kind in _SENT:
            raise OutOfTurnError(f"the server sent {kind[:20]!r} while the client is {self._where}")
        return target

    @property
    def _where(self) -> str:
        return self.state.value

    def _may_send(self, kind: str) -> ClientState:
        target = TRANSITIONS.get((self.state, kind))
        if target is None:
            raise MisuseError(f"cannot send {kind!r}: the connection is {self._where}")
        return target

    def infer(self, request: Infer) -> bytes:
        """Ask for actions.

        Args:
            request: whole observations, without ``reuse``; the session decides what to leave out.

        Returns:
            The frame to send.

        Raises:
            MisuseError: not the moment, or an env that still owes its feedback.
            MalformedMessageError: a request that the server would refuse.
        """
        target = self._may_send("infer")
        if request.reuse is not None:
            raise MisuseError("leave reuse=None: the session decides what to leave out")
        request = self._sender.check(request, parse_infer)
        indices = request.env_indices.tolist()
        if not self._holding.isdisjoint(indices):
            owing = sorted(self._holding.intersection(indices))
            raise MisuseError(f"envs {owing[:8]} hold an action; send their feedback first")
        sent = self._leave_out(request, indices) if self._remembered else request
        frame = self._sender.frame() if sent is request else self._sender.encode(sent.to_wire())
        if self._remembered:
            for index in indices:
                self._remembered.pop(index, None)
        self._asked = indices
        self.state = target
        return frame

    def _leave_out(self, request: Infer, indices: list[int]) -> Infer:
        """Mark the rows that equal what the server remembers, byte for byte."""
        reuse = np.zeros(len(indices), np.bool_)
        sources: dict[int, tuple[Observation, list[int], list[int]]] = {}
        for row, index in enumerate(indices):
            kept, kept_row = self._remembered.get(index, (None, 0))
            if kept is not None:
                _, rows, kept_rows = sources.setdefault(id(kept), (kept, [], []))
                rows.append(row)
                kept_rows.append(kept_row)
        for kept, rows, kept_rows in sources.values():
            mine = _take(request.observation, rows)
            reuse[rows] = _equal_rows(mine, _take(kept, kept_rows))
        if not reuse.any():
            return request
        return replace(request, observation=request.observation.rows(~reuse), reuse=reuse)

    def feedback(self, report: Feedback) -> bytes:
        """Report finished chunks.

        Args:
            report: rows of envs that hold an action; ``steps`` is left out unless the server
                listed ``chunk-steps``.

        Returns:
            The frame to send.

        Raises:
            MisuseError: not the moment, or an env that holds no action.
            MalformedMessageError: a report that the server would refuse.
        """
        target = self._may_send("feedback")
        if report.steps is not None and not self._offers_steps:
            report = replace(report, steps=None)
        report = self._sender.check(report, parse_feedback)
        indices = report.env_indices.tolist()
        if not self._holding.issuperset(indices):
            idle = [index for index in indices if index not in self._holding]
            raise MisuseError(f"envs {idle[:8]} hold no action; nothing to report for them")
        frame = self._sender.frame()
        self._holding.difference_update(indices)
        if self._offers_reuse and self._wants_reuse:
            self._remember(report, indices)
        self.state = target
        return frame

    def _remember(self, report: Feedback, indices: list[int]) -> None:
        # A copy: the caller may fill the same arrays again on its next step.
        kept = report.observation.rows(np.arange(len(indices)))
        for row, (index, done) in enumerate(zip(indices, report.done.tolist(), strict=True)):
            if done:
                self._remembered.pop(index, None)
            else:
                self._remembered[index] = (kept, row)


def _take(observation: Observation, rows: list[int]) -> Observation:
    """Take rows, without a copy when they are all rows in order."""
    if rows == list(range(len(observation))):
        return observation
    return observation.rows(np.asarray(rows))


def _equal_rows(one: Observation, other: Observation) -> npt.NDArray[np.bool_]:
    """Tell which rows are the same bytes, names included: -0.0 is not 0.0, a NaN is itself."""
    if one.images.keys() != other.images.keys() or one.states.keys() != other.states.keys():
        return np.zeros(len(one), np.bool_)
    equal: npt.NDArray[np.bool_] = one.text == other.text
    pairs = [(array, other.states[name]) for name, array in one.states.items()]
    pairs += [(array, other.images[name]) for name, array in one.images.items()]
    for mine, theirs in pairs:
        if mine.dtype != theirs.dtype or mine.shape != theirs.shape:
            return np.zeros(len(one), np.bool_)
        if mine.size:
            equal = equal & (_as_bytes(mine) == _as_bytes(theirs)).all(axis=1)
    return equal


def _as_bytes(array: npt.NDArray[np.generic]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array).reshape(len(array), -1).view(np.uint8)
