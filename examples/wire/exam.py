#!/usr/bin/env python3
"""Examine a client that runs the probe environment: python exam.py SCENARIO -- CMD {host} {port}.

Serves one scenario to the client, compares every message with what probe-v1 must have done, and
prints what was wrong. It reads frames with the reference server's session, so whatever that calls
malformed is wrong here too. It knows nothing about the client's language.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

if TYPE_CHECKING:
    from examples.wire import ref_server
    from examples.wire.ref_server import MalformedError, Session, encode
    from websockets.http11 import Request, Response
else:  # run as a script, beside the server
    import ref_server
    from ref_server import MalformedError, Session, encode

HORIZON, WIDTH, KEY = 4, 3, "sesame"
Client = Callable[[str, int], Awaitable[int]]  # (host, port) -> exit code

SCENARIOS = {
    "basic": "everything offered; the client finishes its episodes and closes 1000",
    "bare": "empty metadata, no features; the same",
    "foreign": "2 MiB of metadata, unknown keys, unknown features; the same",
    "dropped": "closed with resync together with an action, so that a feedback is dropped",
    "held": "closed with resync on an infer, while other envs hold actions",
    "flood": "closed with resync right after the metadata, four times",
    "text": "a text frame instead of an action; the client gives up",
    "stop": "plugrl-server-stop; the client exits 0",
    "refused": "1008; the client gives up",
    "internal": "1011; the client gives up",
    "shuffled": "an action for the asked envs in another order; the client gives up",
    "key": "401 unless the client brings the key sesame",
}
GIVES_UP = ("text", "refused", "internal", "shuffled")


@dataclass
class Env:
    """What the examiner knows of one env of the client."""

    t: int | None = None  # None: unknown, on a fresh connection
    a: Any = None
    completed: int | None = None
    action: Any = None  # the chunk held, [H, d]


@dataclass
class Exam:
    """One scenario: serves connections, collects what was wrong."""

    scenario: str
    prefix: int = HORIZON  # of a chunk, that the client was told to use
    violations: list[str] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    feedbacks: int = 0
    episodes: int = 0
    reused: int = 0
    last_close: int | None = None

    def wrong(self, condition: object, message: str) -> None:
        """Record a violation if the condition holds."""
        if condition:
            self.violations.append(message)

    def metadata(self) -> bytes:
        """Return this scenario's first message."""
        data: dict[str, Any] = {"protocol_version": 1, "features": list(ref_server.FEATURES)}
        data |= {"action_dim": WIDTH, "action_horizon": HORIZON}
        if self.scenario == "bare":
            data = {}
        if self.scenario == "foreign":
            data |= {"weather": {"wind": [1, 2.5, None]}, "blob": np.zeros(2**21, np.uint8)}
            data["features"] = ["telepathy", *ref_server.FEATURES]
        return encode({"message_type": "metadata", "data": data})

    def session(self) -> Session:
        """Return the reference session for a new connection."""
        flags = ["--probe", f"--action-dim={WIDTH}", f"--action-horizon={HORIZON}"]
        flags += ["--features="] if self.scenario == "bare" else []
        return Session(ref_server.parse(flags))

    def admit(self, ws: ServerConnection, request: Request) -> Response | None:
        """Note the arrival; refuse a missing key where the scenario has one."""
        self.arrivals.append(time.monotonic())
        self.wrong("permessage-deflate" in request.headers.get("Sec-WebSocket-Extensions", ""),
                   "offers permessage-deflate")  # fmt: skip
        if len(self.arrivals) > 12:
            return ws.respond(403, "enough\n")
        if self.scenario == "key" and request.headers.get("Authorization") != f"Api-Key {KEY}":
            return ws.respond(401, "no\n")
        return None

    async def handle(self, ws: ServerConnection) -> None:
        """Serve one connection of the scenario."""
        try:
            await self.converse(ws)
        except ConnectionClosed:
            self.last_close = ws.close_code
        except asyncio.TimeoutError:
            self.violations.append("no pong, or no close, in time")
        except MalformedError as error:
            self.violations.append(f"malformed: {error}")
            await ws.close(1011, "exam failed")

    async def converse(self, ws: ServerConnection) -> None:
        """Play the server's part, with the scenario's incidents."""
        session, envs = self.session(), dict[int, Env]()
        number = len(self.arrivals)
        await ws.send(self.metadata())
        if self.scenario == "flood" and number <= 4:
            return await ws.close(1001, "plugrl-server-resync")
        for turn in range(10**6):
            message = session.receive(await ws.recv())
            if await self.incident(ws, number, turn):
                return None
            self.check_infer(message, envs)
            action = session.infer(message)
            if turn == 0:
                await asyncio.wait_for(await ws.ping(), 5)
            for env in message["env_indices"].tolist():
                k, d = np.arange(HORIZON)[:, None], np.arange(WIDTH)
                envs[env].action = np.float32(10000 * k + 10 * env + d)
            if self.scenario == "dropped" and (number, turn) in ((1, 2), (2, 0)):
                ws.protocol.send_binary(action)  # in one segment, to be seen together
                ws.protocol.send_close(1001, "plugrl-server-resync")
                ws.transport.write(b"".join(ws.protocol.data_to_send()))
                await ws.wait_closed()
                return None
            if self.scenario == "shuffled":
                ids, zeros = message["env_indices"][::-1], np.zeros((HORIZON, len(envs), WIDTH))
                data = {"env_ids": ids, "action": zeros}
                action = encode({"message_type": "action", "data": data})
            await ws.send(action)
            message = session.receive(await ws.recv())
            session.feedback(message)
            self.check_feedback(message, envs)
            self.feedbacks += 1
        return None

    async def incident(self, ws: ServerConnection, number: int, turn: int) -> bool:
        """Whether the scenario ends this connection instead of answering this infer."""
        if self.scenario == "held" and (number, turn) in ((1, 1), (2, 2), (3, 4)):
            await ws.close(1001, "plugrl-server-resync")
        elif self.scenario == "text" and turn == 1:
            await ws.send("action")
            await asyncio.wait_for(ws.wait_closed(), 2)
        elif self.scenario == "stop" and turn == 2:
            await ws.close(1001, "plugrl-server-stop")
        elif self.scenario == "refused":
            await ws.close(1008, "states a:3,t:1, policy has x:9")
        elif self.scenario == "internal":
            await ws.close(1011, "Internal server error.")
        else:
            return False
        return True

    def check_infer(self, message: dict[str, Any], envs: dict[int, Env]) -> None:
        """Compare an infer with the envs' last known state."""
        ids = message["env_indices"].tolist()
        listed = self.scenario != "bare"
        self.wrong("reuse" in message and not listed, "reuse, though not offered")
        reuse = message.get("reuse", np.zeros(len(ids), bool))
        self.reused += int(reuse.sum())
        self.wrong(len(set(ids)) < len(ids), "duplicate env_indices")
        fresh = [i for i, again in zip(ids, reuse, strict=True) if not again]
        obs, steps = message["data"], message["step_ids"].tolist()
        for row, i in enumerate(fresh):
            env, length = envs.setdefault(i, Env()), 3 + 2 * (i % 3)
            t, a = int(obs["states"]["t"][row, 0]), obs["states"]["a"][row]
            self.wrong(not 0 <= t < length, f"env {i}: infer at t={t} of {length}: not reset")
            self.wrong(env.t is not None and t != env.t, f"env {i}: infer at t={t}, was {env.t}")
            self.wrong(env.a is not None and (a != env.a).any(), f"env {i}: infer with another a")
            self.wrong(t == 0 and a.any(), f"env {i}: a is {a} after a reset")
            env.t = t
        for i, step_id in zip(ids, steps, strict=True):
            env = envs.setdefault(i, Env())
            expected = step_id if env.completed is None else env.completed
            self.wrong(step_id != expected, f"env {i}: step_id {step_id}, expected {expected}")
            self.wrong(step_id > (env.t or 0), f"env {i}: step_id {step_id} at t={env.t}")
            env.completed = step_id

    def check_feedback(self, message: dict[str, Any], envs: dict[int, Env]) -> None:
        """Compare a feedback with what the probe env must have done with its chunk."""
        data, listed = message["data"], self.scenario != "bare"
        self.wrong("steps" in message and not listed, "steps, though not offered")
        for row, i in enumerate(message["env_indices"].tolist()):
            env, length = envs[i], 3 + 2 * (i % 3)
            t, a = int(data["obs"]["states"]["t"][row, 0]), data["obs"]["states"]["a"][row]
            ran = t - (env.t or 0)
            done, who = t == length, f"env {i}"
            self.wrong(not 1 <= ran <= self.prefix, f"{who}: ran {ran} steps to t={t}")
            self.wrong(ran != self.prefix and not done, f"{who}: ran only {ran} steps to t={t}")
            told = env.action[min(max(ran, 1), HORIZON) - 1]
            self.wrong(not np.array_equal(a, told), f"{who}: did {a} at step {ran}, told {told}")
            self.wrong(data["rewards"][row] != ran, f"{who}: reward {data['rewards'][row]}")
            self.wrong(data["terminated"][row] != done, f"{who}: terminated at t={t} of {length}")
            self.wrong(data["truncated"][row], f"{who}: truncated")
            steps = message["steps"][row] if "steps" in message else ran
            self.wrong(steps != ran, f"{who}: steps {steps}, ran {ran}")
            self.wrong(message["step_ids"][row] != env.completed, f"{who}: feedback's step_id")
            completed = 0 if done else (env.completed or 0) + 1
            envs[i] = Env(0 if done else t, None if done else a, completed)
            self.episodes += done

    def conclude(self, code: int) -> None:
        """Judge the end: exit code, number of connections, close code, back-off."""
        expected = {"dropped": 3, "held": 4, "flood": 5}.get(self.scenario, 1)
        arrived = len(self.arrivals)
        self.wrong(arrived != expected, f"{arrived} connections, expected {expected}")
        self.wrong(self.scenario in GIVES_UP and code == 0, "exit 0, expected another")
        self.wrong(self.scenario not in GIVES_UP and code != 0, f"exit {code}, expected 0")
        if self.scenario not in (*GIVES_UP, "stop"):
            self.wrong(self.last_close != 1000, f"the client closed {self.last_close}, not 1000")
            self.wrong(not self.episodes, "no episode was finished")
        if self.scenario == "flood" and arrived == expected:
            gaps = np.diff(self.arrivals)
            self.wrong(gaps.sum() < 0.2 or gaps[-1] < gaps[0], f"no back-off: {gaps.round(3)}")


