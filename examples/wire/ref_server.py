#!/usr/bin/env python3
"""Serve the wire protocol, version 1, with a policy that does not learn.

A reference to read and to check clients with: one file, sharing nothing with the packages. It
refuses whatever the protocol calls malformed and closes only the connection at fault.
It knows nothing about learning; actions are zeros, random, a probe pattern or an echoed state.
"""

from __future__ import annotations

import argparse
import asyncio
import hmac
import math
import re
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

if TYPE_CHECKING:
    from websockets.http11 import Request, Response

FEATURES = ("reuse-feedback-obs", "chunk-steps")
MAX_DEPTH, MAX_KEYS, MAX_ITEMS, MAX_ELEMENTS, MAX_ENV = 16, 4096, 65536, 2**31, 2**20
TYPESTR = re.compile(r"[<>|](b1|[iu][1248]|f[248]|U\d{1,5})")

BUGS = {
    "metadata-twice": "3: metadata is sent exactly once",
    "metadata-never": "3: the server speaks first, with metadata",
    "metadata-zeros": "4: what is unknown is absent, never zero",
    "deflate": "1: permessage-deflate is not negotiated",
    "healthz-missing": "1: GET /healthz answers 200",
    "api-key-ignored": "1: a wrong or missing key is refused with 401",
    "cap-ignored": "1: incoming frames are capped, 1009",
    "ping-blocked": "1: pings are answered while the policy infers",
    "object-dtype": "2: kind O is refused on decode",
    "extra-bytes": "2: data holds exactly prod(shape) * itemsize bytes",
    "huge-shape": "2: an overflowing shape is refused",
    "deep-tree": "2: a too-deep tree or one of very many keys is refused",
    "action-batch-major": "4: the action is time-major, [H, n, *da]",
    "env-ids-reordered": "3: env_ids equals env_indices, in order",
    "action-by-position": "3: actions are routed by env index, not by position",
    "feedback-by-position": "3: feedback is routed by env index, not by position",
    "feedback-set-must-match": "3: the feedback's env set need not equal the infer's",
    "feedback-answered": "3: a feedback has no reply",
    "two-infers": "3: infer and feedback alternate strictly",
    "duplicate-indices": "3: env_indices are unique in a message",
    "negative-index": "3: env_indices are not negative",
    "empty-message": "5: n = 0 is malformed",
    "wrong-length": "5: a wrong leading dimension is malformed",
    "feedback-without-action": "5: feedback for an env holding no action is malformed",
    "text-ignored": "5: a text frame closes that connection",
    "garbage-kills-server": "5: a malformed frame closes that connection only",
    "garbage-1011": "5: a malformed frame closes with 1001, not 1011",
    "resync-reason": "5: a protocol error's reason is plugrl-server-resync",
    "stop-reason": "5: a finished run's reason is plugrl-server-stop",
    "timeout-reason": "5: a missing feedback's reason is Feedback timeout",
    "state-survives": "5: after any close all state of that connection is gone",
    "int-rewards": "5: integer rewards are malformed",
    "nan-reward": "5: a reward that is not finite is malformed",
    "int-states-refused": "5: integer states are accepted and converted",
    "big-endian-refused": "5: big-endian arrays are accepted and converted",
    "text-list-refused": "2: text may be a msgpack array of strings",
    "float64-rewards-refused": "4: rewards are accepted as any float kind",
    "unsplittable-info": "4: info that cannot be split is a protocol error if m > 1",
    "reuse-before-feedback": "6: reuse without an earlier feedback is a protocol error",
    "reuse-after-done": "6: reuse after a done is a protocol error",
    "steps-out-of-range": "6: steps lie in 1..H",
}
BUG = ""


class MalformedError(Exception):
    """The peer broke the protocol: its connection is closed with resync."""


class RefusedError(Exception):
    """The policy was built for other observations: the connection is closed with 1008."""


def need(condition: object, message: str, bug: str = "-") -> None:
    """Raise ``MalformedError`` unless the condition holds (or the named bug waives it)."""
    if not condition and bug != BUG:
        raise MalformedError(message)


# --- frames ------------------------------------------------------------------------------------


