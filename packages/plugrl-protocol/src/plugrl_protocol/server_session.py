"""The server's half of one connection, without I/O: frames in, frames out.

Everything that changes the state of a server's connection lives in this file: the turn, in one
table, and what is remembered of each env, in one record. A violation raises an error whose
``close`` says how the connection ends; the owner sends that close and forgets the session. The
module knows nothing of sockets, threads, policies or learning; time is an argument, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from plugrl_protocol.codec import SERVER_LIMITS, Limits
from plugrl_protocol.errors import (
    CLOSE_FEEDBACK_TIMEOUT,
    Close,
    CodecError,
    MalformedMessageError,
    MisuseError,
    OutOfTurnError,
)
from plugrl_protocol.messages import (
    ALL_FEATURES,
    FEATURE_REUSE,
    FEATURE_STEPS,
    Feedback,
    Infer,
    Metadata,
    Observation,
    make_metadata,
    parse_action,
    parse_feedback,
    parse_infer,
)
from plugrl_protocol.sending import Sender
from plugrl_protocol.shortcuts import Reader, make_action, make_infer

if TYPE_CHECKING:
    from plugrl_protocol.templates import Array


class ServerState(Enum):
    """Where a server's connection stands."""

    OPENING = "about to send its metadata"
    AWAIT_INFER = "waiting for an infer"
    INFERRING = "owing an action"
    AWAIT_FEEDBACK = "waiting for a feedback"

    # The hash of Enum is written in Python, and the tables below are read for every frame.
    __hash__ = object.__hash__


_S = ServerState
# (state, message) -> state. What is not here is out of turn.
TRANSITIONS: Final[dict[tuple[ServerState, str], ServerState]] = {
    (_S.OPENING, "metadata"): _S.AWAIT_INFER,
    (_S.AWAIT_INFER, "infer"): _S.INFERRING,
    (_S.INFERRING, "action"): _S.AWAIT_FEEDBACK,
    (_S.AWAIT_FEEDBACK, "feedback"): _S.AWAIT_INFER,
}
_SENT: Final = frozenset(("metadata", "action"))


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """What one connection may do and cost."""

    features: tuple[str, ...] = ALL_FEATURES
    """Features offered in the metadata."""
    feedback_timeout_s: float = 60.0
    """Longest wait for a feedback, not counting suspended time."""
    max_envs: int = 65_536
    """Envs that one connection may name in its life."""
    max_remembered_mb: float = 1024.0
    """Frames kept for `reuse-feedback-obs`, in MiB."""
    limits: Limits = SERVER_LIMITS
    """What one frame may cost to decode."""


@dataclass(slots=True, eq=False)
class _Batch:
    """A feedback's observation, kept while some env may reuse a row of it."""

    observation: Observation
    size_bytes: int
    rows_live: int = 0


@dataclass(slots=True, eq=False)
class EnvRecord:
    """All that a server remembers of one env of one connection."""

    env_index: int
    holds_action: bool = False
    """An action was sent and its feedback has not come."""
    step_id: int = 0
    """As the last infer gave it."""
    horizon_steps: int = 0
    """H of the last action."""
    terminated: bool = False
    """Of the last feedback."""
    truncated: bool = False
    """Of the last feedback."""
    owner: Any = None
    """For the owner of the session: a policy's step state, the version sampled from, ..."""
    _batch: _Batch | None = None
    _row: int = 0


