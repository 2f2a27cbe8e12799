#!/usr/bin/env python3
"""Run the probe environment, probe-v1, over the wire protocol, version 1.

A reference to read and to check servers with: one file, sharing nothing with the packages.
It knows nothing about policies; it applies the actions it is sent and says what happened.
Exit codes: 0 finished, 1 the server broke the protocol or refused us, 3 no server in reach.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidStatus,
    WebSocketException,
)
from websockets.sync.client import ClientConnection, connect

FEATURES = ("reuse-feedback-obs", "chunk-steps")
FIRST_WAIT_S, LONGEST_WAIT_S, METADATA_WAIT_S = 0.1, 5.0, 30.0

BUGS = {
    "deflate": "1: permessage-deflate is not negotiated",
    "metadata-2mib-refused": "1: frames of any size are accepted",
    "object-dtype": "2: dtype kinds other than b u i f U never travel",
    "extra-bytes": "2: data holds exactly prod(shape) * itemsize bytes",
    "starts-with-feedback": "3: the client's first message is an infer",
    "two-infers": "3: infer and feedback alternate strictly",
    "duplicate-indices": "3: env_indices are unique in a message",
    "feedback-without-action": "3: feedback names only envs holding an action",
    "not-flushed-on-done": "4: a done flushes the chunk early",
    "next-first-observation": "4: on a done, obs is the terminal observation",
    "last-reward-only": "4: rewards is the sum over the chunk",
    "int-rewards": "5: integer rewards are malformed",
    "done-as-uint8": "4: terminated and truncated are |b1",
    "int32-indices": "4: env_indices are <i8",
    "step-ids-count-env-steps": "4: step_ids are the completed chunks in the episode",
    "step-ids-survive-reset": "4: step_ids count within the episode",
    "action-batch-major": "4: the action is time-major, [H, n, *da]",
    "env-ids-ignored": "3: actions belong to env_ids, in order",
    "unknown-metadata-fatal": "4: unknown metadata keys are ignored",
    "metadata-required": "4: no metadata key is required",
    "unsplittable-info": "4: info can be split per env",
    "terminated-as-truncated": "7: probe episodes terminate, they never truncate",
    "text-missing": "4: obs has images, states and text",
    "late-feedback": "5: no feedback for an action of an earlier connection",
    "dropped-done-not-reset": "5: an env whose dropped feedback was a done is reset",
    "reconnects-on-stop": "5: plugrl-server-stop ends the run",
    "text-exits-zero": "5: a text frame is fatal",
    "text-ignored": "5: a text frame is fatal",
    "resync-fatal": "5: after plugrl-server-resync the client reconnects",
    "refusal-reconnects": "5: 1008 is reported, not retried",
    "refusal-exits-zero": "5: 1008 exits non-zero",
    "hammers": "5: waits with back-off and jitter",
    "ends-with-1001": "5: the normal end is 1000",
    "no-api-key": "1: Authorization: Api-Key <key>",
    "reuse-after-done": "6: no reuse after a done",
    "reuse-across-connections": "6: no reuse of an earlier connection's feedback",
    "reuse-sends-all-rows": "6: data is batched to the rows that are not reused",
    "reuse-unasked": "6: features are used only if listed",
    "steps-always-horizon": "6: steps are the env steps really run",
}
BUG = ""


class ProtocolError(Exception):
    """The server broke the protocol."""


class RefusedError(Exception):
    """The server will not serve us, and reconnecting would not help."""


# --- frames ------------------------------------------------------------------------------------


def to_wire(value: Any) -> Any:
    """Turn arrays into maps with bin keys (the ``default`` hook of msgpack)."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "buifU":
        raise TypeError(f"cannot send {value!r}")
    data, dtype = value.tobytes(), value.dtype.str
    data += b"\0" if BUG == "extra-bytes" else b""
    dtype = "|O" if BUG == "object-dtype" and dtype == "<f8" else dtype
    return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": value.shape}


