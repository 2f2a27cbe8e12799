"""The reference server and client keep the protocol, and each of their named bugs shows."""

import asyncio
import contextlib
import importlib
import sys
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as connect_sync

WIRE = Path(__file__).resolve().parents[1] / "examples" / "wire"


def load(name):
    """Import an example by its name; they are scripts, not packages."""
    sys.path.insert(0, str(WIRE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(WIRE))


ref_server, ref_client, exam = load("ref_server"), load("ref_client"), load("exam")


# --- the client before the examiner -------------------------------------------------------------

CLIENT_BUG_SHOWS_IN = dict.fromkeys(ref_client.BUGS, "basic") | {
    "metadata-2mib-refused": "foreign",
    "unknown-metadata-fatal": "foreign",
    "metadata-required": "bare",
    "reuse-unasked": "bare",
    "env-ids-ignored": "shuffled",
    "late-feedback": "held",
    "reuse-across-connections": "held",
    "resync-fatal": "held",
    "dropped-done-not-reset": "dropped",
    "reconnects-on-stop": "stop",
    "text-exits-zero": "text",
    "text-ignored": "text",
    "refusal-reconnects": "refused",
    "refusal-exits-zero": "refused",
    "hammers": "flood",
    "no-api-key": "key",
}


def examine_client(monkeypatch, scenario, *flags, bug="", prefix=4):
    """Run the reference client in a thread before the examiner; return the exam."""
    monkeypatch.setattr(ref_client, "BUG", bug)

    def run(host, port):
        given = ["--host", host, "--port", str(port), "--api-key", exam.KEY]
        given += ["--reconnect-limit", "5", *flags]
        try:
            return ref_client.run(ref_client.parse(given))
        except SystemExit as exit_:
            return exit_.code

    async def client(host, port):
        return await asyncio.to_thread(run, host, port)

    return asyncio.run(exam.examine(scenario, client, prefix=prefix))


@pytest.mark.parametrize("scenario", exam.SCENARIOS)
def test_the_client_passes_the_scenario(monkeypatch, scenario):
    assert examine_client(monkeypatch, scenario).violations == []


@pytest.mark.parametrize("prefix", [1, 2, 3])
def test_the_client_may_use_any_prefix_of_a_chunk(monkeypatch, prefix):
    flags = ["--replan-steps", str(prefix), "--num-envs", "5"]
    finished = examine_client(monkeypatch, "basic", *flags, prefix=prefix)
    assert finished.violations == []
    assert finished.reused > 0


@pytest.mark.parametrize("bug", ref_client.BUGS)
def test_the_bug_of_the_client_shows(monkeypatch, bug):
    finished = examine_client(monkeypatch, CLIENT_BUG_SHOWS_IN[bug], bug=bug)
    assert finished.violations, f"{bug} was not seen"


# --- the server before raw frames ---------------------------------------------------------------


class Peer:
    """A raw client of the reference server: every message can be spoilt."""

    def __init__(self, ws):
        self.ws = ws

    async def receive(self):
        return ref_server.decode(await asyncio.wait_for(self.ws.recv(), 5))

    async def hello(self):
        message = await self.receive()
        assert message["message_type"] == "metadata"
        return message["data"]

    async def send(self, message):
        await self.ws.send(
            message if isinstance(message, (str, bytes)) else ref_server.encode(message)
        )

    async def infer(self, envs, **changes):
        await self.send(infer(envs, **changes))

    async def act(self, envs, **changes):
        await self.infer(envs, **changes)
        message = await self.receive()
        assert message["message_type"] == "action"
        return message["data"]

    async def feedback(self, envs, **changes):
        await self.send(feedback(envs, **changes))

    async def close(self):
        """Wait for the server to close; return (code, reason), or what came instead."""
        try:
            return await asyncio.wait_for(self.ws.recv(), 1)
        except ConnectionClosed as closed:
            return (closed.rcvd.code, closed.rcvd.reason) if closed.rcvd else None
        except TimeoutError:
            return "open"


def obs(n, t=0.0):
    states = {"t": np.full((n, 1), t), "x": np.zeros((n, 2), np.float32)}
    images = {"cam": np.zeros((n, 2, 3, 3), np.uint8)}
    return {"images": images, "states": states, "text": np.array(["go"] * n, np.str_)}


def head(kind, envs):
    zeros = np.zeros(len(envs), np.int64)
    return {"message_type": kind, "env_indices": np.array(envs, np.int64), "step_ids": zeros}


def infer(envs, *, t=0.0, **changes):
    return {**head("infer", envs), "data": obs(len(envs), t)} | changes


def feedback(envs, *, t=0.0, top=None, **changes):
    m = len(envs)
    no = np.zeros(m, bool)
    data = {"obs": obs(m, t), "rewards": np.ones(m, np.float32), "terminated": no}
    data |= {"truncated": no, "info": {}}
    return {**head("feedback", envs), "data": data | changes} | (top or {})


def raw(dtype, shape, data):
    return {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}


RESYNC = (1001, "plugrl-server-resync")


@contextlib.asynccontextmanager
async def serving(*flags):
    """Run the reference server in this loop; yield its port and a way to connect."""
    server = ref_server.Server(ref_server.parse(["--port", "0", *flags]))
    task = asyncio.create_task(server.run())
    port = await asyncio.wait_for(server.port, 5)

    @contextlib.asynccontextmanager
    async def peer(**kwargs):
        kwargs = {"compression": None, "max_size": None, "proxy": None} | kwargs
        async with connect(f"ws://127.0.0.1:{port}", **kwargs) as ws:
            yield Peer(ws)

    try:
        peer.port = port
        yield peer
    finally:
        server.finish("Server shutdown")
        await task


CHECKS = {}


def check(*flags, bug=None):
    """Register a coroutine (peer factory) -> bool under the bug that it must see."""

    def register(function):
        CHECKS[bug or function.__name__.replace("_", "-")] = (function, flags)
        return function

    return register


def refuses(bug, message):
    """Register: after the metadata, and an action for envs 0 and 1, this is a protocol error."""

    async def run(peer):
        async with peer() as p:
            await p.hello()
            sent = message()
            if not isinstance(sent, dict) or sent.get("message_type") == "feedback":
                await p.act([0, 1])
            await p.send(sent)
            return await p.close() == RESYNC

    check(bug=bug)(run)


def accepts(bug, message):
    """Register: after the metadata, and an action for envs 0 and 1, this is accepted."""

    async def run(peer):
        async with peer() as p:
            await p.hello()
            sent = message()
            if sent["message_type"] == "feedback":
                await p.act([0, 1])
                await p.send(sent)
                sent = infer([0])
            await p.send(sent)
            try:
                return (await p.receive())["message_type"] == "action"
            except ConnectionClosed:
                return False

    check(bug=bug)(run)


def deep(levels):
    node = {}
    for _ in range(levels):
        node = {"x": node}
    return node


STATES = {"t": np.zeros((2, 1)), "x": np.zeros((2, 2))}
refuses(
    "object-dtype",
    lambda: infer([0], data=obs(1) | {"states": {"t": raw("|O", [1, 1], b"01234567")}}),
)
refuses(
    "extra-bytes", lambda: infer([0], data=obs(1) | {"states": {"t": raw("<f8", [1, 1], bytes(9))}})
)
refuses("huge-shape", lambda: feedback([0], info={"x": raw("<f8", [0, 2**40], b"")}))
refuses("deep-tree", lambda: feedback([0], info=deep(100)))
refuses("duplicate-indices", lambda: infer([1, 1]))
refuses("negative-index", lambda: infer([0, -1]))
refuses("empty-message", lambda: infer([]))
refuses("wrong-length", lambda: infer([0, 1], data=obs(3)))
refuses("feedback-without-action", lambda: feedback([0, 2]))
refuses("text-ignored", lambda: "hello")
refuses("garbage-1011", lambda: b"\xc1\xff")
refuses("resync-reason", lambda: b"\x93\x01\x02\x03")
refuses("int-rewards", lambda: feedback([0, 1], rewards=np.ones(2, np.int64)))
refuses("nan-reward", lambda: feedback([0, 1], rewards=np.array([1, np.nan], np.float32)))
refuses("unsplittable-info", lambda: feedback([0, 1], info={"note": np.zeros(3), "s": "x"}))
refuses("reuse-before-feedback", lambda: infer([0], reuse=np.ones(1, bool), data=obs(0)))
refuses("steps-out-of-range", lambda: feedback([0, 1], top={"steps": np.array([1, 5])}))
accepts(
    "int-states-refused",
    lambda: infer([0, 1], data=obs(2) | {"states": {"t": np.ones((2, 1), int)}}),
)
accepts(
    "big-endian-refused",
    lambda: infer([0, 1], data=obs(2) | {"states": {"t": np.ones((2, 1), ">f4")}}),
)
accepts("text-list-refused", lambda: infer([0, 1], data=obs(2) | {"text": ["a", "b"]}))
accepts("float64-rewards-refused", lambda: feedback([0, 1], rewards=np.ones(2)))
accepts("feedback-set-must-match", lambda: feedback([1]))


@check()
async def metadata_twice(peer):
    async with peer() as p:
        await p.hello()
        await p.infer([0])
        return (await p.receive())["message_type"] == "action"


@check()
async def metadata_never(peer):
    async with peer() as p:
        try:
            return bool(await asyncio.wait_for(p.ws.recv(), 1))
        except TimeoutError:
            return False


@check()
async def metadata_zeros(peer):
    async with peer() as p:
        return (await p.hello()).get("action_dim", 1) > 0


@check()
async def deflate(peer):
    async with peer(compression="deflate") as p:
        return p.ws.protocol.extensions == []


@check()
async def healthz_missing(peer):
    def get():
        with urllib.request.urlopen(f"http://127.0.0.1:{peer.port}/healthz", timeout=5) as reply:
            return reply.status

    try:
        return await asyncio.to_thread(get) == 200
    except urllib.error.HTTPError as error:
        error.close()
        return False


@check("--api-key", "right")
async def api_key_ignored(peer):
    async with peer(additional_headers={"Authorization": "Api-Key right"}) as p:
        await p.hello()
    for headers in ({}, {"Authorization": "Api-Key wrong"}, {"Authorization": "Bearer right"}):
        try:
            async with peer(additional_headers=headers):
                return False
        except InvalidStatus as refused:
            if refused.response.status_code != 401:
                return False
    return True


@check("--max-message-mb", "1")
async def cap_ignored(peer):
    async with peer() as p, peer() as other:
        await p.hello()
        await p.send(bytes(2**21))
        await other.hello()
        alive = (await other.act([0]))["env_ids"].tolist() == [0]
        return alive and await p.close() == (1009, "message over 1 MiB")


@check("--infer-seconds", "1")
async def ping_blocked(peer):
    """From another thread, for a blocked loop would hold up an in-loop client too."""

    def pings():
        with connect_sync(f"ws://127.0.0.1:{peer.port}", compression=None, proxy=None) as ws:
            ws.recv()
            ws.send(ref_server.encode(infer([0])))
            first = ws.ping().wait(0.6)  # may travel with the infer; the second cannot
            return first and ws.ping().wait(0.6)

    return await asyncio.to_thread(pings)


@check("--probe", "--action-horizon", "3", "--action-dim", "2")
async def action_batch_major(peer):
    async with peer() as p:
        await p.hello()
        return (await p.act([0, 1, 2, 3]))["action"].shape == (3, 4, 2)


@check()
async def env_ids_reordered(peer):
    async with peer() as p:
        await p.hello()
        return (await p.act([4, 0, 2]))["env_ids"].tolist() == [4, 0, 2]


@check("--probe", "--action-horizon", "2", "--action-dim", "2")
async def action_by_position(peer):
    async with peer() as p:
        await p.hello()
        action = (await p.act([4, 2]))["action"]
        return action.tolist() == [[[40, 41], [20, 21]], [[10040, 10041], [10020, 10021]]]


@check()
async def feedback_answered(peer):
    async with peer() as p:
        await p.hello()
        for _ in range(3):
            await p.infer([0])
            if (await p.receive())["message_type"] != "action":
                return False
            await p.feedback([0])
        return True


@check()
async def two_infers(peer):
    async with peer() as p:
        await p.hello()
        await p.act([0])
        await p.infer([1])
        return await p.close() == RESYNC


@check()
async def garbage_kills_server(peer):
    async with peer() as p, peer() as other:
        await other.hello()
        await p.send(b"\xc1")
        await p.hello()
        closed = await p.close() == RESYNC
        try:
            return closed and bool(await other.act([0]))
        except ConnectionClosed:
            return False


@check("--rounds", "1")
async def stop_reason(peer):
    async with peer() as p, peer() as other:
        await p.hello()
        await other.hello()
        await p.act([0])
        await p.feedback([0])
        expected = (1001, "plugrl-server-stop")
        return await p.close() == expected and await other.close() == expected


@check("--feedback-timeout", "0.2")
async def timeout_reason(peer):
    async with peer() as p:
        await p.hello()
        await p.act([0])
        return await p.close() == (1001, "Feedback timeout")


@check()
async def state_survives(peer):
    async with peer() as p:
        await p.hello()
        await p.act([0, 1])
    async with peer() as p:
        await p.hello()
        await p.act([0])
        await p.feedback([0, 1])
        return await p.close() == RESYNC


@check()
async def reuse_after_done(peer):
    async with peer() as p:
        await p.hello()
        await p.act([0, 1])
        await p.feedback([0, 1], truncated=np.array([False, True]))
        await p.infer([0, 1], reuse=np.array([True, True]), data=obs(0))
        return await p.close() == RESYNC


@check("--echo", "t")
async def feedback_by_position(peer):
    """Reused rows are those envs' last: 1 was told t=7, 0 t=5; 2 is fresh, at t=9."""
    async with peer() as p:
        await p.hello()
        first = (await p.act([0, 1], t=3.0))["action"][:, :, 0].tolist()
        await p.feedback([1], t=7.0)
        await p.act([2], t=1.0)
        await p.feedback([0, 2], t=5.0)
        await p.infer([1, 2, 0], reuse=np.array([True, False, True]), data=obs(1, 9.0))
        try:
            last = (await p.receive())["data"]["action"][:, :, 0].tolist()
        except ConnectionClosed:
            return False
        return first == [[3, 3]] * 4 and last == [[7, 9, 5]] * 4


def run_check(monkeypatch, name, bug):
    function, flags = CHECKS[name]
    monkeypatch.setattr(ref_server, "BUG", bug)

    async def run():
        async with serving(*flags) as peer:
            return await function(peer)

    return asyncio.run(run())


@pytest.mark.parametrize("name", ref_server.BUGS)
def test_the_server_keeps_the_clause_and_its_bug_breaks_it(monkeypatch, name):
    assert run_check(monkeypatch, name, bug=""), "the sound server broke the clause"
    assert not run_check(monkeypatch, name, bug=name), "the bug was not seen"


def test_observations_that_are_not_finite_are_counted_and_named(capsys):
    async def run():
        async with serving() as peer, peer() as p:
            await p.hello()
            bad = obs(2)
            bad["states"]["t"][1] = np.nan
            bad["states"]["x"][1, 0] = np.inf
            await p.act([0, 1], data=bad)
            await p.feedback([0, 1], obs=bad)
            await p.act([0])

    asyncio.run(run())
    output = capsys.readouterr().out
    assert "not finite: states/t\nnot finite: states/x\n" in output
    assert "server/nonfinite_observations 2" in output


@pytest.mark.parametrize(
    "dtype",
    ["|V8", "<c16", "|S8", "<m8[s]", "<M8[s]", "<f4,<f4", "O", "f8", "<f16", "<U99999999", ""],
)
def test_no_other_dtype_is_decoded(dtype):
    frame = ref_server.encode({"x": raw(dtype, [1, 1], bytes(8))})
    with pytest.raises(ref_server.MalformedError):
        ref_server.decode(frame)


def test_random_frames_are_refused_with_the_one_error():
    """Truncate, extend and flip sound frames 3,000 times; nothing but MalformedError comes out."""
    random = np.random.default_rng(0)
    sound = [ref_server.encode(m) for m in (infer([0, 1]), feedback([0, 1]))]
    refused = 0
    for trial in range(3000):
        frame = bytearray(sound[trial % 2])
        for at in random.integers(len(frame), size=random.integers(1, 4)):
            frame[at] = random.integers(256)
        session = ref_server.Session(ref_server.parse([]))
        if trial % 2:
            session.infer(infer([0, 1]))
        try:
            message = session.receive(
                bytes(frame[: random.integers(len(frame) // 2, len(frame) + 1)])
            )
            session.feedback(message) if trial % 2 else session.infer(message)
        except ref_server.MalformedError:
            refused += 1
    assert refused > 1500


def test_random_frames_end_the_client_with_the_one_error():
    """Spoil an action and metadata 3,000 times: a value or ProtocolError, nothing else."""

    class Socket:
        def recv(self, timeout=None):
            return bytes(frame)

    random = np.random.default_rng(1)
    action = {"env_ids": np.arange(2), "action": np.ones((4, 2, 3), np.float32)}
    metadata = {"features": ["reuse-feedback-obs"], "action_dim": 3}
    sound = [("action", action), ("metadata", metadata)]
    refused = 0
    for trial in range(3000):
        kind, data = sound[trial % 2]
        frame = bytearray(ref_server.encode({"message_type": kind, "data": data}))
        for at in random.integers(len(frame), size=random.integers(1, 4)):
            frame[at] = random.integers(256)
        rollout = ref_client.Rollout(ref_client.parse([]), ref_client.ProbeEnvs(2), [None, None])
        try:
            data = ref_client.receive(Socket(), kind)
            if kind == "metadata":
                rollout.read_metadata(data)
        except ref_client.ProtocolError:
            refused += 1
    assert 1000 < refused < 3000
