"""The C++ client builds without warnings, keeps the protocol, and runs Gymnasium's Pendulum."""

import asyncio
import base64
import contextlib
import hashlib
import importlib
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
WIRE, CPP = EXAMPLES / "wire", EXAMPLES / "cpp"
COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "clang++", "c++")), None)
CHECKER = shutil.which("plugrl-conformance", path=str(Path(sys.executable).parent))

pytestmark = [
    pytest.mark.skipif(os.name != "posix", reason="the C++ client needs POSIX sockets"),
    pytest.mark.skipif(not COMPILER, reason="no C++ compiler: g++, clang++ or c++"),
    pytest.mark.skipif(not shutil.which("make"), reason="no make"),
]


def load(name):
    """Import an example by its name; they are scripts, not packages."""
    sys.path.insert(0, str(WIRE))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(WIRE))


ref_server, exam = load("ref_server"), load("exam")


def build(folder, flags):
    command = ["make", "-C", str(CPP), f"CXX={COMPILER}", f"BUILD={folder}", f"CXXFLAGS={flags}"]
    done = subprocess.run([*command, "-j2"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The programs, built once without optimisation, for speed of building."""
    return build(tmp_path_factory.mktemp("cpp"), "-O0")


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory):
    """The programs with address and undefined-behaviour sanitizers, any finding fatal."""
    flags = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    return build(tmp_path_factory.mktemp("cpp-sanitized"), flags)


def mutated_frames(count):
    """Return frames spoilt at random, each with its length before it."""
    random = np.random.default_rng(0)
    action = np.ones((4, 2, 3), np.float32)
    data = {"env_ids": np.arange(2), "action": action, "more": {"x": [1, -2.5, None, "y" * 40]}}
    sound = ref_server.encode({"message_type": "action", "data": data})
    out = []
    for _ in range(count):
        frame = bytearray(sound)
        for at in random.integers(len(frame), size=random.integers(0, 4)):
            frame[at] = random.integers(256)
        frame = frame[: random.integers(len(frame) // 2, 2 * len(frame))]
        out.append(struct.pack(">I", len(frame)) + bytes(frame))
    return b"".join(out)


def selftest(folder, path):
    path.write_bytes(mutated_frames(5000))
    done = subprocess.run([folder / "selftest", path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    decoded, refused = (int(word) for word in done.stdout.split() if word.isdigit())
    assert decoded + refused == 5000
    assert min(decoded, refused) > 500


def test_digests_numbers_and_lying_frames_pass_the_self_test(programs, tmp_path):
    selftest(programs, tmp_path / "frames")


def examine(folder, scenario, *flags, prefix=4):
    address = ["--host", "{host}", "--port", "{port}", "--api-key", exam.KEY]
    client = exam.command(str(folder / "probe"), *address, "--reconnect-limit", "5", *flags)
    return asyncio.run(exam.examine(scenario, client, prefix=prefix))


@pytest.mark.parametrize("scenario", exam.SCENARIOS)
def test_the_probe_passes_the_scenario(programs, scenario):
    assert examine(programs, scenario).violations == []


def test_the_probe_uses_a_prefix_and_reuses_observations(programs):
    finished = examine(programs, "basic", "--replan-steps", "2", "--num-envs", "7", prefix=2)
    assert finished.violations == []
    assert finished.reused > 0


def test_features_can_be_left_unused(programs):
    finished = examine(programs, "basic", "--no-reuse", "--no-chunk-steps")
    assert finished.violations == []
    assert finished.reused == 0


def test_a_client_without_a_key_or_a_server_exits_non_zero(programs):
    command = [programs / "probe", "--reconnect-limit", "1", "--port"]
    assert subprocess.run([*command, "1"], capture_output=True, timeout=30).returncode == 3
    assert subprocess.run([*command, "x"], capture_output=True, timeout=30).returncode == 2

    async def client(host, port):
        process = await asyncio.create_subprocess_exec(
            *map(str, [*command, port]), stderr=subprocess.DEVNULL
        )
        return await process.wait()

    finished = asyncio.run(exam.examine("key", client))
    assert "exit 1, expected 0" in finished.violations
    assert len(finished.arrivals) == 1


def test_the_key_may_stand_in_the_environment_as_it_does_for_the_python_client(
    programs, monkeypatch
):
    monkeypatch.setenv("PLUGRL_API_KEY", exam.KEY)
    client = exam.command(str(programs / "probe"), "--host", "{host}", "--port", "{port}")
    assert asyncio.run(exam.examine("key", client)).violations == []


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--port", "70000", "from 1 to 65535"),
        ("--num-envs", "0", "from 1 to 65536"),
        ("--num-envs", "99999999999999999999", "from 1 to 65536"),
        ("--episodes", "-3", "from 0 to 18446744073709551615"),
        ("--seed", "1e3", "from 0 to"),
        ("--replan-steps", "", "from 0 to"),
        ("--reconnect-limit", "4294967296", "from 0 to 1000000000"),
    ],
)
def test_a_number_that_cannot_be_meant_is_named_with_its_bounds(programs, flag, value, expected):
    done = subprocess.run(
        [programs / "probe", flag, value], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"{flag} is '{value}'; expected a whole number {expected}")


def test_the_dynamics_are_gymnasiums_pendulum(programs, tmp_path):
    """Same state and 400 torques, some beyond the limits: 1e-9 in angle, speed and reward."""
    random = np.random.default_rng(3)
    env = gymnasium.make("Pendulum-v1").unwrapped
    env.reset(seed=0)
    env.state = np.array([random.uniform(-9, 9), random.uniform(-1, 1)])
    torques = random.uniform(-3, 3, 400) * np.repeat(random.choice([0.1, 1], 40), 10)
    path = tmp_path / "replay"
    path.write_text("\n".join(repr(float(x)) for x in (*env.state, *torques)))
    done = subprocess.run([programs / "pendulum", "--replay", path], capture_output=True, text=True)
    ours = np.array([line.split() for line in done.stdout.splitlines()], float)
    theirs = []
    for torque in torques:
        reward = env.step(np.array([torque]))[1]
        theirs.append([*env.state, reward])
    assert ours.shape == (400, 3)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)
    env.close()


def run_pendulum(monkeypatch, folder, *flags, server=()):
    """Run the pendulum against the reference server; return (exit code, output, exchanges).

    An exchange is (env, observation rows before it, its action chunk [H, 1], its feedback row).
    """
    seen = []

    class Recorder(ref_server.Session):
        def infer(self, message):
            reply = super().infer(message)
            data = ref_server.decode(reply)["data"]
            seen.append(("action", data["env_ids"], data["action"], message))
            return reply

        def feedback(self, message):
            seen.append(("feedback", message["env_indices"], message["data"], message))
            return super().feedback(message)

    monkeypatch.setattr(ref_server, "Session", Recorder)

    async def run():
        options = ref_server.parse(["--port", "0", "--action-dim", "1", "--seed", "0", *server])
        served = ref_server.Server(options)
        task = asyncio.create_task(served.run())
        command = [str(folder / "pendulum"), "--port", str(await served.port), *flags]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        output, errors = await asyncio.wait_for(process.communicate(), 60)
        served.finish("Server shutdown")
        await task
        return process.returncode, (output + errors).decode()

    return *asyncio.run(run()), seen


def test_pendulum_episodes_are_gymnasiums_to_the_end(monkeypatch, capsys, programs):
    """Replay what the server sent in Gymnasium: same observations, sums of rewards, truncations."""
    flags = ["--episodes", "3", "--num-envs", "2", "--seed", "5", "--no-reuse"]
    server = ["--action-horizon", "7"]
    code, output, seen = run_pendulum(monkeypatch, programs, *flags, server=server)
    assert code == 0, output
    assert "malformed" not in capsys.readouterr().out
    envs = {i: gymnasium.make("Pendulum-v1").unwrapped for i in (0, 1)}
    begun, held, ends, steps = set(), {}, [], dict.fromkeys(envs, 0)
    for kind, ids, what, message in seen:
        for row, i in enumerate(ids.tolist()):
            if kind == "action":
                x, y, speed = message["data"]["states"]["obs"][row].astype(float)
                if i not in begun:
                    envs[i].reset(seed=0)
                    envs[i].state = np.array([np.arctan2(y, x), speed])
                    assert abs(speed) <= 1
                    begun.add(i)
                held[i] = what[:, row, 0]
                continue
            ran = int(message["steps"][row])
            total = sum(envs[i].step(np.array([u], float))[1] for u in held[i][:ran])
            steps[i] += ran
            assert what["rewards"][row] == pytest.approx(total, abs=1e-3 * ran)
            expected = envs[i]._get_obs()
            np.testing.assert_allclose(what["obs"]["states"]["obs"][row], expected, atol=1e-3)
            assert not what["terminated"][row]
            assert what["truncated"][row] == (steps[i] == 200)
            if what["truncated"][row]:
                assert what["info"]["episode"]["l"][row] == 200
                ends.append(float(what["info"]["episode"]["r"][row]))
                steps[i] = 0
                begun.discard(i)
    assert len(ends) == 4  # both envs end on the same step
    assert f"4 episodes, mean return {np.mean(ends):.4g}" in output
    for env in envs.values():
        env.close()


def test_pendulum_refuses_a_policy_of_another_width(monkeypatch, programs):
    code, output, _ = run_pendulum(monkeypatch, programs, server=["--action-dim", "2"])
    assert code == 1
    assert "takes one torque" in output


# --- frames made by hand, below what any WebSocket library would send -----------------------------


def frame(opcode, payload=b"", *, final=True, bits=0, masked=False, length=None):
    """Return a server's frame, possibly against RFC 6455."""
    size = len(payload) if length is None else length
    head = bytes([(0x80 if final else 0) | bits | opcode])
    if size < 126:
        head += bytes([size | (0x80 if masked else 0)])
    else:
        head += bytes([127]) + struct.pack(">Q", size)
    return head + (bytes(4) if masked else b"") + payload


async def read_client_frame(reader):
    """Return (opcode, payload) of a client's frame, which must be masked."""
    first, second = await reader.readexactly(2)
    assert second & 0x80, "the client sent an unmasked frame"
    size = second & 0x7F
    if size > 125:
        wide = await reader.readexactly(2 if size == 126 else 8)
        size = int.from_bytes(wide, "big")
    mask = await reader.readexactly(4)
    payload = await reader.readexactly(size)
    return first & 0x0F, bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))