def from_wire(node: dict[Any, Any]) -> Any:
    """Turn maps with bin keys into arrays (the ``object_hook`` of msgpack); views, not copies."""
    if b"__ndarray__" not in node:
        return node.get(b"data") if b"__npgeneric__" in node else node
    try:
        dtype, shape, data = np.dtype(node[b"dtype"]), node[b"shape"], node[b"data"]
    except (KeyError, TypeError) as error:
        raise ProtocolError(f"malformed array: {error}") from error
    if dtype.kind not in "buifU" or dtype.hasobject:
        raise ProtocolError(f"an array of dtype {dtype} from the server")
    if not all(isinstance(d, int) and 0 <= d < 2**31 for d in shape):
        raise ProtocolError(f"an array of shape {shape} from the server")
    count = 1
    for d in shape:
        count *= d
    if not isinstance(data, bytes) or count * dtype.itemsize != len(data):
        raise ProtocolError(f"an array of {dtype} {shape} with {len(data)} bytes from the server")
    return np.ndarray(shape, dtype, buffer=data)


def receive(ws: ClientConnection, kind: str, timeout_s: float | None = None) -> dict[str, Any]:
    """Return ``data`` of the next message, which must be of this kind."""
    frame = ws.recv(timeout_s)
    while isinstance(frame, str):
        if BUG == "text-exits-zero":
            raise SystemExit(0)
        if BUG != "text-ignored":
            raise ProtocolError(f"a text frame from the server: {frame[:80]!r}")
        frame = ws.recv()
    try:
        message = msgpack.unpackb(frame, object_hook=from_wire, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"undecodable frame from the server: {error!r}") from error
    found = message.get("message_type") if isinstance(message, dict) else type(message)
    if found != kind or not isinstance(message.get("data"), dict):
        raise ProtocolError(f"{found!r} from the server, expected {kind!r} with a map of data")
    return dict(message["data"])


# --- environment -------------------------------------------------------------------------------


class ProbeEnvs:
    """n probe environments; env i terminates after 3 + 2 * (i mod 3) steps, reward 1 a step."""

    def __init__(self, num_envs: int) -> None:
        self.length = 3 + 2 * (np.arange(num_envs) % 3)
        self.t = np.zeros(num_envs, int)
        self.a = np.zeros((num_envs, 0))

    def reset(self, envs: list[int]) -> None:
        """Start a new episode in each of these."""
        self.t[envs] = 0
        self.a[envs] = 0.0

    def step(self, env: int, action: Any) -> tuple[float, bool]:
        """Return (reward, terminated)."""
        self.t[env] += 1
        self.a[env] = action
        return 1.0, bool(self.t[env] == self.length[env])

    def observe(self, envs: list[int]) -> dict[str, Any]:
        """Return the observation of these, one row each."""
        states = {"t": self.t[envs].astype(np.float64)[:, None], "a": self.a[envs]}
        text = np.array([f"probe {env}" for env in envs], dtype=np.str_)
        return {"images": {}, "states": states, "text": text}


@dataclass
class Chunk:
    """The actions an env holds, and what happened to it since."""

    actions: Any = None  # [k, *da], k <= H
    used: int = 0
    reward: float = 0.0
    last_reward: float = 0.0
    done: bool = False
    completed: int = 0  # chunks in this episode

    def begin(self, actions: Any) -> None:
        """Hold a new chunk."""
        self.actions, self.used, self.reward, self.done = actions, 0, 0.0, False

    @property
    def over(self) -> bool:
        """Whether a feedback is due."""
        flush = self.done and BUG != "not-flushed-on-done"
        return self.actions is not None and (flush or self.used == len(self.actions))