class ServerSession:
    """One connection, seen from the server.

    Args:
        metadata: sent first; its ``features`` are replaced by those of ``config``.
        config: bounds and features.

    Attributes:
        state: where the connection stands.
        records: env index to record; the owner may read them and use their ``owner`` field.
        reused_rows: observation rows that the client left out so far.
    """

    def __init__(
        self, *, metadata: Metadata | None = None, config: SessionConfig | None = None
    ) -> None:
        self.config = config or SessionConfig()
        self.state = ServerState.OPENING
        self.records: dict[int, EnvRecord] = {}
        self.reused_rows = 0
        values = dict((metadata or make_metadata()).values)
        values["features"] = list(self.config.features)
        self._metadata = Metadata(values=values)
        self._sender = Sender(self.config.limits)
        parsers = {"infer": parse_infer, "feedback": parse_feedback}
        self._reader = Reader(self.config.limits, parsers, self._check_turn)
        self._offers_reuse = FEATURE_REUSE in self.config.features
        self._offers_steps = FEATURE_STEPS in self.config.features
        self._asked: Infer | None = None
        self._deadline_s: float | None = None
        self._time_left_s: float | None = None
        self._remembered_bytes = 0

    # ------------------------------------------------------------------------------ frames out

    def open(self) -> bytes:
        """Give the metadata frame; called once, before anything is received."""
        if self.state is not ServerState.OPENING:
            raise MisuseError(f"cannot send 'metadata': the connection is {self.state.value}")
        self.state = TRANSITIONS[self.state, "metadata"]
        return self._sender.encode(self._metadata.to_wire())

    def answer(self, action: Array, now_s: float) -> bytes:
        """Answer the open infer.

        Args:
            action: ``[H, n, *da]``, time-major, for all envs of the infer in their order.
            now_s: the time, which starts the wait for the feedback.

        Returns:
            The frame to send.

        Raises:
            MisuseError: no infer is open, or the array has another shape.
        """
        if self.state is not ServerState.INFERRING or self._asked is None:
            raise MisuseError(f"cannot answer: the connection is {self.state.value}")
        asked = self._asked
        reply = make_action(asked.env_indices, np.asarray(action))
        try:
            reply = self._sender.check(reply, parse_action)
            frame = self._sender.frame()
        except (MalformedMessageError, CodecError) as error:
            raise MisuseError(f"this action cannot be sent: {error}") from error
        horizon = reply.action.shape[0]
        step_ids = asked.step_ids.tolist()
        for index, step_id in zip(asked.env_indices.tolist(), step_ids, strict=True):
            record = self.records[index]
            record.holds_action, record.step_id, record.horizon_steps = True, step_id, horizon
        self._asked = None
        self.state = TRANSITIONS[self.state, "action"]
        if self._time_left_s is None:
            self._deadline_s = now_s + self.config.feedback_timeout_s
        else:
            self._time_left_s = self.config.feedback_timeout_s
        return frame

    # ------------------------------------------------------------------------------- frames in

    def receive(self, frame: bytes | str) -> Infer | Feedback:
        """Take one frame from the client.

        Args:
            frame: as it came.

        Returns:
            An `Infer` whose observation is complete (``reuse`` tells which rows were left out), or
            a `Feedback` of envs that hold an action.

        Raises:
            MalformedMessageError: the frame breaks the page.
            OutOfTurnError: the frame is of the right form at the wrong moment.
        """
        if isinstance(frame, str):
            raise MalformedMessageError("a text frame; messages are binary frames of msgpack")
        try:
            message: Infer | Feedback = self._reader.read(frame)
        except CodecError as error:
            raise MalformedMessageError(str(error)) from error
        if isinstance(message, Infer):
            return self._receive_infer(message)
        return self._receive_feedback(message, len(frame))

    def _check_turn(self, kind: str) -> None:
        if (self.state, kind) not in TRANSITIONS or kind in _SENT:
            raise OutOfTurnError(f"{kind[:20]!r} arrived while the server is {self.state.value}")

    def _receive_infer(self, request: Infer) -> Infer:
        indices = request.env_indices.tolist()
        records = self.records
        strangers = 0
        for index in indices:
            record = records.get(index)
            if record is None:
                strangers += 1
            elif record.holds_action:
                raise OutOfTurnError(f"infer for env {index}, whose chunk has no feedback yet")
        if strangers and len(records) + strangers > self.config.max_envs:
            raise MalformedMessageError(f"more than {self.config.max_envs} envs on one connection")
        if request.reuse is not None:
            request = self._complete(request, indices)
        for index in indices:
            record = records.get(index)
            if record is None:
                records[index] = EnvRecord(index)
            elif record._batch is not None:
                self._forget(record, record._batch)
        self._asked = request
        self.state = TRANSITIONS[self.state, "infer"]
        return request

    def _receive_feedback(self, report: Feedback, frame_bytes: int) -> Feedback:
        indices = report.env_indices.tolist()
        for index, step_id in zip(indices, report.step_ids.tolist(), strict=True):
            record = self.records.get(index)
            if record is None or not record.holds_action:
                raise OutOfTurnError(f"feedback for env {index}, which holds no action")
            if step_id not in (0, record.step_id):  # 0: of a client that does not count
                raise MalformedMessageError(
                    f"feedback.step_ids is {step_id} for env {index}; its infer said "
                    f"{record.step_id}, which the feedback repeats"
                )
        if report.steps is not None:
            if self._offers_steps:
                self._check_steps(report.steps, indices)
            else:
                report = replace(report, steps=None)
        self._note(report, indices, frame_bytes)
        self._deadline_s = None
        self.state = TRANSITIONS[self.state, "feedback"]
        return report

    def _check_steps(self, steps: Array, indices: list[int]) -> None:
        for index, taken in zip(indices, steps.tolist(), strict=True):
            horizon = self.records[index].horizon_steps
            if taken > horizon:
                raise MalformedMessageError(
                    f"{taken} steps of env {index}, whose chunk had {horizon}"
                )

    def _note(self, report: Feedback, indices: list[int], frame_bytes: int) -> None:
        """Write a feedback into the records. A row that is kept keeps its whole frame."""
        terminated, truncated = report.terminated.tolist(), report.truncated.tolist()
        batch = None
        if self._offers_reuse:
            batch = _Batch(report.observation, frame_bytes)
        for row, index in enumerate(indices):
            record = self.records[index]
            record.holds_action = False
            record.terminated, record.truncated = terminated[row], truncated[row]
            if batch is not None and not (terminated[row] or truncated[row]):
                record._batch, record._row = batch, row
                batch.rows_live += 1
        if batch is not None and batch.rows_live:
            self._remembered_bytes += frame_bytes
            if self._remembered_bytes > self.config.max_remembered_mb * 2**20:
                raise MalformedMessageError(
                    f"observations held for reuse over {self.config.max_remembered_mb:g} MiB"
                )

    # -------------------------------------------------------------------------------- time

    @property
    def deadline_s(self) -> float | None:
        """When the feedback is overdue; None while none is awaited or the clock is suspended."""
        return self._deadline_s

    def suspend(self, now_s: float) -> None:
        """Stop the feedback clock: the owner learns, and clients may be waiting for it."""
        if self._time_left_s is not None:
            return
        deadline = self._deadline_s
        self._time_left_s = self.config.feedback_timeout_s if deadline is None else deadline - now_s
        self._deadline_s = None

    def resume(self, now_s: float) -> None:
        """Let the feedback clock run again from where it stopped."""
        left, self._time_left_s = self._time_left_s, None
        if left is not None and self.state is ServerState.AWAIT_FEEDBACK:
            self._deadline_s = now_s + left

    def expired(self, now_s: float) -> Close | None:
        """Give the close of an overdue feedback, or None while there is time."""
        overdue = self._deadline_s is not None and now_s >= self._deadline_s
        return CLOSE_FEEDBACK_TIMEOUT if overdue else None

    # ------------------------------------------------------------------------------- inside

    def _forget(self, record: EnvRecord, batch: _Batch) -> None:
        """Let go of the row that an env could have reused."""
        record._batch = None
        batch.rows_live -= 1
        if batch.rows_live == 0:
            self._remembered_bytes -= batch.size_bytes

    def _whole_batch(self, indices: list[int]) -> Observation | None:
        """Give what is remembered, if it is one feedback of just these envs in this order."""
        first = self.records.get(indices[0])
        batch = None if first is None else first._batch
        if batch is None or len(batch.observation) != len(indices):
            return None
        for row, index in enumerate(indices):
            record = self.records.get(index)
            if record is None or record._batch is not batch or record._row != row:
                return None
        return batch.observation

    def _complete(self, request: Infer, indices: list[int]) -> Infer:
        """Fill in the rows that the client left out."""
        if not self._offers_reuse:
            raise MalformedMessageError(f"reuse was sent, but {FEATURE_REUSE!r} is not offered")
        reuse = request.reuse
        flags = [] if reuse is None else reuse.tolist()
        if reuse is None or True not in flags:
            return request
        whole = None if False in flags else self._whole_batch(indices)
        if whole is not None:
            self.reused_rows += len(indices)
            return make_infer(request.env_indices, request.step_ids, whole, reuse)
        sources: dict[int, tuple[Observation, list[int], list[int]]] = {}
        for row in np.flatnonzero(reuse).tolist():
            record = self.records.get(indices[row])
            if record is None or record._batch is None:
                raise MalformedMessageError(
                    f"env {indices[row]} reuses an observation that this connection does not hold"
                )
            kept = record._batch.observation
            _, rows, kept_rows = sources.setdefault(id(kept), (kept, [], []))
            rows.append(row)
            kept_rows.append(record._row)
        self.reused_rows += flags.count(True)
        if len(sources) == 1 and False not in flags:
            (kept, _, kept_rows) = next(iter(sources.values()))
            return replace(request, observation=kept.rows(np.asarray(kept_rows)))
        parts = [(kept.rows(np.asarray(k)), np.asarray(rows)) for kept, rows, k in sources.values()]
        if False in flags:
            parts.append((request.observation, np.flatnonzero(~reuse)))
        return replace(request, observation=_interleave(parts, len(indices)))