def encode(message: dict[str, Any]) -> bytes:
    """Pack a message; arrays become maps with bin keys."""

    def array(value: np.ndarray[Any, Any]) -> dict[bytes, Any]:
        data, dtype, shape = value.tobytes(), value.dtype.str, value.shape
        return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}

    return bytes(msgpack.packb(message, default=array))


def decode_array(node: dict[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a read-only view on ``data``, after checking dtype, shape and length."""
    need(set(node) == {b"__ndarray__", b"data", b"dtype", b"shape"}, "array: wrong keys")
    data, dtype, shape = node[b"data"], node[b"dtype"], node[b"shape"]
    need(node[b"__ndarray__"] is True and isinstance(data, bytes), "array: data is not bin")
    need(isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= 8, "array: header")
    need(all(type(d) is int and d >= 0 for d in shape), f"array: shape {shape}")
    elements = math.prod(max(d, 1) for d in shape)
    need(elements <= MAX_ELEMENTS, f"array: shape {shape} is too large", "huge-shape")
    if BUG == "object-dtype" and dtype == "|O":
        return np.zeros(shape)
    if BUG == "huge-shape" and elements > MAX_ELEMENTS:
        return np.zeros([min(d, 1) for d in shape])
    need(TYPESTR.fullmatch(dtype), f"array: dtype {dtype!r} is not one of the kinds b u i f U")
    kind = np.dtype(dtype)
    need(kind.isnative or BUG != "big-endian-refused", "array: big-endian")
    size = math.prod(shape) * kind.itemsize
    right = len(data) == size or (BUG == "extra-bytes" and len(data) > size)
    need(right, f"array: {len(data)} bytes for {dtype} {shape}")
    array: np.ndarray[Any, Any] = np.ndarray(shape, kind, buffer=data)
    if kind.kind == "U" and array.size:  # numpy keeps what Python strings cannot hold
        points = np.ndarray(size // 4, kind.byteorder + "u4", buffer=data)
        need(not ((points > 0x10FFFF) | (points >> 11 == 0x1B)).any(), "array: not Unicode")
    return array


def decode(frame: bytes) -> dict[str, Any]:
    """Unpack a frame under bounds on depth, keys and list items; the root must be a map."""
    spent = {"keys": 0, "items": 0}

    def charge(what: str, amount: int, bound: int) -> None:
        spent[what] += amount
        need(spent[what] <= bound, f"more than {bound} {what}", "deep-tree")

    def pairs(items: list[tuple[Any, Any]]) -> Any:
        charge("keys", len(items), MAX_KEYS)
        need(all(type(key) in (str, bytes) for key, _ in items), "a key is neither str nor bin")
        node = dict(items)
        if b"__ndarray__" in node:
            return decode_array(node)
        if b"__npgeneric__" in node:
            need(TYPESTR.fullmatch(str(node.get(b"dtype"))), "scalar: dtype")
            return node.get(b"data")
        need(all(type(key) is str for key in node), "a bin key outside an array")
        return node

    def items_hook(items: list[Any]) -> list[Any]:
        charge("items", len(items), MAX_ITEMS)
        return items

    def ext_hook(code: int, _data: bytes) -> None:
        raise MalformedError(f"extension type {code}")

    def check_depth(node: Any, depth: int) -> None:
        need(depth <= MAX_DEPTH, f"deeper than {MAX_DEPTH} levels")
        if isinstance(node, (dict, list)):
            for child in node.values() if isinstance(node, dict) else node:
                check_depth(child, depth + 1)

    try:
        root = msgpack.unpackb(
            frame,
            strict_map_key=False,
            object_pairs_hook=pairs,
            list_hook=items_hook,
            ext_hook=ext_hook,
            max_map_len=MAX_ITEMS if BUG == "deep-tree" else MAX_KEYS,
            max_array_len=MAX_ITEMS,
        )
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException) as error:
        raise MalformedError(f"not msgpack: {error!r}") from error
    if BUG != "deep-tree":
        check_depth(root, 0)
    need(isinstance(root, dict), "the root is not a map")
    return dict(root)


# --- messages ----------------------------------------------------------------------------------


def vector(message: dict[str, Any], key: str, n: int | None, dtypes: tuple[str, ...]) -> Any:
    """Return the 1-D array ``message[key]`` of length n, in native byte order."""
    value = message.get(key)
    need(isinstance(value, np.ndarray) and value.ndim == 1, f"{key} is not an array [n]")
    assert isinstance(value, np.ndarray)
    need(value.dtype.str[1:] in dtypes, f"{key}: dtype {value.dtype.str}, expected {dtypes}")
    need(n is None or len(value) == n, f"{key}: {len(value)} rows, expected {n}", "wrong-length")
    return value.astype(value.dtype.newbyteorder("="), copy=False)


def submap(message: dict[str, Any], key: str) -> dict[str, Any]:
    """Return the map ``message[key]``."""
    value = message.get(key)
    need(isinstance(value, dict), f"{key} is not a map")
    return dict(value or {})


def indices(message: dict[str, Any]) -> list[int]:
    """Return ``env_indices``: at least one, unique, small and not negative."""
    envs: list[int] = vector(message, "env_indices", None, ("i8",)).tolist()
    need(envs, "n = 0", "empty-message")
    need(len(set(envs)) == len(envs), f"duplicate index in {envs}", "duplicate-indices")
    need(all(env >= 0 for env in envs), f"negative index in {envs}", "negative-index")
    need(all(env < MAX_ENV for env in envs), f"index too large in {envs}")
    vector(message, "step_ids", len(envs), ("i8",))
    return envs


def observation(obs: dict[str, Any], n: int) -> dict[str, Any]:
    """Flatten an observation of n rows to {"images/x" | "states/y" | "text": array [n, ...]}."""
    flat: dict[str, Any] = {}
    for group, kinds, ndim in (("images", "u", 4), ("states", "fiu", 2)):
        for name, value in submap(obs, group).items():
            key = f"{group}/{name}"
            need(isinstance(value, np.ndarray) and value.ndim == ndim, f"{key}: not {ndim}-D")
            need(value.dtype.kind in kinds, f"{key}: dtype {value.dtype}")
            need(group == "states" or value.itemsize == 1, f"{key}: dtype {value.dtype}")
            need(value.dtype.kind not in "iu" or group == "images" or BUG != "int-states-refused",
                 f"{key}: integers")  # fmt: skip
            flat[key] = value if group == "images" else value.astype(np.float64)
    text = obs.get("text")
    if isinstance(text, list) and all(isinstance(item, str) for item in text):
        need(BUG != "text-list-refused", "text: a list")
        text = np.array(text, dtype=np.str_)
    need(isinstance(text, np.ndarray) and text.ndim == 1 and text.dtype.kind == "U", "text")
    flat["text"] = np.asarray(text)
    for key, value in flat.items():
        need(len(value) == n, f"{key}: {len(value)} rows, expected {n}", "wrong-length")
    return flat


def check_info(info: dict[str, Any], m: int) -> None:
    """Raise unless ``info`` can be split into m rows."""
    levels = [info, *(value for value in info.values() if isinstance(value, dict))]
    lengths = [
        len(v) for level in levels for v in level.values() if isinstance(v, list) or np.ndim(v)
    ]
    splits = not info or m == 1 or m in lengths
    need(splits, f"info has nothing of length {m} to split by", "unsplittable-info")


class Session:
    """What the server remembers of one connection; bytes in, bytes out, no I/O."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.turn = "infer"
        self.holding: set[int] = set()
        self.last: dict[int, dict[str, Any] | None] = {}  # last feedback's row; None after a done
        self.asked: list[int] = []
        self.random = np.random.default_rng(options.seed)
        self.nonfinite = 0

    def metadata(self) -> bytes:
        """Return the first message."""
        o = self.options
        data: dict[str, Any] = {"protocol_version": 1, "server": "plugrl-server"}
        data |= {"server_version": "reference", "features": o.features}
        data |= {"action_horizon": o.action_horizon, "action_dim": o.action_dim}
        if BUG == "metadata-zeros":
            data |= {"action_horizon": 0, "action_dim": 0}
        return encode({"message_type": "metadata", "data": data})

    def receive(self, frame: bytes | str) -> dict[str, Any]:
        """Decode a frame and check that it is the message whose turn it is."""
        need(isinstance(frame, bytes), "a text frame")
        message = decode(frame)  # type: ignore[arg-type]  # checked in the line above
        kind = message.get("message_type")
        if BUG == "two-infers" and kind == "infer":
            self.turn = "infer"
        need(kind == self.turn, f"{kind!r} out of turn, expected {self.turn!r}")
        return message

    def infer(self, message: dict[str, Any]) -> bytes:
        """Answer an infer with an action."""
        envs = indices(message)
        reuse = np.zeros(len(envs), bool)
        if "reuse-feedback-obs" in self.options.features and "reuse" in message:
            reuse = vector(message, "reuse", len(envs), ("b1",))
        obs = observation(submap(message, "data"), int((~reuse).sum()))
        self.watch(obs)
        fresh = iter(
            [
                {key: value[i] for key, value in obs.items() if i < len(value)}
                for i in range(int((~reuse).sum()))
            ]
        )
        rows = [
            self.reused(env) if again else next(fresh)
            for env, again in zip(envs, reuse, strict=True)
        ]
        need(len({tuple(sorted(row)) for row in rows}) <= 1, "rows of one infer differ in keys")
        self.check_policy(rows)
        self.turn, self.asked = "feedback", envs
        self.holding.update(envs)
        return self.act(envs, rows)

    def reused(self, env: int) -> dict[str, Any]:
        """Return the env's row of its last feedback on this connection."""
        need(env in self.last, f"env {env} has no feedback yet", "reuse-before-feedback")
        row = self.last.get(env, {})
        need(row is not None, f"env {env}: its last feedback was a done")
        return row or {}

    def check_policy(self, rows: list[dict[str, Any]]) -> None:
        """Refuse observations that the (pretended) policy was not built for."""
        for row in rows:
            states = {k[7:]: v for k, v in row.items() if k.startswith("states/")}
            found = ",".join(f"{name}:{len(value)}" for name, value in sorted(states.items()))
            if self.options.expect is not None and found != self.options.expect:
                raise RefusedError(f"states {found}, policy has {self.options.expect}")

    def watch(self, obs: dict[str, Any]) -> None:
        """Count observations that are not finite, and name them; none is learned from."""
        rows: set[int] = set()
        for name, value in obs.items():
            finite = not name.startswith("states/") or np.isfinite(value)
            if not np.all(finite):
                log(f"not finite: {name}")
                rows.update(np.flatnonzero(~np.all(finite, axis=1)).tolist())
        self.nonfinite += len(rows)

    def act(self, envs: list[int], rows: list[dict[str, Any]]) -> bytes:
        """Return the action message, float32 [H, n, da]."""
        o = self.options
        if BUG == "action-by-position":
            rows = [
                row for _, row in sorted(zip(envs, rows, strict=True), key=lambda pair: pair[0])
            ]
        k, d = np.arange(o.action_horizon)[:, None, None], np.arange(o.action_dim)
        j = np.array(range(len(envs)) if BUG == "action-by-position" else envs)[:, None]
        action: Any = np.zeros((o.action_horizon, len(envs), o.action_dim), np.float32)
        if o.probe:
            action = np.asarray(10000 * k + 10 * j + d, np.float32)
        elif o.echo:
            action += np.array([[row[f"states/{o.echo}"][0]] for row in rows], np.float32)
        elif o.seed is not None:
            action = self.random.uniform(-1, 1, action.shape).astype(np.float32)
        if BUG == "action-batch-major":
            action = action.swapaxes(0, 1)
        ids = np.array(envs[::-1] if BUG == "env-ids-reordered" else envs, np.int64)
        return encode({"message_type": "action", "data": {"env_ids": ids, "action": action}})

    def feedback(self, message: dict[str, Any]) -> tuple[int, int]:
        """Check a feedback; return (env steps, finished episodes)."""
        envs, data = indices(message), submap(message, "data")
        m = len(envs)
        floats = ("f2", "f4") if BUG == "float64-rewards-refused" else ("f2", "f4", "f8")
        wider = ("i2", "i4", "i8", "u2", "u4", "u8") if BUG == "int-rewards" else ()
        rewards = vector(data, "rewards", m, floats + wider)
        need(np.isfinite(rewards).all(), f"rewards are not finite: {rewards}", "nan-reward")
        done = vector(data, "terminated", m, ("b1",)) | vector(data, "truncated", m, ("b1",))
        obs = observation(submap(data, "obs"), m)
        self.watch(obs)
        check_info(submap(data, "info"), m)
        steps = np.ones(m, int)
        if "chunk-steps" in self.options.features and "steps" in message:
            steps = vector(message, "steps", m, ("i8",))
            legal = (steps >= 1) & (steps <= self.options.action_horizon)
            need(legal.all(), f"steps {steps}", "steps-out-of-range")
        if BUG == "feedback-set-must-match":
            need(set(envs) == set(self.asked), f"feedback for {envs}, infer for {self.asked}")
        lost = set(envs) - self.holding
        need(not lost, f"feedback for envs {lost} holding no action", "feedback-without-action")
        by_position = BUG == "feedback-by-position" and m <= len(self.asked)
        for i, env in enumerate(self.asked[:m] if by_position else envs):
            self.holding.discard(envs[i])
            row = {key: value[i] for key, value in obs.items() if i < len(value)}
            self.last[env] = None if done[i : i + 1].any() and BUG != "reuse-after-done" else row
        self.turn = "infer"
        return int(steps.sum()), int(done.sum())


# --- sockets -----------------------------------------------------------------------------------


class Connection(ServerConnection):
    """A connection whose 1009 names the cap in MiB."""

    def __init__(self, protocol: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(protocol, *args, **kwargs)
        fail, cap = protocol.fail, protocol.max_message_size or 0

        def named(code: int, reason: str = "") -> None:
            fail(code, f"message over {cap >> 20} MiB" if code == 1009 else reason)

        protocol.fail = named


class Server:
    """Accepts connections until the run is finished or a signal arrives."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.rounds = self.steps = self.episodes = self.nonfinite = 0
        loop = asyncio.get_running_loop()
        self.stop: asyncio.Future[str] = loop.create_future()
        self.port: asyncio.Future[int] = loop.create_future()  # known once listening
        self.shared = Session(options)

    def finish(self, reason: str) -> None:
        """Stop serving; the first reason wins."""
        if not self.stop.done():
            self.stop.set_result(reason)

    def admit(self, ws: ServerConnection, request: Request) -> Response | None:
        """Answer /healthz, and refuse a wrong or missing key with 401."""
        if request.path == "/healthz" and BUG != "healthz-missing":
            return ws.respond(200, "ok\n")
        key = self.options.api_key
        given = request.headers.get("Authorization", "")
        right = not key or hmac.compare_digest(given.encode(), f"Api-Key {key}".encode())
        if not right and BUG != "api-key-ignored":
            return ws.respond(401, "a valid 'Authorization: Api-Key <key>' is required\n")
        return None

    async def handle(self, ws: ServerConnection) -> None:
        """Serve one connection; whatever goes wrong ends that connection only."""
        session = Session(self.options)
        if BUG == "state-survives":
            session.holding, session.last = self.shared.holding, self.shared.last
        code, reason = 1001, "plugrl-server-resync"
        try:
            await self.converse(ws, session)
        except ConnectionClosed:
            return
        except MalformedError as error:
            log(f"{ws.remote_address}: malformed: {error}")
            if BUG == "garbage-kills-server" and "not msgpack" in str(error):
                self.finish("Server shutdown")
            if BUG == "garbage-1011":
                code, reason = 1011, "Internal server error."
            reason = "resync" if BUG == "resync-reason" else reason
        except RefusedError as error:
            code, reason = 1008, str(error).encode()[:123].decode(errors="ignore")
        except asyncio.TimeoutError:
            reason = "timeout" if BUG == "timeout-reason" else "Feedback timeout"
        except Exception:  # noqa: BLE001  # the connection's border: logged here, never sent
            traceback.print_exc()
            code, reason = 1011, "Internal server error."
        finally:
            self.nonfinite += session.nonfinite
        await ws.close(code, reason)

    async def converse(self, ws: ServerConnection, session: Session) -> None:
        """Metadata, then infer, action, feedback until someone closes."""
        if BUG != "metadata-never":
            await ws.send(session.metadata())
        if BUG == "metadata-twice":
            await ws.send(session.metadata())
        while not self.stop.done():
            deadline = self.options.feedback_timeout if session.turn == "feedback" else None
            frame = await asyncio.wait_for(ws.recv(), deadline)
            if BUG == "text-ignored" and isinstance(frame, str):
                continue
            message = session.receive(frame)
            if session.turn == "infer":
                reply = session.infer(message)
                if BUG == "ping-blocked":
                    time.sleep(max(self.options.infer_seconds, 1.0))
                else:
                    await asyncio.sleep(self.options.infer_seconds)
                await ws.send(reply)
                continue
            steps, episodes = session.feedback(message)
            if BUG == "feedback-answered":
                await ws.send(encode({"message_type": "feedback"}))
            self.rounds, self.steps = self.rounds + 1, self.steps + steps
            self.episodes += episodes
            o = self.options
            if (o.rounds and self.rounds >= o.rounds) or (
                o.max_steps and self.steps >= o.max_steps
            ):
                self.finish("server-stop" if BUG == "stop-reason" else "plugrl-server-stop")
        await ws.wait_closed()  # run() says why

    async def run(self) -> None:
        """Listen, wait for the end, tell every client why."""
        for name in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(name, self.finish, "Server shutdown")
        cap = None if BUG == "cap-ignored" else int(self.options.max_message_mb * 2**20)
        server = await serve(
            self.handle,
            self.options.host,
            self.options.port,
            process_request=self.admit,
            create_connection=Connection,
            compression="deflate" if BUG == "deflate" else None,
            max_size=cap,
            close_timeout=2,
        )
        host, port = server.sockets[0].getsockname()[:2]
        log(f"listening on {host}:{port}")
        self.port.set_result(port)
        reason = await self.stop
        await asyncio.gather(*(ws.close(1001, reason) for ws in server.connections))
        server.close()
        await server.wait_closed()
        log(f"{reason}: {self.rounds} rounds, {self.steps} steps, {self.episodes} episodes, "
            f"server/nonfinite_observations {self.nonfinite}")  # fmt: skip


def log(line: str) -> None:
    """Print a line at once, also into a pipe."""
    print(line, flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=8000, help="0 takes any free port")
    p.add_argument("--action-dim", type=int, default=3)
    p.add_argument("--action-horizon", type=int, default=4)
    p.add_argument("--features", default=",".join(FEATURES), help="comma-separated, may be empty")
    p.add_argument("--rounds", type=int, default=0, help="finish after this many feedbacks")
    p.add_argument("--max-steps", type=int, default=0, help="finish after this many env steps")
    p.add_argument("--api-key")
    p.add_argument("--max-message-mb", type=float, default=256)
    p.add_argument("--seed", type=int, help="random actions instead of zeros")
    p.add_argument("--probe", action="store_true", help="action 10000*k + 10*j + d")
    p.add_argument("--echo", help="action = first entry of the state of this name")
    p.add_argument("--expect", help="refuse (1008) states other than name:width,... (sorted)")
    p.add_argument("--feedback-timeout", type=float, default=60.0, help="seconds")
    p.add_argument("--infer-seconds", type=float, default=0.0, help="pretend to infer this long")
    p.add_argument("--bug", choices=sorted(BUGS), default="", metavar="NAME")
    p.add_argument("--list-bugs", action="store_true")
    options = p.parse_args(argv)
    options.features = [name for name in options.features.split(",") if name]
    return options


async def main(options: argparse.Namespace) -> None:
    """Run one server in the running loop."""
    await Server(options).run()


if __name__ == "__main__":
    parsed = parse(sys.argv[1:])
    BUG = parsed.bug
    if parsed.list_bugs:
        log("\n".join(f"{name}\t{clause}" for name, clause in BUGS.items()))
    else:
        asyncio.run(main(parsed))