@dataclass
class Rollout:
    """Episodes in progress; survives the connections that carry it."""

    options: argparse.Namespace
    envs: ProbeEnvs
    chunks: list[Chunk]
    episodes: int = 0
    features: list[str] = field(default_factory=list)
    reusable: dict[int, bytes] = field(default_factory=dict)  # last non-terminal feedback's rows
    progress: bool = False  # a whole exchange went through on this connection
    fed: list[int] = field(default_factory=list)

    def play(self, ws: ClientConnection) -> None:
        """Exchange messages on a fresh connection until enough episodes are finished."""
        self.read_metadata(receive(ws, "metadata", METADATA_WAIT_S))
        self.progress = False
        if BUG != "reuse-across-connections":
            self.reusable.clear()
        everyone = list(range(len(self.chunks)))
        held = [env for env in everyone if self.chunks[env].actions is not None]
        asking = everyone
        if BUG == "late-feedback" and held:
            asking = [env for env in everyone if env not in held] or held[:1]
        self.drop_chunks(asking)
        if BUG == "starts-with-feedback":
            self.feedback(ws, everyone)
        while self.episodes < self.options.episodes:
            self.infer(ws, asking)
            if BUG == "two-infers":
                self.infer(ws, asking)
            asking = self.step_until_due()
            self.feedback(ws, everyone if BUG == "feedback-without-action" else asking)
            self.progress = True

    def read_metadata(self, data: dict[str, Any]) -> None:
        """Take what is useful from the metadata; nothing in it is required."""
        if BUG == "metadata-required" and "action_dim" not in data:
            raise ProtocolError("no action_dim")
        known = "protocol_version server server_version algorithm policy action_horizon action_dim"
        if BUG == "unknown-metadata-fatal" and set(data) - {*known.split(), "features"}:
            raise ProtocolError("unknown metadata")
        offered = data["features"] if isinstance(data.get("features"), list) else []
        offered = FEATURES if BUG == "reuse-unasked" else offered
        self.features = [name for name in self.options.features if name in offered]
        if not self.envs.a.shape[1]:
            width = data.get("action_dim")
            if type(width) is not int or not 0 < width < 4096:
                width = self.options.action_dim
            self.envs.a = np.zeros((len(self.chunks), width))

    def drop_chunks(self, envs: list[int]) -> None:
        """Forget the actions of an earlier connection; reset where its feedback was a done."""
        for env in envs:
            if self.chunks[env].done and BUG != "dropped-done-not-reset":
                self.envs.reset([env])
                self.chunks[env].completed = 0
            self.chunks[env].begin(None)

    def infer(self, ws: ClientConnection, asking: list[int]) -> None:
        """Ask for new chunks for these envs."""
        fresh, message = asking, {"message_type": "infer", **self.address(asking)}
        if "reuse-feedback-obs" in self.features:
            reuse = [self.can_reuse(env) for env in asking]
            message["reuse"] = np.array(reuse, bool)
            if BUG != "reuse-sends-all-rows":
                fresh = [env for env, again in zip(asking, reuse, strict=True) if not again]
        message["data"] = self.envs.observe(fresh)
        if BUG == "text-missing":
            del message["data"]["text"]
        ws.send(msgpack.packb(message, default=to_wire))
        data = receive(ws, "action")
        ids, action = data.get("env_ids"), data.get("action")
        if not isinstance(ids, np.ndarray) or not isinstance(action, np.ndarray):
            raise ProtocolError("an action without the arrays env_ids and action")
        if ids.tolist() != asking and BUG != "env-ids-ignored":
            raise ProtocolError(f"an action for envs {ids.tolist()}, asked for {asking}")
        if BUG == "action-batch-major":
            steps, rows, *rest = action.shape
            action = action.reshape(rows, steps, *rest).swapaxes(0, 1)
        if action.ndim < 2 or action.shape[0] < 1 or action.shape[1] != len(asking):
            raise ProtocolError(f"an action of shape {action.shape} for {len(asking)} envs")
        if action.dtype.kind not in "fiu" or not np.isfinite(action).all():
            raise ProtocolError(f"an action of dtype {action.dtype} that is not all finite numbers")
        if action[0, 0].size != self.envs.a.shape[1]:
            self.envs.a = np.zeros((len(self.chunks), action[0, 0].size))
        prefix = self.options.replan_steps or len(action)
        for j, env in enumerate(asking):
            self.chunks[env].begin(action[:prefix, j].reshape(len(action[:prefix]), -1))

    def can_reuse(self, env: int) -> bool:
        """Whether the server has this very observation from the env's last feedback."""
        if BUG == "reuse-after-done" and env in self.fed:
            return True
        return self.reusable.get(env) == self.row(env)

    def row(self, env: int) -> bytes:
        """Return the env's observation as bytes, to compare."""
        return bytes(self.envs.t[env].tobytes() + self.envs.a[env].tobytes())

    def address(self, envs: list[int]) -> dict[str, Any]:
        """Return env_indices and step_ids of a message."""
        ids = [self.chunks[env].completed for env in envs]
        if BUG == "step-ids-count-env-steps":
            ids = self.envs.t[envs].tolist()
        if BUG == "duplicate-indices" and len(envs) > 1:
            envs = [envs[0], *envs[:-1]]
        dtype = np.int32 if BUG == "int32-indices" else np.int64
        return {"env_indices": np.array(envs, dtype), "step_ids": np.array(ids, np.int64)}

    def step_until_due(self) -> list[int]:
        """Step every env until a chunk is over in some; return those."""
        while True:
            for env, chunk in enumerate(self.chunks):
                action = chunk.actions[min(chunk.used, len(chunk.actions) - 1)]
                chunk.last_reward, done = self.envs.step(env, action)
                chunk.done |= done
                chunk.used += 1
                chunk.reward += chunk.last_reward
            due = [env for env, chunk in enumerate(self.chunks) if chunk.over]
            if due:
                return due

    def feedback(self, ws: ClientConnection, envs: list[int]) -> None:
        """Say how these envs' chunks went, then begin new episodes where one is done."""
        done = [env for env in envs if self.chunks[env].done]
        if BUG == "next-first-observation":
            self.envs.reset(done)
        flags = np.array([self.chunks[env].done for env in envs], bool)
        rewards = np.array([self.chunks[env].reward for env in envs], np.float32)
        if BUG == "last-reward-only":
            rewards = np.array([self.chunks[env].last_reward for env in envs], np.float32)
        data = {
            "obs": self.envs.observe(envs),
            "rewards": rewards.astype(np.int64) if BUG == "int-rewards" else rewards,
            "terminated": flags.astype(np.uint8) if BUG == "done-as-uint8" else flags,
            "truncated": np.zeros_like(flags),
            "info": self.info(envs, flags),
        }
        if BUG == "terminated-as-truncated":
            data["terminated"], data["truncated"] = data["truncated"], data["terminated"]
        if BUG == "unsplittable-info":
            data["info"] = {"note": np.zeros(len(envs) + 1)}
        message = {"message_type": "feedback", **self.address(envs), "data": data}
        if "chunk-steps" in self.features:
            steps = [self.chunks[env].used for env in envs]
            if BUG == "steps-always-horizon":
                steps = [len(self.chunks[env].actions) for env in envs]
            message["steps"] = np.array(steps, np.int64)
        ws.send(msgpack.packb(message, default=to_wire))
        self.fed = envs
        for env in envs:
            chunk = self.chunks[env]
            if not chunk.over:  # only a bug feeds back a chunk that is not
                continue
            self.reusable[env] = b"" if chunk.done else self.row(env)
            survive = not chunk.done or BUG == "step-ids-survive-reset"
            chunk.completed = chunk.completed + 1 if survive else 0
            chunk.begin(None)
        self.envs.reset(done)
        self.episodes += len(done)

    def info(self, envs: list[int], done: Any) -> dict[str, Any]:
        """Return the finished episodes' statistics, or nothing."""
        if not done.any():
            return {}
        length = self.envs.t[envs].astype(np.int64)
        stats = {"r": length.astype(np.float32), "l": length, "s": done.copy(), "mask": done}
        return {"episode": stats}