def serve_by_hand(folder, script, *flags, accept=None):
    """Run the probe against a TCP server; script(reader, writer) follows the handshake.

    Returns (exit code, what the script returned on the last connection).
    """
    results = []

    async def handle(reader, writer):
        request = (await reader.readuntil(b"\r\n\r\n")).decode()
        key = re.search(r"Sec-WebSocket-Key: (\S+)", request)[1]
        guid = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        digest = base64.b64encode(hashlib.sha1((key + guid).encode()).digest()).decode()
        head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        writer.write(f"{head}sec-websocket-ACCEPT:  {accept or digest} \r\n\r\n".encode())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            results.append(await script(reader, writer))
        writer.close()

    async def run():
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        command = [str(folder / "probe"), "--port", str(port), "--reconnect-limit", "1", *flags]
        process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.DEVNULL)
        code = await asyncio.wait_for(process.wait(), 30)
        server.close()
        await server.wait_closed()
        return code

    return asyncio.run(run()), results


METADATA = ref_server.encode({"message_type": "metadata", "data": {}})


def test_fragments_pings_and_dribbled_bytes_are_understood(programs):
    async def script(reader, writer):
        stream = frame(2, METADATA[:5], final=False) + frame(9, b"still there?")
        stream += frame(0, METADATA[5:9], final=False) + frame(0xA, b"unasked") + frame(0)
        for byte in stream.replace(frame(0), frame(0, METADATA[9:])):
            writer.write(bytes([byte]))
            await writer.drain()
        pong = await read_client_frame(reader)
        _, infer = await read_client_frame(reader)
        writer.write(frame(8, struct.pack(">H", 1001) + b"plugrl-server-stop"))
        return pong, ref_server.decode(infer)["message_type"], await read_client_frame(reader)

    code, [result] = serve_by_hand(programs, script)
    assert code == 0
    assert result == ((0xA, b"still there?"), "infer", (8, struct.pack(">H", 1001)))


