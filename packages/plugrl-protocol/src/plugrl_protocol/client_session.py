"""The client's half of one connection, without I/O: frames in, frames out.

Everything that changes the state of a client's connection lives in this file, in one table. The
session knows what it may say next, which envs hold an action, and what the server still remembers
of their observations. It knows nothing of sockets, threads or time.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Final

from plugrl_protocol.codec import CLIENT_LIMITS
from plugrl_protocol.errors import (
    CodecError,
    MalformedMessageError,
    MisuseError,
    OutOfTurnError,
)
from plugrl_protocol.memory import Memory
from plugrl_protocol.messages import (
    FEATURE_REUSE,
    FEATURE_STEPS,
    Action,
    Feedback,
    Infer,
    Metadata,
    parse_action,
    parse_feedback,
    parse_infer,
    parse_metadata,
)
from plugrl_protocol.sending import Sender
from plugrl_protocol.shortcuts import Reader, make_infer


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
        self._asked: dict[int, int] = {}  # env to the step id of its open infer
        self._holding: dict[int, tuple[int, int]] = {}  # env to its step id and its chunk's steps
        self._memory = Memory()

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
            indices, asked = message.env_ids.tolist(), list(self._asked)
            if indices != asked:
                raise OutOfTurnError(
                    f"the action is for envs {indices[:8]}, the infer asked for {asked[:8]}"
                )
            horizon = len(message.action)
            for index, step_id in self._asked.items():
                self._holding[index] = step_id, horizon
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
        owing = [index for index in indices if index in self._holding]
        if owing:
            raise MisuseError(f"envs {owing[:8]} hold an action; send their feedback first")
        if self._memory:
            found = self._memory.leave_out(request.observation, indices)
            if found is not None:
                sent = make_infer(request.env_indices, request.step_ids, *found)
                self._sender.check(sent, parse_infer)
            self._memory.forget(indices)
        frame = self._sender.frame()
        self._asked = dict(zip(indices, request.step_ids.tolist(), strict=True))
        self.state = target
        return frame

    def feedback(self, report: Feedback) -> bytes:
        """Report finished chunks.

        Args:
            report: rows of envs that hold an action; ``steps`` is left out unless the server
                listed ``chunk-steps``.

        Returns:
            The frame to send.

        Raises:
            MisuseError: not the moment, an env that holds no action, a step id that is not the
                infer's, or more steps than its chunk has.
            MalformedMessageError: a report that the server would refuse.
        """
        target = self._may_send("feedback")
        if report.steps is not None and not self._offers_steps:
            report = replace(report, steps=None)
        report = self._sender.check(report, parse_feedback)
        indices = report.env_indices.tolist()
        self._check_held(report, indices)
        frame = self._sender.frame()
        for index in indices:
            del self._holding[index]
        if self._offers_reuse and self._wants_reuse:
            self._memory.note(report, indices)
        self.state = target
        return frame

    def _check_held(self, report: Feedback, indices: list[int]) -> None:
        """Refuse what the server would close the connection for, again and again."""
        holding = self._holding
        idle = [index for index in indices if index not in holding]
        if idle:
            raise MisuseError(f"envs {idle[:8]} hold no action; nothing to report for them")
        for index, step_id in zip(indices, report.step_ids.tolist(), strict=True):
            asked = holding[index][0]
            if step_id not in (0, asked):
                raise MisuseError(
                    f"step_ids is {step_id} for env {index}; its infer said {asked}, and the "
                    "feedback repeats it"
                )
        if report.steps is None:
            return
        for index, steps in zip(indices, report.steps.tolist(), strict=True):
            horizon = holding[index][1]
            if steps > horizon:
                raise MisuseError(f"steps is {steps} for env {index}; its chunk has {horizon}")
