"""The training server under faults: garbage, kills, long learn steps, crowds. Short, and full size.

The server is a process of its own where a process is killed; else it runs in this one.
"""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import numpy as np
import pytest
import torch
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from plugrl_protocol.codec import encode
from plugrl_protocol.env_client import EnvClient
from plugrl_protocol.errors import ConnectionReplaced
from plugrl_protocol.messages import Feedback, Infer, make_observation
from plugrl_server.algorithm.dummy import DummyAlgoConfig
from plugrl_server.algorithm.ppo import PPOConfig
from plugrl_server.algorithm.registration import make_algo
from plugrl_server.common.checkpoint_manager import load_checkpoint_from_path
from plugrl_server.policy.dummy import DummyPolicyConfig
from plugrl_server.policy.gaussian import GaussianPolicyConfig
from plugrl_server.policy.registration import make_policy
from plugrl_server.testing import IdentityTask, TaskClient, serve

SIZES = [pytest.param(False, id="short"), pytest.param(True, id="full", marks=pytest.mark.slow)]
full_size = pytest.mark.parametrize("full", SIZES)
patient = pytest.mark.timeout(400)


def ppo(**changes):
    torch.manual_seed(0)
    np.random.seed(0)
    policy = make_policy(
        "gaussian-policy", GaussianPolicyConfig(obs_dim=2, action_dim=2, device="cpu")
    )
    defaults = {"buffer_size": 128, "batch_size": 64, "update_epochs": 2, "train_itrs": 10_000}
    algorithm = make_algo("ppo", policy, config=PPOConfig(**{**defaults, **changes}))
    algorithm.init_optimizers()
    return algorithm


@contextlib.contextmanager
def playing(url):
    """A client that plays in a thread for the duration of the block."""
    client = TaskClient(url, IdentityTask(2, discrete=False))
    over = threading.Event()

    def play():
        while not over.is_set():
            client.play(1)
        client.close()

    thread = threading.Thread(target=play)
    thread.start()
    try:
        yield client
    finally:
        over.set()
        thread.join(30.0)


def frames():
    """An infer and a feedback, as honest clients send them."""
    seen = make_observation(num_envs=2, states={"obs": np.zeros((2, 2), np.float32)})
    ids, zeros, flags = np.arange(2), np.zeros(2, np.int64), np.zeros(2, np.bool_)
    infer = Infer(env_indices=ids, step_ids=zeros, observation=seen)
    feedback = Feedback(
        env_indices=ids,
        step_ids=zeros,
        observation=seen,
        rewards=np.zeros(2, np.float32),
        terminated=flags,
        truncated=flags,
        info={"episode": {"r": np.zeros(2), "l": np.ones(2, np.int64)}},
        steps=np.ones(2, np.int64),
    )
    return encode(infer.to_wire()), encode(feedback.to_wire())


def mutate(frame, rng):
    """Flip, cut, repeat or insert bytes."""
    data = bytearray(frame)
    for _ in range(int(rng.integers(1, 6))):
        at = int(rng.integers(len(data)))
        kind = rng.integers(4)
        if kind == 0:
            data[at] = int(rng.integers(256))
        elif kind == 1:
            del data[at : at + int(rng.integers(1, 20))]
        elif kind == 2:
            data[at:at] = data[at : at + int(rng.integers(1, 40))]
        else:
            data[at:at] = rng.bytes(int(rng.integers(1, 8)))
        data = data or bytearray(b"\x80")
    return bytes(data)


@full_size
@patient
def test_mutated_frames_end_their_connection_and_nobody_elses(full):
    count = 10_000 if full else 250
    rng = np.random.default_rng(0)
    infer, feedback = frames()
    algorithm = ppo()
    with serve(algorithm) as running, playing(running.url) as client:
        closes = {}
        for number in range(count):
            with connect(running.url, compression=None, max_size=None) as link:
                link.recv(10)
                try:
                    if number % 2:
                        link.send(infer)
                        link.recv(10)
                    link.send(mutate(feedback if number % 2 else infer, rng))
                    link.send(infer)
                    link.recv(10)
                    link.recv(0.001)
                except ConnectionClosed as closed:
                    close = closed.rcvd
                    closes[close.code, close.reason[:40]] = closes.get(close.code, 0) + 1
                except TimeoutError:
                    pass
        before = client.frames_sent
        deadline_s = time.monotonic() + 30.0
        while client.frames_sent < before + 20:
            assert time.monotonic() < deadline_s, "the honest client stands still"
            time.sleep(0.01)
        assert client.client.connections == 1
    assert running.server.trainer.error is None
    assert running.server.trainer.version > 0
    assert {code for code, _ in closes} <= {1001, 1008}, closes
    assert all(bool(torch.isfinite(p).all()) for p in algorithm.policy.parameters())