@pytest.mark.parametrize(
    "bad",
    [
        frame(2, METADATA, masked=True),
        frame(2, METADATA, bits=0x40),
        frame(3, METADATA),
        frame(0, METADATA),
        frame(2, METADATA[:3], final=False) + frame(2, METADATA[3:]),
        frame(9, b"", final=False),
        frame(9, bytes(126)),
        frame(2, b"", length=2**63),
    ],
)
def test_frames_against_the_rfc_end_with_1002_and_exit_code_one(programs, bad):
    async def script(reader, writer):
        writer.write(bad)
        return await read_client_frame(reader)

    code, results = serve_by_hand(programs, script)
    assert code == 1
    assert results == [(8, struct.pack(">H", 1002))]


def test_a_frame_that_claims_an_exabyte_costs_nothing_and_counts_as_a_loss(programs):
    async def script(reader, writer):
        writer.write(frame(2, b"x" * 1000, length=2**60))

    code, results = serve_by_hand(programs, script)
    assert code == 3
    assert len(results) == 2


def test_a_wrong_accept_key_is_no_server(programs):
    async def script(reader, writer):
        return await reader.read()

    code, results = serve_by_hand(programs, script, accept="c2VydmVyIG9mIGFub3RoZXIga2luZA==")
    assert code == 3
    assert results == [b"", b""]


