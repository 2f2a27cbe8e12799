"""The scenarios that a client is put through, each told from top to bottom."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from plugrl_protocol.conformance.clauses import Clause, SkippedError, ViolationError
from plugrl_protocol.conformance.referee import Ledger, LeftError, Referee
from plugrl_protocol.messages import ALL_FEATURES, FEATURE_REUSE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from plugrl_protocol.conformance.stage import Stage

CLAUSES: Final = [
    Clause("connects", 1, "the client connects and goes on"),
    Clause("no-deflate", 1, "permessage-deflate is not negotiated"),
    Clause("api-key", 1, "the key travels as Authorization: Api-Key <key>"),
    Clause("metadata-2mib", 1, "frames of any size are accepted: metadata of 2 MiB"),
    Clause("ping", 1, "pings are answered"),
    Clause("binary-frames", 1, "messages are binary frames"),
    Clause("root", 1, "the root of a message is a map"),
    Clause("encoding", 2, "arrays are encoded as the page says, of kinds b u i f U"),
    Clause("starts-with-infer", 3, "a connection starts with an infer"),
    Clause("alternation", 3, "infer and feedback alternate strictly"),
    Clause("goes-on", 3, "the client sends what is due"),
    Clause("unique-index", 3, "env_indices are unique in a message"),
    Clause("index-range", 3, "env_indices are not negative"),
    Clause("no-empty-message", 5, "a message names at least one env"),
    Clause("infer-of-free-envs", 3, "infer names envs whose chunk ran out"),
    Clause("feedback-of-holders", 3, "feedback names only envs that hold an action"),
    Clause("env-ids", 3, "an action in another order than the infer's is not taken as if it fit"),
    Clause("metadata-optional", 4, "a client requires no metadata key"),
    Clause("metadata-unknown-keys", 4, "unknown metadata keys are ignored"),
    Clause("index-dtype", 4, "env_indices and step_ids are <i8 [n]"),
    Clause("message-form", 4, "messages have the keys and forms of the page"),
    Clause("observation-form", 4, "images are |u1 [n,h,w,c], states floating [n,d]"),
    Clause("text", 4, "an obs has text, n strings"),
    Clause("step-ids", 4, "step_ids are the completed chunks in the episode"),
    Clause("reward-kind", 4, "rewards are floating [m] and finite"),
    Clause("flag-dtype", 4, "terminated and truncated are |b1 [m]"),
    Clause("info-split", 4, "info can be split per env"),
    Clause("flush-on-done", 4, "a done flushes the chunk early"),
    Clause("terminal-observation", 4, "on a done, obs is the terminal observation"),
    Clause("reward-sum", 4, "rewards is the sum over the chunk"),
    Clause("action-executed", 4, "actions are time-major and belong to env_ids"),
    Clause("chunk-length", 3, "a chunk is used in a prefix, at least one step"),
    Clause("continues", 4, "an infer shows the env where its feedback left it"),
    Clause("reset-after-done", 4, "after a done an env is reset before it appears in an infer"),
    Clause("stop-exit", 5, "after plugrl-server-stop the client exits 0"),
    Clause("stop-no-reconnect", 5, "after plugrl-server-stop the client does not reconnect"),
    Clause("finish", 5, "a client that is finished closes with 1000 and exits 0"),
    Clause("resync-reconnects", 5, "after plugrl-server-resync the client reconnects"),
    Clause("timeout-reconnects", 5, "after Feedback timeout the client reconnects"),
    Clause("shutdown-reconnects", 5, "after Server shutdown the client reconnects"),
    Clause("loss-reconnects", 5, "a TCP loss is handled like Server shutdown"),
    Clause("late-feedback", 5, "no feedback for an action of an earlier connection"),
    Clause("dropped-done-reset", 5, "an env whose dropped feedback was a done is reset"),
    Clause("text-exit", 5, "a text frame is fatal: the client exits, not with 0"),
    Clause("text-no-reconnect", 5, "after a text frame the client does not reconnect"),
    Clause("refusal-exit", 5, "1008 is reported: the client exits, not with 0"),
    Clause("refusal-no-reconnect", 5, "after 1008 the client does not reconnect"),
    Clause("patience", 5, "without a server the client waits with back-off"),
    Clause("returns", 5, "the client comes back when a server does"),
    Clause("features-unasked", 6, "features are used only if listed"),
    Clause("reuse-form", 6, "reuse is |b1 [n]"),
    Clause("reuse-rows", 6, "data is batched to the rows that are not reused"),
    Clause("reuse-after-done", 6, "no reuse after a done"),
    Clause("reuse-this-connection", 6, "only feedback of this connection is reused"),
    Clause("reuse-used", 6, "the client leaves out observations that the server has"),
    Clause("steps-range", 6, "steps are <i8 [m] within 1..H"),
    Clause("steps-really-run", 6, "steps are the env steps that really ran"),
    Clause("probe-states", 7, "probe-v1 shows t <f8 [n,1] and a <f8 [n,d]"),
    Clause("probe-ends", 7, "probe-v1 terminates at its length and never truncates"),
]

Scenario: TypeAlias = Callable[["Stage"], None]

_ROUNDS: Final = 24
_FINISH_ROUNDS: Final = 3000
_ABSENCE_S: Final = 3.0
_MOST_ATTEMPTS: Final = 12


def play(referee: Referee, rounds: int, *, clause: str = "connects") -> None:
    """Serve honestly for some rounds; a client that leaves on its own breaks the clause."""
    try:
        for _ in range(rounds):
            referee.act(referee.infer())
            referee.feedback()
    except LeftError as left:
        raise ViolationError(clause, f"the client closed with {left.code}") from None


@contextlib.contextmanager
def accepted(
    stage: Stage, ledger: Ledger, clause: str, features: tuple[str, ...] | None = None
) -> Iterator[Referee]:
    """Accept a connection and say the metadata."""
    with stage.accept(clause) as connection:
        referee = Referee(connection, stage.options, stage.report, ledger)
        referee.metadata(stage.options.features if features is None else features)
        yield referee
    stage.report.passed(clause)


def close_on_infer(referee: Referee, code: int, reason: str) -> None:
    """Answer the next infer with a close frame."""
    with contextlib.suppress(LeftError):
        referee.infer()
    referee.connection.close(code, reason)


def stop(stage: Stage, referee: Referee) -> None:
    """Finish the run: the client exits 0 and stays away."""
    close_on_infer(referee, 1001, "plugrl-server-stop")
    stage.exits("stop-exit", with_success=True, away="stop-no-reconnect")


def basic(stage: Stage) -> None:
    """Serve honestly, ping, stop the run."""
    stage.start_client()
    with accepted(stage, Ledger(), "connects") as referee:
        play(referee, _ROUNDS // 2)
        request = referee.infer()
        pong = referee.connection.ping()
        referee.require("ping", pong.wait(stage.options.timeout_s), "no pong came")
        referee.act(request)
        referee.feedback()
        play(referee, _ROUNDS // 2)
        stop(stage, referee)


def finish(stage: Stage) -> None:
    """Serve until the client is done by itself."""
    stage.start_client()
    with accepted(stage, Ledger(), "connects") as referee:
        for _ in range(_FINISH_ROUNDS):
            try:
                referee.act(referee.infer())
                referee.feedback()
            except LeftError as left:
                referee.require("finish", left.code == 1000, f"it closed with {left.code}")
                stage.exits("finish", with_success=True)
                return
    stage.report.skipped("finish", f"the client did not finish within {_FINISH_ROUNDS} rounds")


def resync(stage: Stage) -> None:
    """Answer infers with every close that asks for a reconnect."""
    ledger = Ledger()
    stage.start_client()
    closes = [
        ("resync-reconnects", 1001, "plugrl-server-resync"),
        ("timeout-reconnects", 1001, "Feedback timeout"),
        ("shutdown-reconnects", 1001, "Server shutdown"),
        ("loss-reconnects", 0, ""),
    ]
    expected = "connects"
    for name, code, reason in closes:
        with accepted(stage, ledger, expected) as referee:
            play(referee, 5, clause=expected)
            if code:
                close_on_infer(referee, code, reason)
            else:
                referee.infer()
                referee.connection.socket.shutdown(socket.SHUT_RDWR)
        expected = name
    with accepted(stage, ledger, expected) as referee:
        play(referee, 5, clause=expected)
        stop(stage, referee)


def late(stage: Stage) -> None:
    """Close behind an action: the feedback that it leads to must not come later."""
    ledger = Ledger()
    stage.start_client()
    expected = "connects"
    for rounds in (0, 1, 3, 2):
        with accepted(stage, ledger, expected) as referee:
            play(referee, rounds, clause=expected)
            referee.act(referee.infer())
            referee.connection.close(1001, "plugrl-server-resync")
        expected = "resync-reconnects"
    with accepted(stage, ledger, expected) as referee:
        play(referee, 8, clause=expected)
        stage.report.passed("late-feedback")
        stop(stage, referee)


def text(stage: Stage) -> None:
    """Answer an infer with text, as a server in distress might."""
    stage.start_client()
    with accepted(stage, Ledger(), "connects") as referee:
        play(referee, 2)
        referee.infer()
        referee.connection.send("Traceback (most recent call last): ...")
        stage.exits("text-exit", with_success=False, away="text-no-reconnect")


def order(stage: Stage) -> None:
    """Answer in another order, which a client must see: it leaves, or goes by env_ids."""
    stage.start_client()
    with accepted(stage, Ledger(), "connects") as referee:
        for _ in range(_ROUNDS):
            request = referee.infer()
            if len(request.env_indices) > 1:
                break
            referee.act(request)
            referee.feedback()
        else:
            raise SkippedError("the client never asks for two envs at once")
        referee.act(request, turned=True)
        try:
            referee.feedback()
        except LeftError:
            pass
        except ViolationError as violation:
            raise ViolationError("env-ids", violation.found) from None
        stage.report.passed("env-ids")


def refusal(stage: Stage) -> None:
    """Refuse the observation: reconnecting would not help."""
    stage.start_client()
    with accepted(stage, Ledger(), "connects") as referee:
        close_on_infer(referee, 1008, "built for states pose:7, got others")
        stage.exits("refusal-exit", with_success=False, away="refusal-no-reconnect")


def reuse(stage: Stage) -> None:
    """Offer every feature, then none."""
    if stage.options.features and FEATURE_REUSE not in stage.options.features:
        raise SkippedError(f"--features leaves out {FEATURE_REUSE!r}")
    ledger = Ledger()
    stage.start_client()
    with accepted(stage, ledger, "connects", ALL_FEATURES) as referee:
        play(referee, _ROUNDS)
        close_on_infer(referee, 1001, "plugrl-server-resync")
    if ledger.reused_rows:
        stage.report.passed("reuse-used")
    else:
        stage.report.skipped("reuse-used", "the client never left out an observation")
    with accepted(stage, ledger, "resync-reconnects", ALL_FEATURES) as referee:
        play(referee, _ROUNDS // 2)
        close_on_infer(referee, 1001, "Server shutdown")
    with accepted(stage, ledger, "shutdown-reconnects", ()) as referee:
        play(referee, _ROUNDS // 2)
        stage.report.passed("features-unasked")
        stop(stage, referee)


def metadata(stage: Stage) -> None:
    """Say nothing in the metadata, then say much that nobody knows."""
    ledger = Ledger()
    stage.start_client()
    with stage.accept("connects") as connection:
        referee = Referee(connection, stage.options, stage.report, ledger)
        referee.say((), {})
        play(referee, 4, clause="metadata-optional")
        stage.report.passed("metadata-optional")
        close_on_infer(referee, 1001, "Server shutdown")
    unknown: list[tuple[str, dict[str, Any]]] = [
        ("metadata-unknown-keys", {"x-made-by": {"deep": [1, None, 2.5]}, "protocol_version": 1}),
        ("metadata-2mib", {"normalisation": "x" * 2**21}),
    ]
    for name, more in unknown:
        with stage.accept(name) as connection:
            referee = Referee(connection, stage.options, stage.report, ledger)
            referee.metadata((), **more)
            play(referee, 4, clause=name)
            stage.report.passed(name)
            close_on_infer(referee, 1001, "Server shutdown")
    with accepted(stage, ledger, "shutdown-reconnects") as referee:
        stop(stage, referee)


def patience(stage: Stage) -> None:
    """Be away before the client comes, and again in the middle."""
    ledger = Ledger()
    stage.shut()
    stage.start_client()
    _away(stage)
    with accepted(stage, ledger, "returns") as referee:
        play(referee, 3, clause="returns")
        close_on_infer(referee, 1001, "Server shutdown")
    _away(stage)
    with accepted(stage, ledger, "returns") as referee:
        play(referee, 3, clause="returns")
        stop(stage, referee)


def _away(stage: Stage) -> None:
    attempts = stage.count_attempts(_ABSENCE_S)
    if attempts > _MOST_ATTEMPTS:
        raise ViolationError("patience", f"{attempts} attempts within {_ABSENCE_S:g} s")
    stage.report.passed("patience")
    stage.open()


SCENARIOS: Final[dict[str, Scenario]] = {
    "basic": basic,
    "finish": finish,
    "resync": resync,
    "late": late,
    "text": text,
    "refusal": refusal,
    "order": order,
    "reuse": reuse,
    "metadata": metadata,
    "patience": patience,
}