# --- kills ----------------------------------------------------------------------------------------


PLAYER = """
import sys
from plugrl_server.testing import IdentityTask, TaskClient
client = TaskClient(sys.argv[1], IdentityTask(3, discrete=False))
print("playing", flush=True)
client.play()
"""


def test_a_client_killed_in_the_middle_of_a_chunk_harms_nobody():
    with serve(ppo()) as running, playing(running.url) as other:
        command = [sys.executable, "-c", PLAYER, running.url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "playing\n"
            metrics = running.server.trainer.metrics
            wait_for(lambda: metrics.connections == 2)
            wait_for(lambda: metrics.stored_frames > 60)
            process.kill()
        wait_for(lambda: metrics.connections == 1)
        before = other.frames_sent
        wait_for(lambda: other.frames_sent > before + 20)
        assert other.client.connections == 1
    trainer = running.server.trainer
    assert trainer.error is None
    assert trainer.metrics.stored_frames == trainer.algorithm.global_step


def wait_for(condition, timeout_s=30.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


@contextlib.contextmanager
def server_process(folder, *flags, names=None):
    """Run the command line; yield (process, url)."""
    program = pathlib.Path(sys.executable).parent / "plugrl-run-server"
    if names is None:
        names = ["gaussian-policy", "default", "ppo", "default", "--policy.obs-dim", "2"]
        names += ["--policy.action-dim", "2", "--algo.buffer-size", "32"]
        names += ["--algo.save-interval", "1", "--algo.update-epochs", "2"]
    where = ["--checkpoint-base-dir", str(folder), "--exp-name", "a", "--port", "0"]
    command = [program, *names, *where, "--keep", "3", *flags]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
    ) as process:
        try:
            line = next(text for text in process.stderr if "listening on" in text)
            drain = threading.Thread(target=process.stderr.read, daemon=True)
            drain.start()
            yield process, f"ws://{line.split()[-1]}"
        finally:
            process.kill()


def test_a_server_killed_while_it_trains_goes_on_from_its_last_checkpoint(tmp_path):
    run = tmp_path / "ppo" / "gaussian-policy" / "a"
    with server_process(tmp_path) as (process, url):
        client = TaskClient(url, IdentityTask(2, discrete=False))
        client.play(100)
        process.kill()
        process.wait(10)
    client.close()
    saved = load_checkpoint_from_path(run)
    assert 32 <= saved.step <= 200
    assert saved.step % 32 == 0
    end = saved.step + 64
    with server_process(tmp_path, "--resume", "--algo.global-steps", str(end)) as (process, url):
        assert TaskClient(url, IdentityTask(2, discrete=False)).play()
        assert process.wait(30) == 0
    assert load_checkpoint_from_path(run).step == end
    assert len([path for path in run.iterdir() if path.name.isdigit()]) == 3


def test_sigterm_saves_and_ends_with_zero(tmp_path):
    with server_process(tmp_path) as (process, url):
        client = TaskClient(url, IdentityTask(2, discrete=False))
        client.play(10)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    client.close()
    # The last report may have been lost with the connection.
    assert load_checkpoint_from_path(tmp_path / "ppo/gaussian-policy/a").step in (18, 20)


def test_a_second_signal_ends_the_server_in_the_middle_of_a_learn_step(tmp_path):
    names = ["dummy-policy", "default", "dummy", "default", "--policy.action-horizon", "1"]
    slow = ["--algo.fake-learn-freq", "1", "--algo.fake-learn-duration-sec", "60"]
    quick = ["--algo.fake-inference-duration-sec", "0", "--policy.action-dim", "2"]
    with server_process(tmp_path, names=[*names, *slow, *quick]) as (process, url):
        client = TaskClient(url, IdentityTask(2, discrete=False))
        client.play(1)
        held = threading.Thread(target=lambda: ended_by_server(client))
        held.start()
        held.join(0.5)
        assert held.is_alive(), "the learn step holds the client"
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(5) == 128 + signal.SIGTERM
        held.join(10)
    client.close()


def ended_by_server(client):
    """Play on until the connection is lost."""
    with pytest.raises(ConnectionReplaced):
        client.play_round()


# --- a learn step of 30 s -------------------------------------------------------------------------


@full_size
@patient
def test_a_long_learn_step_keeps_connections_health_and_newcomers(full):
    """With the library's own pings on, at both ends, every second."""
    learn_s = 30.0 if full else 2.0
    config = DummyAlgoConfig(
        fake_inference_duration_sec=0.0,
        fake_learn_duration_sec=learn_s,
        fake_learn_freq=2,
        global_steps=4,
    )
    policy = make_policy("dummy-policy", DummyPolicyConfig(action_dim=2, action_horizon=1))
    algorithm = make_algo("dummy", policy, config=config)
    infer, _ = frames()
    with serve(algorithm, feedback_wait_timeout=learn_s / 2) as running:
        client = TaskClient(running.url, IdentityTask(2, discrete=False))
        client.play(1)
        with connect(running.url, compression=None, ping_interval=None) as link:
            link.recv(10)
            link.send(infer)
            trainer = running.server.trainer
            wait_for(lambda: trainer.learning_for_s() > 0.1 * learn_s)
            slowest_s = 0.0
            while 0 < trainer.learning_for_s() < 0.8 * learn_s:
                started_s = time.monotonic()
                assert link.ping().wait(5.0)
                address = running.url.replace("ws", "http") + "/healthz"
                with urllib.request.urlopen(address, timeout=5.0) as answer:
                    assert answer.status == 200
                with EnvClient(running.url) as newcomer:
                    assert newcomer.metadata.values["server"] == "plugrl-server"
                slowest_s = max(slowest_s, time.monotonic() - started_s)
                time.sleep(0.05)
            link.recv(2 * learn_s)
        assert slowest_s < 1.0
        assert client.client.connections == 1
        client.close()


# --- a crowd --------------------------------------------------------------------------------------


@full_size
@patient
def test_a_crowd_that_comes_and_goes_is_accounted_for_to_the_frame(full):
    clients, visits, least_s = (64, 4, 120.0) if full else (6, 4, 0.0)
    algorithm = ppo()
    sent, came = [0] * clients, [0] * clients
    until_s = time.monotonic() + least_s
    with serve(algorithm) as running:

        def visit(number):
            rng = np.random.default_rng(number)
            while came[number] < visits or time.monotonic() < until_s:
                came[number] += 1
                task = IdentityTask(1 + number % 3, discrete=False, seed=number)
                client = TaskClient(running.url, task, reuse=bool(rng.integers(2)))
                client.play(int(rng.integers(1, 20)))
                client.close()
                sent[number] += client.frames_sent

        threads = [threading.Thread(target=visit, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300.0)
        running.wait_until_alone()
    metrics = running.server.trainer.metrics
    assert metrics.stored_frames + metrics.discarded_frames == sum(sent)
    assert metrics.stored_frames == algorithm.global_step
    assert metrics.total_connections == sum(came)
    assert metrics.connections == 0
    trained = running.server.trainer.version
    left = len(algorithm.filling)
    assert metrics.stored_frames - left >= 128 * trained


@full_size
@patient
def test_a_stalled_and_an_idle_client_delay_nobody(full):
    """In the time of a hundred rounds nobody waits for either; rates are in benchmarks/serve.py."""
    stall_s = 60.0 if full else 1.0
    infer, _ = frames()
    with serve(ppo()) as running, connect(running.url) as idle, connect(running.url) as stalled:
        idle.recv(10)
        stalled.recv(10)
        stalled.send(infer)
        stalled.recv(10)
        client = TaskClient(running.url, IdentityTask(2, discrete=False))
        slowest_s, started_s = 0.0, time.monotonic()
        while time.monotonic() - started_s < stall_s:
            before_s = time.monotonic()
            client.play(1)
            slowest_s = max(slowest_s, time.monotonic() - before_s)
        assert len(client.rewards) > 20
        client.close()
    assert slowest_s < 1.0