async def examine(scenario: str, client: Client, *, prefix: int = HORIZON) -> Exam:
    """Serve the scenario on a free port, run the client against it, return the finished exam."""
    exam = Exam(scenario, prefix)
    async with serve(
        exam.handle, "127.0.0.1", 0, process_request=exam.admit, compression=None, close_timeout=1
    ) as server:
        host, port = server.sockets[0].getsockname()[:2]
        code = await client(host, port)
    exam.conclude(code)
    return exam


def command(*argv: str) -> Client:
    """Return a client that is a command; {host} and {port} in it are replaced."""

    async def run(host: str, port: int) -> int:
        words = [word.format(host=host, port=port) for word in argv]
        process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.DEVNULL)
        try:
            return await asyncio.wait_for(process.wait(), 30)
        except asyncio.TimeoutError:
            process.kill()
            await process.wait()
            return -9

    return run


if __name__ == "__main__":
    if len(sys.argv) < 4 or sys.argv[1] not in SCENARIOS or sys.argv[2] != "--":
        lines = [f"  {name:10} {what}" for name, what in SCENARIOS.items()]
        sys.exit("\n".join([str(__doc__), "Scenarios:", *lines]))
    finished = asyncio.run(examine(sys.argv[1], command(*sys.argv[3:])))
    print(f"{finished.feedbacks} feedbacks, {finished.episodes} episodes, "
          f"{finished.reused} reused, {len(finished.arrivals)} connections")  # fmt: skip
    print("\n".join(f"wrong: {line}" for line in finished.violations) or "nothing wrong")
    sys.exit(1 if finished.violations else 0)