@pytest.mark.parametrize(
    "payload",
    [
        b"\xc1",
        b"",
        b"\x90",
        METADATA + b"\0",
        METADATA[:-1],
        ref_server.encode({"message_type": "metadata", "data": [1]}),
        ref_server.encode({"message_type": "action", "data": {}}),
    ],
)
def test_a_malformed_message_is_reported_not_retried(programs, payload):
    async def script(reader, writer):
        writer.write(frame(2, payload))
        return await read_client_frame(reader)

    code, results = serve_by_hand(programs, script)
    assert code == 1
    assert results == [(8, struct.pack(">H", 1002))]


@pytest.mark.parametrize(
    "bug", ["metadata-twice", "env-ids-reordered", "feedback-answered", "action-batch-major"]
)
def test_a_server_that_breaks_the_protocol_is_reported(monkeypatch, programs, bug):
    monkeypatch.setattr(ref_server, "BUG", bug)
    server = ["--action-horizon", "3"]
    code, output, _ = run_pendulum(monkeypatch, programs, "--num-envs", "2", server=server)
    assert code == 1
    assert "giving up: " in output


@pytest.mark.slow
@pytest.mark.skipif(not CHECKER, reason="plugrl-conformance is not installed")
def test_the_packaged_checker_passes_the_probe(programs):
    client = f"{programs / 'probe'} --host {{host}} --port {{port}} --episodes 300"
    command = [CHECKER, "--probe", "--scenario=all", "--port=0", "--client", client]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout
    assert "FAIL" not in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nothing_is_found_by_the_sanitizers(monkeypatch, sanitized, tmp_path):
    selftest(sanitized, tmp_path / "frames")
    for scenario in exam.SCENARIOS:
        assert examine(sanitized, scenario).violations == [], scenario
    assert run_pendulum(monkeypatch, sanitized, "--episodes", "4")[0] == 0