# --- connections -------------------------------------------------------------------------------


def judge(closed: ConnectionClosed, options: argparse.Namespace) -> int | None:
    """Return the exit code that a close means, or None to reconnect."""
    if closed.rcvd is None:
        ours = closed.sent.code if closed.sent else 1006
        return 1 if ours in (1002, 1003, 1007, 1009) else None  # else the TCP connection was lost
    code, reason = closed.rcvd.code, closed.rcvd.reason
    log(f"closed by the server: {code} {reason}")
    if BUG == "reconnects-on-stop":
        return None
    if code == 1001 and reason == "plugrl-server-stop":
        return None if options.wait_for_next_run else 0
    if BUG == "resync-fatal":
        return 1
    if code == 1008 and BUG in ("refusal-reconnects", "refusal-exits-zero"):
        return 0 if BUG == "refusal-exits-zero" else None
    return None if code in (1001, 1012, 1013) else 1


def one_connection(rollout: Rollout) -> int | None:
    """Connect once and play; return an exit code, or None to reconnect."""
    options = rollout.options
    rollout.progress = False
    key = options.api_key if BUG != "no-api-key" else None
    try:
        with connect(
            f"ws://{options.host}:{options.port}",
            compression="deflate" if BUG == "deflate" else None,
            additional_headers={"Authorization": f"Api-Key {key}"} if key else None,
            max_size=2**20 if BUG == "metadata-2mib-refused" else None,
            close_timeout=2,
            proxy=None,
        ) as ws:
            rollout.play(ws)
            if BUG == "ends-with-1001":
                ws.close(1001)
            return 0
    except ConnectionClosed as closed:
        return judge(closed, options)
    except InvalidStatus as refused:
        status = refused.response.status_code
        log(f"refused by the server: HTTP {status}")
        return None if status in (502, 503, 504) else 1
    except (OSError, InvalidHandshake) as error:
        log(f"no server at {options.host}:{options.port}: {error}")
        return None


