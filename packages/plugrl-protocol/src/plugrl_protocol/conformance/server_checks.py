"""The clauses of a server: what is asked of it, one function each.

A check raises `ViolationError` or `SkippedError`, or returns. After each one the runner plays an
honest round on a connection opened long before, so that harm to others is blamed on its cause.
"""

from __future__ import annotations

import contextlib
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.sync.client import connect

from plugrl_protocol.conformance.clauses import Clause, SkippedError, ViolationError
from plugrl_protocol.conformance.raw import (
    RawClient,
    Target,
    feedback_map,
    infer_map,
    pack,
    reset_socket,
)
from plugrl_protocol.messages import FEATURE_REUSE, FEATURE_STEPS

QUIET_S = 0.3
PONG_S = 2.0
SLOW_PONG_S = 0.4
PING_TRIES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The target and what else the caller knows about it."""

    target: Target
    max_message_mb: float | None = None
    feedback_timeout_s: float | None = None
    until_stop: bool = False
    echo: bool = False
    """The first action entry is the first entry of the state: rows can be told apart."""

    def client(self) -> RawClient:
        """A new connection."""
        return RawClient(self.target)


Check: TypeAlias = Callable[[Setup], None]
CHECKS: list[tuple[Clause, Check]] = []


def clause(name: str, section: int, text: str) -> Callable[[Check], Check]:
    """Register a check under the name of its clause."""

    def register(check: Check) -> Check:
        CHECKS.append((Clause(name, section, text), check))
        return check

    return register


def need_feature(client: RawClient, feature: str) -> None:
    """Skip unless the server lists a feature."""
    if feature not in client.features:
        raise SkippedError(f"the server does not list {feature!r}")


# ------------------------------------------------------------------------------------ transport


@clause("metadata-first", 3, "the server speaks first, with metadata")
def _metadata_first(setup: Setup) -> None:
    with setup.client():
        pass


@clause("metadata-once", 3, "metadata is sent exactly once")
def _metadata_once(setup: Setup) -> None:
    with setup.client() as client:
        client.silence("metadata-once", QUIET_S)
        client.round("metadata-once", [0])


@clause("metadata-honest", 4, "known keys have their type; what is unknown is absent, never zero")
def _metadata_honest(setup: Setup) -> None:
    with setup.client() as client:
        known = client.metadata
    for key in ("action_horizon", "action_dim"):
        if key in known and not (type(known[key]) is int and known[key] > 0):
            raise ViolationError("metadata-honest", f"{key} is {known[key]!r}, expected > 0")
    if known.get("protocol_version", 1) != 1:
        raise ViolationError("metadata-honest", f"protocol_version {known['protocol_version']!r}")
    for key in ("server", "server_version", "algorithm", "policy"):
        if key in known and not (isinstance(known[key], str) and known[key]):
            raise ViolationError("metadata-honest", f"{key} is {known[key]!r}, expected a name")
    features = known.get("features", [])
    if not isinstance(features, list) or not all(isinstance(name, str) for name in features):
        raise ViolationError("metadata-honest", f"features is {features!r}, expected strings")


@clause("no-deflate", 1, "permessage-deflate is not negotiated")
def _no_deflate(setup: Setup) -> None:
    with RawClient(setup.target, compression="deflate") as client:
        response = client.connection.response
        agreed = None if response is None else response.headers.get("Sec-WebSocket-Extensions")
    if agreed:
        raise ViolationError("no-deflate", f"the server agreed to {agreed!r}")


@clause("healthz", 1, "GET /healthz answers 200 once the server can infer")
def _healthz(setup: Setup) -> None:
    if setup.target.url.startswith("wss"):
        raise SkippedError("tried over plain HTTP only")
    host, port = setup.target.address
    try:
        with urllib.request.urlopen(
            f"http://{host}:{port}/healthz", timeout=setup.target.timeout_s
        ) as response:
            status = response.status
    except (urllib.error.URLError, OSError, ValueError) as error:
        raise ViolationError("healthz", f"GET /healthz failed: {error}") from None
    if status != 200:
        raise ViolationError("healthz", f"GET /healthz answered {status}")


@clause("api-key", 1, "a wrong or missing API key is refused with 401, before any frame")
def _api_key(setup: Setup) -> None:
    key = setup.target.api_key
    if key is None:
        raise SkippedError("say --api-key, of a server that asks for it")
    for wrong in (None, "", key + "x", key[:-1], key.swapcase() + "!"):
        headers = {} if wrong is None else {"Authorization": f"Api-Key {wrong}"}
        try:
            with connect(
                setup.target.url, additional_headers=headers, compression=None, proxy=None
            ):
                raise ViolationError("api-key", f"the key {wrong!r} was let in")
        except InvalidStatus as error:
            if error.response.status_code != 401:
                status = error.response.status_code
                raise ViolationError("api-key", f"{wrong!r} was refused with {status}") from None
        except InvalidHandshake as error:
            raise ViolationError(
                "api-key", f"{wrong!r} was not refused with 401: {error}"
            ) from None


@clause("frame-cap", 1, "a frame over the cap closes with 1009; the server stays up")
def _frame_cap(setup: Setup) -> None:
    cap = setup.max_message_mb
    if cap is None:
        raise SkippedError("say --max-message-mb as the server was told")
    with setup.client() as client:
        big = infer_map(setup.target, [0], padding=bytes(int((cap + 0.25) * 2**20)))
        client.send(big)
        client.closing("frame-cap", (1009, f"message over {cap:g} MiB"))


@clause("ping", 1, "pings are answered while the policy infers")
def _ping(setup: Setup) -> None:
    with setup.client() as client:
        for _ in range(PING_TRIES):
            if _is_answered_while_inferring(client):
                return
            client.report([0])
    raise ViolationError(
        "ping", f"{PING_TRIES} times, a ping had no pong within {SLOW_PONG_S:g} s while inferring"
    )


def _is_answered_while_inferring(client: RawClient) -> bool:
    """Ask for an action, and ping until it comes.

    Returns:
        Whether each pong came while the action was still awaited, or soon: a busy machine may be
        late once. A ping that travels with the infer is answered before the policy begins, and one
        that meets the action on its way tells nothing; so there is one after another.
    """
    client.send(infer_map(client.target, [0]))
    deadline = time.monotonic() + client.target.timeout_s
    is_answered = True
    while True:
        with contextlib.suppress(TimeoutError):
            client.connection.recv(timeout=0.1)
            return is_answered
        if time.monotonic() > deadline:
            raise ViolationError("ping", "no action came")
        pong = client.connection.ping()
        if not pong.wait(SLOW_PONG_S):
            with contextlib.suppress(TimeoutError):
                client.connection.recv(timeout=0)
                return is_answered
            is_answered = False
            if not pong.wait(PONG_S):
                raise ViolationError("ping", f"no pong within {PONG_S:g} s while inferring")


# ---------------------------------------------------------------------------------------- turns


@clause("env-ids", 3, "env_ids equals the infer's env_indices, in order")
def _env_ids(setup: Setup) -> None:
    with setup.client() as client:
        for envs in ([5, 2, 9], [1], [7, 0]):
            client.round("env-ids", envs)
            client.report(envs)


@clause("action-shape", 4, "the action is [H, n, *da], time first; H and da do not depend on n")
def _action_shape(setup: Setup) -> None:
    shapes = set()
    with setup.client() as client:
        for envs in ([0], [0, 1, 2], [0, 1, 2, 3, 4], [3, 1]):
            action = client.round("action-shape", envs)
            shapes.add((action.shape[0], *action.shape[2:]))
            client.report(envs)
        horizon, width = (client.metadata.get(k) for k in ("action_horizon", "action_dim"))
    if len(shapes) != 1:
        raise ViolationError("action-shape", f"[H, *da] varies with n: {sorted(shapes)}")
    (shape,) = shapes
    if horizon is not None and shape[0] != horizon:
        raise ViolationError("action-shape", f"H is {shape[0]}, the metadata says {horizon}")
    if width is not None and int(np.prod(shape[1:])) != width:
        raise ViolationError("action-shape", f"da is {shape[1:]}, the metadata says {width}")


@clause("feedback-unanswered", 3, "a feedback has no reply")
def _feedback_unanswered(setup: Setup) -> None:
    with setup.client() as client:
        for _ in range(2):
            client.round("feedback-unanswered", [0])
            client.report([0])
            client.silence("feedback-unanswered", QUIET_S)


@clause("feedback-subset", 3, "the feedback's env set need not equal the infer's")
def _feedback_subset(setup: Setup) -> None:
    with setup.client() as client:
        client.round("feedback-subset", [0, 1, 2])
        client.report([1])
        client.round("feedback-subset", [1])
        client.report([0, 1])
        client.round("feedback-subset", [1, 0])
        client.report([2, 1, 0])
        client.round("feedback-subset", [2])


@clause("number-of-envs", 3, "the number of envs may change from message to message")
def _number_of_envs(setup: Setup) -> None:
    with setup.client() as client:
        for envs in ([0], [0, 1, 2, 3, 4, 5, 6], [4], [2, 8]):
            client.round("number-of-envs", envs)
            client.report(envs)


@clause("routing", 3, "rows are routed by env index, never by position")
def _routing(setup: Setup) -> None:
    first, second = setup.target.observation(1, 3.0), setup.target.observation(1, 8.0)
    with setup.client() as client:
        need_distinct_rows(setup, client)
        straight = client.round("routing", [4, 6], data=_joined(first, second))
        client.report([4, 6])
        turned = client.round("routing", [6, 4], data=_joined(second, first))
        client.report([6, 4])
        alone = client.round("routing", [6], data=second)
        features = client.features
    if not np.array_equal(straight, turned[:, ::-1]):
        raise ViolationError("routing", "asked in another order, envs swap their actions")
    if not np.array_equal(straight[:, 1:], alone):
        raise ViolationError("routing", "asked alone, an env gets another action")
    if FEATURE_REUSE not in features:
        return
    for asked, reported in (([4, 6], [6, 4]), ([4, 5, 6], [6, 4]), ([5, 6, 4], [6, 4])):
        with setup.client() as client:
            client.round("routing", asked)
            client.report(reported, obs=_joined(second, first))
            client.send(reusing(setup.target, [4, 6]))
            reused = client.action("routing", [4, 6])
        if not np.array_equal(reused, straight):
            raise ViolationError(
                "routing",
                f"asked {asked}, reported {reported}: envs were given each other's observations",
            )


def _joined(*observations: dict[str, Any]) -> dict[str, Any]:
    """Stack one-row observations."""
    groups = {
        group: {
            name: np.concatenate([o[group][name] for o in observations])
            for name in observations[0][group]
        }
        for group in ("images", "states")
    }
    return {**groups, "text": np.concatenate([o["text"] for o in observations])}


def need_distinct_rows(setup: Setup, client: RawClient) -> None:
    """Skip unless actions show which observation they answer, and the same one each time."""
    rows = _joined(setup.target.observation(1, 3.0), setup.target.observation(1, 8.0))
    first = client.round("routing", [0, 1], data=rows)
    client.report([0, 1], terminated=np.ones(2, np.bool_))
    second = client.round("routing", [0, 1], data=rows)
    client.report([0, 1], terminated=np.ones(2, np.bool_))
    if not np.array_equal(first, second) or np.array_equal(first[:, 0], first[:, 1]):
        raise SkippedError("the server's actions do not show which observation they answer")


@clause("feedback-first", 3, "a connection starts with an infer")
def _feedback_first(setup: Setup) -> None:
    with setup.client() as client:
        client.report([0])
        client.closing("feedback-first")


@clause("two-infers", 3, "infer and feedback alternate strictly")
def _two_infers(setup: Setup) -> None:
    with setup.client() as client:
        client.round("two-infers", [0])
        client.send(infer_map(setup.target, [1]))
        client.closing("two-infers")


@clause("two-feedbacks", 3, "a feedback follows an action, once")
def _two_feedbacks(setup: Setup) -> None:
    with setup.client() as client:
        client.round("two-feedbacks", [0, 1])
        client.report([0])
        client.report([1])
        client.closing("two-feedbacks")


@clause("idle-env", 5, "feedback for an env holding no action closes with resync")
def _idle_env(setup: Setup) -> None:
    for envs in ([3], [0, 3], [1]):
        with setup.client() as client:
            client.round("idle-env", [0, 1])
            client.report([1])
            client.round("idle-env", [2])
            client.report(envs)
            client.closing("idle-env")


@clause("server-messages", 3, "metadata and action come from the server only")
def _server_messages(setup: Setup) -> None:
    for kind in ("metadata", "action", "hello", "INFER", ""):
        with setup.client() as client:
            client.send({**infer_map(setup.target, [0]), "message_type": kind})
            client.closing("server-messages")


@clause("state-gone", 5, "after any close all state of that connection is gone")
def _state_gone(setup: Setup) -> None:
    with setup.client() as client:
        client.round("state-gone", [0, 1])
        client.report([0])
        client.round("state-gone", [0])
        features = client.features
    with setup.client() as client:
        client.report([1])
        client.closing("state-gone")
    if FEATURE_REUSE in features:
        with setup.client() as client:
            client.send(reusing(setup.target, [0]))
            client.closing("state-gone")
    with setup.client() as client:
        client.round("state-gone", [0, 1])
        client.report([1, 0])
        client.round("state-gone", [0])


def reusing(target: Target, envs: list[int], **changes: Any) -> dict[str, Any]:
    """Build an infer that leaves out every row."""
    reuse = np.ones(len(envs), np.bool_)
    return infer_map(target, envs, **{"data": target.observation(0), "reuse": reuse, **changes})


# ----------------------------------------------------------------------------------- neighbours


@clause("idle-connection", 1, "an idle or half-open connection delays nobody")
def _idle_connection(setup: Setup) -> None:
    with (
        setup.client(),
        socket.create_connection(setup.target.address) as half_open,
        socket.create_connection(setup.target.address) as unfinished,
        setup.client() as busy,
    ):
        unfinished.sendall(b"GET / HTTP/1.1\r\nHost: ")
        for _ in range(5):
            busy.round("idle-connection", [0])
            busy.report([0])
        del half_open


@clause("slow-client", 1, "a client that owes a feedback delays nobody")
def _slow_client(setup: Setup) -> None:
    with setup.client() as slow, setup.client() as fast:
        slow.round("slow-client", [0, 1])
        for _ in range(5):
            fast.round("slow-client", [0])
            fast.report([0])
        slow.report([0])
        slow.round("slow-client", [0])


@clause("vanished-client", 5, "a TCP loss without a close frame harms nobody")
def _vanished_client(setup: Setup) -> None:
    for reported in (False, True):
        with setup.client() as client:
            client.send(infer_map(setup.target, [0]))
            if reported:
                client.action("vanished-client", [0])
                client.report([0])
            reset_socket(client.connection)
    with setup.client() as client:
        client.round("vanished-client", [0])


@clause("other-cameras", 5, "another client's cameras are served or refused with 1008, no more")
def _other_cameras(setup: Setup) -> None:
    target = setup.target
    other = replace(target, image_key="another_camera", image_shape=(8, 9, 3))
    wider = replace(target, state_dim=target.state_dim + 1)
    for strange in (other, wider):
        with setup.client() as honest, RawClient(strange) as client:
            honest.round("other-cameras", [0])
            client.send(infer_map(strange, [0]))
            try:
                client.connection.recv(timeout=target.timeout_s)
            except TimeoutError:
                raise ViolationError("other-cameras", "neither served nor refused") from None
            except ConnectionClosed as error:
                if error.rcvd is None or error.rcvd.code != 1008 or not error.rcvd.reason:
                    found = "no close frame" if error.rcvd is None else str(error.rcvd)
                    raise ViolationError(
                        "other-cameras", f"refused with {found}, expected 1008 naming both sides"
                    ) from None
            honest.report([0])
            honest.round("other-cameras", [0])


@clause("feedback-timeout", 5, "a missing feedback closes with 1001 'Feedback timeout'")
def _feedback_timeout(setup: Setup) -> None:
    if setup.feedback_timeout_s is None:
        raise SkippedError("say --feedback-timeout as the server was told")
    patient = replace(setup.target, timeout_s=setup.feedback_timeout_s + setup.target.timeout_s)
    with RawClient(patient) as client:
        client.round("feedback-timeout", [0])
        begin = time.monotonic()
        client.closing("feedback-timeout", (1001, "Feedback timeout"))
        if time.monotonic() - begin < 0.8 * setup.feedback_timeout_s:
            raise ViolationError("feedback-timeout", "it came too early")


@clause("client-finished", 5, "a client that is finished closes with 1000, in any state")
def _client_finished(setup: Setup) -> None:
    for turns in range(4):
        with setup.client() as client:
            if turns > 0:
                client.send(infer_map(setup.target, [0]))
            if turns > 1:
                client.action("client-finished", [0])
            if turns > 2:
                client.send(pack(feedback_map(setup.target, [0])))
    with setup.client() as client:
        client.round("client-finished", [0])


@clause("steps", 6, "steps are accepted where chunk-steps is listed")
def _steps(setup: Setup) -> None:
    with setup.client() as client:
        need_feature(client, FEATURE_STEPS)
        action = client.round("steps", [0, 1])
        client.report([0, 1], steps=np.array([1, action.shape[0]]))
        client.round("steps", [0])


@clause("stop", 5, "a finished run closes with 1001 'plugrl-server-stop'")
def _stop(setup: Setup) -> None:
    if not setup.until_stop:
        raise SkippedError("say --until-stop, of a server whose run ends")
    deadline = time.monotonic() + 10 * setup.target.timeout_s
    with setup.client() as client:
        while time.monotonic() < deadline:
            try:
                client.connection.send(pack(infer_map(setup.target, [0])))
                client.connection.recv(timeout=setup.target.timeout_s)
                client.connection.send(pack(feedback_map(setup.target, [0])))
            except ConnectionClosed as error:
                frame = error.rcvd
                if frame is None or (frame.code, frame.reason) != (1001, "plugrl-server-stop"):
                    raise ViolationError("stop", f"it ended with {frame}") from None
                return
            except TimeoutError:
                break
    raise ViolationError("stop", "the run did not end")
