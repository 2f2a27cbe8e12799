"""Environments that dial in, and the rest of a run on a cluster."""

import logging
import os
import re
import signal
import socket
import threading

import pytest

from rlightning.utils.logger.files import read_rows

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

SMALL = (
    "env.num_envs=1", "train.max_epochs=3", "train.max_rollout_steps=32", "train.seed=5",
    "train.minibatch_size=32", "train.eval_episodes=2", "train.eval_interval=2",
)  # fmt: skip


@pytest.fixture(scope="module")
def local(bridge, tmp_path_factory):
    """What the run ends with where the clients dial in to a run in one process."""
    with pytest.MonkeyPatch.context() as patch:
        return bridge.train_remotely("cartpole_ppo", tmp_path_factory.mktemp("l"), patch, *SMALL)


@pytest.mark.parametrize("in_worker", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_where_clients_dial_in_to_a_worker_or_to_the_trainer_the_weights_are_the_same(
    ray_cluster, in_worker, local, tmp_path, bridge
):
    weights, clients = bridge.train_remotely_on_ray(
        "cartpole_ppo", tmp_path, *SMALL, remote_env=in_worker
    )
    bridge.assert_same_weights(local, weights)
    assert [client.error for client in clients] == [None], "told that the run is finished"
    (log,) = tmp_path.glob("*/run/run.log")
    assert ("[env-0] listening" in log.read_text()) == in_worker


def values(folder, key):
    (path,) = folder.glob("*/run/metrics.jsonl")
    return [row[key] for row in read_rows(path) if key in row]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Killer(logging.Handler):
    """Knows the processes of the environment worker from the log, and kills the newest."""

    def __init__(self):
        super().__init__()
        self.pids = []

    def emit(self, record):
        self.pids += map(int, re.findall(r"worker env-0 is process (\d+)", record.getMessage()))

    def kill(self):
        os.kill(self.pids[-1], signal.SIGKILL)


@pytest.fixture
def killer():
    log, handler = logging.getLogger("rlightning.runtime.ray"), Killer()
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def at_feedback(client, number, act):
    """Call `act` when a client reports for the `number`-th time."""
    tell, told = client.agent.feedback, []

    def counting(*args, **kwargs):
        told.append(None)
        if len(told) == number:
            act()
        return tell(*args, **kwargs)

    client.agent.feedback = counting


class Late:
    """A client that comes after a while, longer than a call of a worker may take."""

    def __init__(self, client, after_s):
        self.client = client
        self.timer = threading.Timer(after_s, client.start)

    def start(self):
        self.timer.start()

    def join(self, timeout_s):
        self.timer.join(timeout_s)
        self.client.join(timeout_s)

    def is_alive(self):
        return self.client.is_alive()

    @property
    def error(self):
        return self.client.error


@pytest.mark.slow
def test_clients_come_late_leave_and_survive_the_worker_that_they_dial_in_to(
    ray_cluster, tmp_path, bridge, killer
):
    """What clients observe is not configured, so that the very first call waits for one."""

    def make(port):
        short = bridge.Client(port, "CartPole-v1", episodes=1, seed=1)
        long = bridge.Client(port, "CartPole-v1", seed=2)
        at_feedback(long, 60, killer.kill)
        return [Late(short, 3.0), Late(long, 3.5)]

    _, clients = bridge.train_remotely_on_ray(
        "cartpole_ppo", tmp_path, *SMALL, "env.task=none", "env.action_space={n: 2}",
        f"env.port={free_port()}", "train.max_epochs=6", make_clients=make,
        env_timeout_s=2.0, remote_eval=False, remote_train=False, remote_storage=False,
    )  # fmt: skip
    assert [client.error for client in clients] == [None, None]
    assert len(killer.pids) == 2, "it was started again"
    assert values(tmp_path, "workers/lost_episodes") == [1.0]
    assert values(tmp_path, "eval/episodes") == [2.0] * 3
    (log,) = tmp_path.glob("*/run/run.log")
    assert "worker env-0 is lost" in log.read_text()