def run(options: argparse.Namespace) -> int:
    """Play until done, reconnecting with back-off; return the exit code."""
    envs = ProbeEnvs(options.num_envs)
    rollout = Rollout(options, envs, [Chunk() for _ in range(options.num_envs)])
    failures = 0  # connections in a row that carried no whole exchange
    while True:
        try:
            code = one_connection(rollout)
        except (ProtocolError, WebSocketException) as error:
            log(f"giving up: {error}")
            return 1
        if code is not None:
            log(f"exit {code} after {rollout.episodes} episodes")
            return code
        failures = 0 if rollout.progress else failures + 1
        if failures > options.reconnect_limit:
            log(f"giving up after {failures} fruitless connections")
            return 3
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(failures, 10))
        time.sleep(0.0 if BUG == "hammers" else wait_s * random.uniform(0.5, 1.0))


def log(line: str) -> None:
    """Print a line at once, also into a pipe."""
    print(line, flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8000)
    p.add_argument("--num-envs", type=int, default=4)
    p.add_argument("--episodes", type=int, default=20, help="in all, over all envs")
    p.add_argument("--replan-steps", type=int, default=0, help="prefix of a chunk to use; 0 all")
    p.add_argument("--action-dim", type=int, default=3, help="if the metadata does not say")
    p.add_argument("--features", default=",".join(FEATURES), help="comma-separated, may be empty")
    p.add_argument("--api-key")
    p.add_argument("--reconnect-limit", type=int, default=8, help="fruitless connections in a row")
    p.add_argument("--wait-for-next-run", action="store_true", help="reconnect after server-stop")
    p.add_argument("--bug", choices=sorted(BUGS), default="", metavar="NAME")
    p.add_argument("--list-bugs", action="store_true")
    options = p.parse_args(argv)
    options.features = [name for name in options.features.split(",") if name]
    return options


if __name__ == "__main__":
    parsed = parse(sys.argv[1:])
    BUG = parsed.bug
    if parsed.list_bugs:
        log("\n".join(f"{name}\t{clause}" for name, clause in BUGS.items()))
        sys.exit(0)
    sys.exit(run(parsed))
