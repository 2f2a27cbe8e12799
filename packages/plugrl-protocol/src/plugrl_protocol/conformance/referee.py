"""Judge one client: every message by its form, and with ``probe-v1`` by what must have happened.

The `Referee` serves one connection and keeps a `Ledger` over all connections of a client: per env,
what it holds, where its episode stands, and what the server would remember.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from websockets.exceptions import ConnectionClosed

from plugrl_protocol.codec import decode, encode
from plugrl_protocol.conformance.clauses import Report, ViolationError
from plugrl_protocol.errors import CodecError, MalformedMessageError
from plugrl_protocol.messages import FEATURE_REUSE, FEATURE_STEPS, parse_feedback, parse_infer

if TYPE_CHECKING:
    from websockets.sync.server import ServerConnection

    from plugrl_protocol.conformance.stage import ClientOptions
    from plugrl_protocol.messages import Feedback, Infer, Observation


class LeftError(Exception):
    """The client closed the connection.

    Attributes:
        code: of its close frame; 1006 for none.
    """

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass(slots=True)
class EnvLedger:
    """What is known of one env."""

    holds: bool = False
    held_before: bool = False
    """It held an action of an earlier connection, whose feedback must not come."""
    ended: bool = False
    """Its last feedback was a done: the next infer shows a new episode."""
    time_steps: float | None = None
    """State ``t`` when last seen; None when it may have moved unseen."""
    step_id: int | None = None
    """The next step id; None when unknown."""
    chunk: Any = None
    reusable: tuple[Observation, int] | None = None


@dataclass(slots=True)
class Ledger:
    """What is known of a client over all its connections."""

    envs: dict[int, EnvLedger] = field(default_factory=dict)
    reused_rows: int = 0

    def env(self, index: int) -> EnvLedger:
        """The entry of an env."""
        return self.envs.setdefault(index, EnvLedger())

    def new_connection(self) -> None:
        """Forget what a server forgets; remember what the client must not say."""
        for entry in self.envs.values():
            entry.held_before = entry.holds
            entry.holds, entry.chunk, entry.reusable = False, None, None
            entry.step_id = None
            if entry.held_before:
                entry.time_steps = None


class Referee:
    """The server's half of one connection."""

    def __init__(
        self, connection: ServerConnection, options: ClientOptions, report: Report, ledger: Ledger
    ) -> None:
        self.connection = connection
        self._options = options
        self._report = report
        self.ledger = ledger
        self.offered: tuple[str, ...] = ()
        self._is_first = True
        ledger.new_connection()

    def require(self, clause: str, holds: object, found: str) -> None:
        """Judge a clause."""
        if not holds:
            raise ViolationError(clause, found)
        self._report.passed(clause)

    # ------------------------------------------------------------------------------------- talk

    def metadata(self, features: tuple[str, ...], **more: Any) -> None:
        """Say the usual things first."""
        values = {
            "protocol_version": 1,
            "server": "plugrl-conformance",
            "action_horizon": self._options.horizon,
            "action_dim": self._options.action_dim,
            "features": list(features),
        }
        self.say(features, {**values, **more})

    def say(self, features: tuple[str, ...], values: dict[str, Any]) -> None:
        """Send metadata of one's own."""
        self.offered = features
        self.connection.send(encode({"message_type": "metadata", "data": values}))

    def _receive(self) -> dict[str, Any]:
        timeout_s = self._options.timeout_s
        try:
            frame = self.connection.recv(timeout=timeout_s)
        except TimeoutError:
            raise ViolationError("goes-on", f"nothing came within {timeout_s:g} s") from None
        except ConnectionClosed as error:
            raise LeftError(1006 if error.rcvd is None else error.rcvd.code) from None
        self.require("binary-frames", isinstance(frame, bytes), "a text frame came")
        try:
            message = decode(frame) if isinstance(frame, bytes) else None
        except CodecError as error:
            raise ViolationError("encoding", str(error)) from None
        self._report.passed("encoding")
        self.require("root", isinstance(message, dict), "the root of a frame is not a map")
        return dict(message) if isinstance(message, dict) else {}

    def _expect(self, kind: str) -> dict[str, Any]:
        message = self._receive()
        found = message.get("message_type")
        if self._is_first and found == "feedback":
            indices = message.get("env_indices")
            named = indices.tolist() if isinstance(indices, np.ndarray) else []
            late = any(self.ledger.env(i).held_before for i in named if isinstance(i, int))
            name = "late-feedback" if late else "starts-with-infer"
            raise ViolationError(name, "the first message of a connection is a feedback")
        self.require("starts-with-infer" if self._is_first else "alternation", found == kind,
                     f"{found!r} came, expected {kind!r}")  # fmt: skip
        self._is_first = False
        return message

    # ------------------------------------------------------------------------------------ infer

    def infer(self) -> Infer:
        """Expect an infer and judge it."""
        message = self._expect("infer")
        self._indices(message)
        self._features(message, "reuse", FEATURE_REUSE)
        self._batched(message)
        request: Infer = self._parsed(parse_infer, message)
        self._rest_of_infer(request)
        return request

    def _parsed(self, parse: Any, message: dict[str, Any]) -> Any:
        try:
            parsed = parse(message)
        except MalformedMessageError as error:
            raise ViolationError(_clause_of(str(error)), str(error)) from None
        held = ["message-form", "observation-form", "text"]
        if message["message_type"] == "feedback":
            held.append("info-split")
        if "reuse" in message:
            held.append("reuse-form")
        for clause in held:
            self._report.passed(clause)
        return parsed

    def _indices(self, message: dict[str, Any]) -> None:
        for key in ("env_indices", "step_ids"):
            value = message.get(key)
            fits = isinstance(value, np.ndarray) and value.dtype == np.int64 and value.ndim == 1
            self.require("index-dtype", fits, f"{key} is {_brief(value)}, expected <i8 [n]")
        indices = message["env_indices"].tolist()
        self.require("no-empty-message", indices, "a message names no env")
        self.require("unique-index", len(set(indices)) == len(indices), f"{indices}")
        self.require("index-range", min(indices) >= 0, f"{indices}")

    def _features(self, message: dict[str, Any], key: str, feature: str) -> None:
        if key in message:
            self.require(
                "features-unasked", feature in self.offered, f"{key!r} came without {feature!r}"
            )

    def _batched(self, message: dict[str, Any]) -> None:
        """Check the rows that are sent against those that are reused."""
        reuse, content = message.get("reuse"), message.get("data")
        if not isinstance(reuse, np.ndarray) or not isinstance(content, dict):
            return
        rows = int(np.count_nonzero(~reuse.astype(bool)))
        for group in ("images", "states"):
            for name, array in (content.get(group) or {}).items():
                self.require(
                    "reuse-rows",
                    isinstance(array, np.ndarray) and array.ndim > 0 and len(array) == rows,
                    f"{group}[{name!r}] is {_brief(array)}, {rows} rows are not reused",
                )

    def _rest_of_infer(self, request: Infer) -> None:
        indices, step_ids = request.env_indices.tolist(), request.step_ids.tolist()
        reuse = [False] * len(indices) if request.reuse is None else request.reuse.tolist()
        fresh = iter(range(len(indices)))
        for index, step_id, reused in zip(indices, step_ids, reuse, strict=True):
            entry = self.ledger.env(index)
            self.require("infer-of-free-envs", not entry.holds, f"env {index} still holds a chunk")
            if reused:
                self._reused(index, entry)
                seen, row = entry.reusable or (request.observation, 0)
                self.ledger.reused_rows += 1
            else:
                seen, row = request.observation, next(fresh)
            if self._options.probe:
                self._probe_infer(index, entry, seen, row)
            self._step_id(index, entry, step_id)
            entry.reusable = None

    def _reused(self, index: int, entry: EnvLedger) -> None:
        if entry.ended:
            raise ViolationError("reuse-after-done", f"env {index} reuses a terminal observation")
        if entry.reusable is None:
            raise ViolationError(
                "reuse-this-connection", f"env {index} had no feedback on this connection"
            )
        self._report.passed("reuse-after-done")
        self._report.passed("reuse-this-connection")

    def _probe_infer(self, index: int, entry: EnvLedger, seen: Observation, row: int) -> None:
        now = self._probe_time(seen, row)
        if entry.held_before:
            self.require(
                "dropped-done-reset",
                now < _length(index),
                f"env {index} ended with a feedback that was dropped, and is at t={now:g}",
            )
            entry.held_before = False
        elif entry.ended:
            self.require("reset-after-done", now == 0, f"env {index} starts at t={now:g}")
        elif entry.time_steps is not None:
            self.require(
                "continues", now == entry.time_steps,
                f"env {index} went from t={entry.time_steps:g} to t={now:g} between messages",
            )  # fmt: skip
        if now == 0:
            entry.step_id = 0
        entry.time_steps = now
        entry.ended = False

    def _probe_time(self, seen: Observation, row: int) -> float:
        time, action = seen.states.get("t"), seen.states.get("a")
        fits = (
            time is not None and time.dtype == np.float64 and time.shape[1:] == (1,)
            and action is not None and action.dtype == np.float64
        )  # fmt: skip
        self.require("probe-states", fits, "states must be t <f8 [n,1] and a <f8 [n,d]")
        return float(seen.states["t"][row, 0])

    def _step_id(self, index: int, entry: EnvLedger, step_id: int) -> None:
        if not self._options.probe and entry.ended:
            entry.step_id = 0
        entry.ended = False
        if entry.step_id is not None:
            self.require(
                "step-ids",
                step_id == entry.step_id,
                f"step id {step_id} of env {index}, which completed {entry.step_id} chunks",
            )
        entry.step_id = step_id

    # ----------------------------------------------------------------------------------- action

    def act(self, request: Infer, *, turned: bool = False) -> None:
        """Answer with ``10000*k + 10*j + d``, j being the env index.

        Args:
            request: what is answered.
            turned: a fault of ours: the envs, and their actions with them, in reverse order.
        """
        options = self._options
        k = np.arange(options.horizon, dtype=np.float64)[:, None, None]
        j = request.env_indices.astype(np.float64)[None, :, None]
        action = 10_000 * k + 10 * j + np.arange(options.action_dim)[None, None, :]
        for column, index in enumerate(request.env_indices.tolist()):
            entry = self.ledger.env(index)
            entry.holds, entry.chunk = True, action[:, column]
        env_ids = request.env_indices
        if turned:
            env_ids, action = env_ids[::-1], action[:, ::-1]
        content = {"env_ids": env_ids, "action": action}
        self.connection.send(encode({"message_type": "action", "data": content}))

    # --------------------------------------------------------------------------------- feedback

    def feedback(self) -> Feedback:
        """Expect a feedback and judge it."""
        message = self._expect("feedback")
        self._indices(message)
        self._features(message, "steps", FEATURE_STEPS)
        self._holding(message["env_indices"].tolist())
        self._forms(message)
        report: Feedback = self._parsed(parse_feedback, message)
        self._rest_of_feedback(report)
        return report

    def _holding(self, indices: list[int]) -> None:
        for index in indices:
            entry = self.ledger.env(index)
            if not entry.holds and entry.held_before:
                raise ViolationError(
                    "late-feedback", f"env {index} held an action of an earlier connection"
                )
            self.require("feedback-of-holders", entry.holds, f"env {index} holds no action")

    def _forms(self, message: dict[str, Any]) -> None:
        content = message.get("data")
        if not isinstance(content, dict):
            return
        for key in ("terminated", "truncated"):
            value = content.get(key)
            fits = isinstance(value, np.ndarray) and value.dtype == np.bool_
            self.require("flag-dtype", fits, f"{key} is {_brief(value)}, expected |b1 [m]")
        rewards = content.get("rewards")
        fits = isinstance(rewards, np.ndarray) and rewards.dtype.kind == "f"
        self.require("reward-kind", fits, f"rewards is {_brief(rewards)}, expected floating [m]")

    def _rest_of_feedback(self, report: Feedback) -> None:
        done = report.done.tolist()
        for row, index in enumerate(report.env_indices.tolist()):
            entry = self.ledger.env(index)
            step_id = int(report.step_ids[row])
            self.require(
                "step-ids",
                step_id == entry.step_id,
                f"the feedback of env {index} has step id {step_id}, its infer {entry.step_id}",
            )
            if report.steps is not None:
                self.require(
                    "steps-range",
                    1 <= report.steps[row] <= self._options.horizon,
                    f"{report.steps[row]} steps of a chunk of {self._options.horizon}",
                )
            if self._options.probe:
                self._probe_feedback(report, row, index, entry)
            entry.holds, entry.chunk = False, None
            entry.ended = done[row]
            entry.step_id = None if entry.step_id is None else entry.step_id + 1
            entry.reusable = None if done[row] else (report.observation, row)
            if done[row]:
                entry.step_id = None

    def _probe_feedback(self, report: Feedback, row: int, index: int, entry: EnvLedger) -> None:
        now = self._probe_time(report.observation, row)
        begin = entry.time_steps or 0.0
        ended = bool(report.done[row])
        self.require(
            "terminal-observation",
            not (ended and now == 0),
            f"env {index} is done and shows t=0, the next episode's first observation",
        )
        self.require(
            "flush-on-done",
            now <= _length(index) and (now > begin or not ended),
            f"env {index} is at t={now:g}, its episodes last {_length(index)} steps",
        )
        at_end = now == _length(index)
        self.require(
            "probe-ends",
            bool(report.terminated[row]) == at_end and not report.truncated[row],
            f"env {index} at t={now:g} of {_length(index)}: terminated is "
            f"{bool(report.terminated[row])}, truncated is {bool(report.truncated[row])}",
        )
        steps = now - begin
        self.require(
            "chunk-length",
            1 <= steps <= self._options.horizon,
            f"env {index} went from t={begin:g} to t={now:g} with a chunk of "
            f"{self._options.horizon}",
        )
        self.require(
            "reward-sum",
            report.rewards[row] == steps,
            f"env {index} earned {steps:g} in its chunk, the feedback says {report.rewards[row]:g}",
        )
        executed = report.observation.states["a"][row]
        asked = entry.chunk[int(steps) - 1]
        self.require(
            "action-executed",
            np.array_equal(executed, asked),
            f"env {index} executed {executed.tolist()}, step {steps:g} of its chunk was "
            f"{asked.tolist()}",
        )
        if report.steps is not None:
            self.require(
                "steps-really-run",
                report.steps[row] == steps,
                f"env {index} ran {steps:g} steps, the feedback says {report.steps[row]}",
            )
        entry.time_steps = now


def _length(index: int) -> int:
    return 3 + 2 * (index % 3)


def _clause_of(complaint: str) -> str:
    """Name the clause that a complaint about a form is about."""
    for mark, name in (
        ("text", "text"),
        ("info", "info-split"),
        ("rewards", "reward-kind"),
        ("reuse", "reuse-form"),
        ("steps", "steps-range"),
        ("images", "observation-form"),
        ("states", "observation-form"),
    ):
        if mark in complaint:
            return name
    return "message-form"


def _brief(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array {value.dtype.str} {list(value.shape)}"
    return f"a {type(value).__name__}"
