"""Mutated frames: nothing crashes, nothing hangs, memory stays flat, neighbours go on."""

import contextlib
import gc
import random
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from plugrl_protocol.client_session import ClientSession
from plugrl_protocol.codec import encode
from plugrl_protocol.endpoint import EndpointConfig
from plugrl_protocol.env_client import EnvClient
from plugrl_protocol.errors import ProtocolError
from plugrl_protocol.links import ServerOptions
from plugrl_protocol.messages import Action, Feedback, Infer, make_metadata, make_observation
from plugrl_protocol.server_session import ServerSession
from plugrl_protocol.shortcuts import Reader
from plugrl_protocol.testing import NotingApplication, ProbeEnv, play, serve_in_thread


def observation(n):
    return make_observation(
        num_envs=n,
        images={"cam": np.arange(n * 48, dtype=np.uint8).reshape(n, 4, 4, 3)},
        states={"s": np.ones((n, 3), np.float32), "q": np.ones((n, 2), np.float64)},
        text=["pick", "place"][:n],
    )


def frames():
    """Honest frames of both directions, to be spoiled."""
    ids = np.array([0, 1])
    infer = Infer(env_indices=ids, step_ids=ids, observation=observation(2))
    none = observation(2).rows(slice(0, 0))
    reusing = Infer(env_indices=ids, step_ids=ids, observation=none, reuse=np.array([True, True]))
    feedback = Feedback(
        env_indices=ids, step_ids=ids, observation=observation(2), steps=np.array([1, 2]),
        rewards=np.ones(2, np.float32), terminated=np.array([True, False]),
        truncated=np.array([False, False]),
        info={"episode": {"r": np.ones(2), "l": np.ones(2, np.int64)}, "note": "x"},
    )  # fmt: skip
    action = Action(env_ids=ids, action=np.zeros((3, 2, 4)))
    messages = [infer, reusing, feedback, action, make_metadata(policy="P", action_dim=4)]
    return [encode(message.to_wire()) for message in messages]


HONEST = frames()
_IDS = np.array([0, 1])
# The envs go on, and the client leaves their observations out.
NO_DONE = encode(
    Feedback(
        env_indices=_IDS, step_ids=_IDS, observation=observation(2), steps=np.array([1, 2]),
        rewards=np.ones(2, np.float32), terminated=np.array([False, False]),
        truncated=np.array([False, False]),
    ).to_wire()
)  # fmt: skip
FLAGS_DOWN = encode(
    Infer(
        env_indices=_IDS, step_ids=_IDS, observation=observation(2),
        reuse=np.array([False, False]),
    ).to_wire()
)  # fmt: skip
MARKS = [b"\xc4", b"\xc6\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x84", b"|O", b"<f8", b"\x81"]