def _interleave(parts: list[tuple[Observation, Array]], length: int) -> Observation:
    """Put rows from several observations where they belong.

    Raises:
        MalformedMessageError: the parts have other names, dtypes or shapes.
    """
    first = parts[0][0]
    layout = _layout(first)
    for part, _ in parts[1:]:
        if _layout(part) != layout:
            raise MalformedMessageError(
                "fresh rows and reused rows differ in names, dtypes or shapes"
            )
    groups: dict[str, dict[str, Array]] = {"images": {}, "states": {}}
    for (group, name), (dtype, shape) in layout.items():
        joined = np.empty((length, *shape), dtype)
        for part, rows in parts:
            joined[rows] = (part.images if group == "images" else part.states)[name]
        groups[group][name] = joined
    text = np.empty(length, max((part.text.dtype for part, _ in parts), key=lambda d: d.itemsize))
    for part, rows in parts:
        text[rows] = part.text
    return Observation(images=groups["images"], states=groups["states"], text=text)


def _layout(observation: Observation) -> dict[tuple[str, str], tuple[np.dtype[Any], Any]]:
    """Describe what must agree between rows; the width of text need not."""
    return {
        (group, name): (array.dtype, array.shape[1:])
        for group, name, array in observation.arrays()
        if group != "text"
    }