def mutate(rng):
    """Spoil an honest frame in one to six places."""
    frame = bytearray(rng.choice(HONEST))
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(frame) + 1)
        kind = rng.randrange(6)
        if kind == 0 and at < len(frame):
            frame[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            frame[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 2:
            del frame[at : at + rng.randint(1, 16)]
        elif kind == 3:
            frame[at : at + 4] = rng.choice(MARKS)
        elif kind == 4:
            other = rng.choice(HONEST)
            frame[at:] = other[rng.randrange(len(other)) :]
        elif at < len(frame):
            frame[at] = rng.choice([0, 0x7F, 0x80, 0xC0, 0xC1, 0xFF])
    return bytes(frame)


def server_in(state):
    """A server session in one of its states."""
    session = ServerSession()
    session.open()
    if state > 0:
        session.receive(HONEST[0])
    if state > 1:
        session.answer(np.zeros((3, 2, 4)), 0.0)
    if state > 2:
        session.receive(HONEST[2])
    return session


def client_in(state):
    """A client session in one of its states."""
    session = ClientSession()
    if state > 0:
        session.receive(HONEST[4])
    if state > 1:
        ids = np.array([0, 1])
        session.infer(Infer(env_indices=ids, step_ids=ids, observation=observation(2)))
    return session


def feed(session, frame):
    """Give a frame to a session; only a protocol error may come of it."""
    with contextlib.suppress(ProtocolError):
        session.receive(frame)


def test_ten_thousand_mutated_frames_leave_no_trace():
    rng = random.Random(0)
    makers = [lambda s=s: server_in(s) for s in range(4)] + [
        lambda s=s: client_in(s) for s in range(3)
    ]

    def volley(count):
        slowest = 0.0
        for number in range(count):
            session = makers[number % len(makers)]()
            begin = time.perf_counter()
            feed(session, mutate(rng))
            slowest = max(slowest, time.perf_counter() - begin)
        return slowest

    volley(200)
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    slowest = volley(2_000)
    gc.collect()
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    slowest = max(slowest, volley(8_000))

    assert after - before < 200_000, "flat"
    assert peak - before < 20_000_000, "no frame of a kilobyte costs megabytes"
    assert slowest < 1.0


def forget_forms(session):
    """Make a session read the next frame as if it had seen none."""
    reader = session._reader
    session._reader = Reader(reader._decoder._limits, reader._parsers, reader._check_turn)


def experienced_server(state):
    """A server session that has seen several frames of each form, in one of its states."""
    session = ServerSession()
    session.open()
    for infer in (HONEST[0],) * 3 + (FLAGS_DOWN,) * 3:
        session.receive(infer)
        session.answer(np.zeros((3, 2, 4)), 0.0)
        session.receive(HONEST[2] if infer is HONEST[0] else NO_DONE)
    if state > 0:
        session.receive(HONEST[0])
    if state > 1:
        session.answer(np.zeros((3, 2, 4)), 0.0)
    return session


def experienced_client(_):
    """A client session that has seen several actions and waits for one."""
    session = client_in(1)
    ids = np.array([0, 1])
    request = Infer(env_indices=ids, step_ids=ids, observation=observation(2))
    report = Feedback(
        env_indices=ids, step_ids=ids, observation=observation(2), rewards=np.ones(2, np.float32),
        terminated=np.array([True, True]), truncated=np.array([False, False]),
    )  # fmt: skip
    for _ in range(3):
        session.infer(request)
        session.receive(HONEST[3])
        session.feedback(report)
    session.infer(request)
    return session


def outcome(session, frame):
    """Tell what a session made of a frame, and where it stands."""
    try:
        message = session.receive(frame)
    except ProtocolError as error:
        return type(error), str(error), session.state
    return encode(message.to_wire()), session.state


def mutate_in_place(rng, frame):
    """Change bytes and keep the length: most such frames still look like an earlier one."""
    spoiled = bytearray(frame)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(spoiled))
        spoiled[at] = rng.choice([0, 1, 2, 0x7F, 0x80, 0xFF, spoiled[at] ^ 1, spoiled[at] ^ 0x40])
    return bytes(spoiled)


@pytest.mark.parametrize(
    "count", [400, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_what_a_session_has_seen_changes_no_outcome(count):
    """Frames that look like earlier ones are read a shorter way: to the same end, in all."""
    rng = random.Random(5)
    cases = [
        (experienced_server, 0, HONEST[0]),
        (experienced_server, 1, HONEST[0]),
        (experienced_server, 2, HONEST[2]),
        (experienced_client, 0, HONEST[3]),
    ]
    taken = 0
    for number in range(count):
        make, state, honest = cases[number % len(cases)]
        frame = mutate_in_place(rng, honest) if number % 8 < 6 else mutate(rng)
        session, stranger = make(state), make(state)
        forget_forms(stranger)
        found = outcome(session, frame)
        assert found == outcome(stranger, frame)
        taken += len(found) == 2
    assert 0.03 * count < taken < 0.9 * count


@given(st.sampled_from(range(4)), st.randoms(use_true_random=False))
@settings(deadline=5000, max_examples=150)
def test_a_mutated_frame_is_taken_or_refused(state, rng):
    feed(server_in(state), mutate(rng))


@given(st.sampled_from(range(3)), st.randoms(use_true_random=False))
@settings(deadline=5000, max_examples=100)
def test_a_mutated_frame_from_a_server_is_taken_or_refused(state, rng):
    feed(client_in(state), mutate(rng))


def resident_bytes():
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def bombard(url, rng, count):
    """Send mutated frames over sockets, a new connection whenever one is closed."""
    sent = 0
    while sent < count:
        with (
            contextlib.suppress(ConnectionClosed),
            connect(url, compression=None, close_timeout=1) as client,
        ):
            client.recv()
            while sent < count:
                sent += 1
                client.send(mutate(rng))
                with contextlib.suppress(TimeoutError):
                    client.recv(timeout=0.002)


@pytest.mark.parametrize(
    "count", [200, pytest.param(10_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_an_honest_client_beside_a_hostile_one_is_unharmed(library, count, caplog):
    caplog.set_level("CRITICAL", "plugrl_protocol")
    app = NotingApplication(act=lambda request: np.zeros((3, len(request.env_indices), 4)))
    listening = ServerOptions(max_message_mb=1.0, close_timeout_s=0.5)
    done = threading.Event()
    results = []

    def honest(url):
        while not done.is_set():
            with EnvClient(url, library=library) as client:
                results.append(play(client, ProbeEnv(2, action_dim=4), episodes=40))
            for notes in (app.requests, app.reports, app.closes, app.clients):
                notes.clear()

    config = EndpointConfig(library=library, listen=listening)
    with serve_in_thread(app, config=config) as server:
        neighbour = threading.Thread(target=honest, args=(server.url,))
        neighbour.start()
        try:
            rng = random.Random(1)
            bombard(server.url, rng, count // 4)
            gc.collect()
            before = resident_bytes()
            bombard(server.url, rng, count - count // 4)
            gc.collect()
            grown = resident_bytes() - before
        finally:
            done.set()
            neighbour.join()

    assert results
    assert sum(result.replaced for result in results) == 0
    assert grown < 40_000_000


@pytest.mark.slow
def test_a_coverage_guided_fuzzer_finds_nothing(tmp_path):
    pytest.importorskip("atheris")
    for number, frame in enumerate(HONEST):
        (tmp_path / f"seed{number}").write_bytes(frame)
    program = Path(__file__).with_name("fuzz_wire_atheris.py")
    done = subprocess.run(
        [sys.executable, program, f"-artifact_prefix={tmp_path}/", "-max_total_time=40",
         "-timeout=2", "-rss_limit_mb=1024", str(tmp_path)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
