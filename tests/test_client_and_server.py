"""The environment client and the training server, each as its command, over a real connection."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent
LIMIT_S = 100


@contextlib.contextmanager
def running(folder, command, *arguments, **environment):
    """Start a command; whatever happens, it does not stay. Its output is collected."""
    process = subprocess.Popen(
        [str(BIN / command), *map(str, arguments)], env={**os.environ, **environment},
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    process.said, process.changed = [], threading.Condition()

    def collect():
        for line in process.stdout:
            with process.changed:
                process.said.append(line)
                process.changed.notify_all()

    reader = threading.Thread(target=collect)
    reader.start()
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()


def text(process):
    return "".join(process.said)


def wait_for(process, phrase):
    with process.changed:
        found = process.changed.wait_for(lambda: phrase in text(process), LIMIT_S)
    assert found, text(process)


def ends_with(process, code):
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LIMIT_S)
    assert process.poll() == code, text(process)


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


PPO = ["categorical-policy", "default", "ppo", "default", "--policy.device", "cpu"]
SMALL = [*PPO, "--algo.buffer-size", "64", "--algo.batch-size", "64", "--algo.update-epochs", "1"]
ENDLESS = ["--num-episodes", "1000000"]


def test_a_run_ends_both_programs_with_0(tmp_path):
    port = free_port()
    server_flags = [*SMALL, "--algo.train-itrs", "3", "--port", port]
    client_flags = [*ENDLESS, "--num-envs", "4", "--server-port", port]
    with (
        running(tmp_path, "plugrl-run-server", *server_flags) as server,
        running(tmp_path, "plugrl-run-env-client", "classic-v1", *client_flags) as client,
    ):
        ends_with(server, 0)
        ends_with(client, 0)
    assert "the server says that the run is finished" in text(client)
    (summary,) = tmp_path.glob("runs/*/rollout/proc_000/summary.json")
    found = json.loads(summary.read_text())
    assert (found["server_stopped"], found["finished"]) == (True, True)
    assert list(tmp_path.glob("checkpoints/ppo/categorical-policy/*/192"))


def test_observations_that_the_policy_was_not_built_for_are_named_by_both_sides(tmp_path):
    port = free_port()
    with (
        running(tmp_path, "plugrl-run-server", *SMALL, "--port", port) as server,
        running(
            tmp_path, "plugrl-run-env-client", "classic-v1", "--env.name", "Acrobot-v1",
            "--server-port", port,
        ) as client,
    ):  # fmt: skip
        ends_with(client, 1)
        assert "obs:6" in text(client)
        assert "obs:4" in text(client)
        assert server.poll() is None


def test_a_client_goes_on_with_the_server_that_replaces_its_own(tmp_path):
    port = free_port()
    flags = [*SMALL, "--algo.train-itrs", "100000", "--port", port, "--algo.save-interval", "1"]
    with running(
        tmp_path, "plugrl-run-env-client", "classic-v1", *ENDLESS, "--server-port", port
    ) as client:
        with running(tmp_path, "plugrl-run-server", *flags, "--exp-name", "one") as first:
            wait_for(first, "saved")
            first.send_signal(signal.SIGTERM)
            first.wait(LIMIT_S)
        with running(tmp_path, "plugrl-run-server", *flags, "--exp-name", "two") as second:
            wait_for(second, "saved")
        assert client.poll() is None
        assert "dropped the chunks in flight" in text(client)
        client.send_signal(signal.SIGINT)
        ends_with(client, 130)


def test_a_server_that_is_stopped_says_how_it_goes_on(tmp_path):
    port = free_port()
    flags = ["--rlightning", "pendulum_sac", "train.torch_threads=1", "--port", port]
    env = ["classic-v1", "--env.name", "Pendulum-v1", "--num-episodes", "1000000"]
    with running(tmp_path, "plugrl-run-env-client", *env, "--server-port", port) as client:
        with running(tmp_path, "plugrl-run-server", *flags) as first:
            wait_for(first, "connected")
            wait_for(client, "connected")
            first.send_signal(signal.SIGINT)
            ends_with(first, 0)
        (more,) = re.findall(r"the same command with (.*) goes on", text(first))
        (step,) = re.findall(r"saved \S+/(\d+)\n", text(first))
        with running(tmp_path, "plugrl-run-server", *flags, *more.split()) as second:
            wait_for(second, f"resumed at step {step}\n")
            wait_for(second, "connected")
        assert client.poll() is None


CERTIFICATE = Path(__file__).parents[1] / "packages/plugrl-protocol/tests/localhost_certificate.pem"


def test_a_run_over_tls_with_a_key(tmp_path):
    """A client that does not trust the certificate, or has no key, says so and ends."""
    port = free_port()
    server_flags = [*SMALL, "--algo.train-itrs", "2", "--port", port, "--certificate", CERTIFICATE]
    env = ["classic-v1", *ENDLESS, "--num-envs", "4", "--give-up-after", "30"]
    secure = [*env, "--server-host", f"wss://localhost:{port}", "--ca-file", CERTIFICATE]
    strange = [*env, "--server-host", f"wss://localhost:{port}", "--api-key", "secret"]
    with running(tmp_path, "plugrl-run-server", *server_flags, PLUGRL_API_KEY="secret") as server:
        wait_for(server, "listening on")
        with (
            running(tmp_path, "plugrl-run-env-client", *secure) as no_key,
            running(tmp_path, "plugrl-run-env-client", *strange) as no_trust,
        ):
            ends_with(no_key, 1)
            ends_with(no_trust, 1)
        assert "401" in text(no_key)
        assert "certificate" in text(no_trust)
        with running(tmp_path, "plugrl-run-env-client", *secure, PLUGRL_API_KEY="secret") as client:
            ends_with(server, 0)
            ends_with(client, 0)


PLUG_IN = """
import dataclasses, numpy as np
from plugrl_server.policy.base_policy import BasePolicy, BasePolicyConfig
from plugrl_server.policy.registration import register_policy, register_policy_config

@register_policy_config("left-policy")
@dataclasses.dataclass
class Config(BasePolicyConfig):
    pass

@register_policy("left-policy")
class Policy(BasePolicy):
    def get_action_and_runtime_state(self, _obs):
        return np.zeros((len(_obs["text"]), 1), np.int64), None

    def fake_runtime_state(self, batch_size):
        return None
"""
# What `pip install` leaves of a package that declares an entry point, beside the module itself.
DISTRIBUTION = {
    "METADATA": "Metadata-Version: 2.1\nName: my-robots\nVersion: 1.0\n",
    "entry_points.txt": "[plugrl_server.plugins]\nmine = my_robots.policies\n",
}
TRACKER = """
import json, pathlib

class Run:
    def __init__(self, **options):
        self.file = pathlib.Path("tracked.jsonl").open("w")
        self.log(options)

    def define_metric(self, *names, **more):
        pass

    def log(self, values, **more):
        print(json.dumps({**values, **more}), file=self.file, flush=True)

    def finish(self):
        self.log({"finished": True})

init = Run
"""


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "tracker", ["wandb", pytest.param("swanlab", marks=SLOW), pytest.param("trackio", marks=SLOW)]
)
def test_an_installed_plug_in_is_found_and_its_run_goes_to_a_tracker(tmp_path, tracker):
    """The tracker is a stand-in that writes down what it is told."""
    site = tmp_path / "site"
    (site / "my_robots").mkdir(parents=True)
    (site / "my_robots" / "__init__.py").touch()
    (site / "my_robots" / "policies.py").write_text(PLUG_IN)
    (site / "my_robots-1.0.dist-info").mkdir()
    for name, content in DISTRIBUTION.items():
        (site / "my_robots-1.0.dist-info" / name).write_text(content)
    (site / f"{tracker}.py").write_text(TRACKER)
    port, known = free_port(), {"PYTHONPATH": str(site)}
    names = ["left-policy", "default", "eval", "default", "--algo.num-episodes", "3"]
    flags = [*names, "--port", port, "--exp-name", "e", "--track.enabled", "--track.tracker"]
    mode = ["--track.mode", "online"] if tracker != "trackio" else []
    with (
        running(tmp_path, "plugrl-run-server", *flags, tracker, *mode, **known) as server,
        running(
            tmp_path, "plugrl-run-env-client", "classic-v1", *ENDLESS, "--server-port", port
        ) as client,
    ):
        ends_with(server, 0)
        ends_with(client, 0)
    rows = [json.loads(line) for line in (tmp_path / "tracked.jsonl").read_text().splitlines()]
    assert rows[0]["project"] == "PlugRL"
    assert rows[0].get("mode", "online") == "online"
    assert rows[-1] == {"finished": True}
    assert "episode/reward" in {name for row in rows for name in row}


@pytest.mark.slow
def test_ppo_learns_to_balance_a_pole_from_a_client(tmp_path):
    port = free_port()
    server_flags = [*PPO, "--algo.train-itrs", "40", "--algo.buffer-size", "1024",
                    "--algo.learning-rate", "1e-3", "--port", port]  # fmt: skip
    client_flags = [*ENDLESS, "--num-envs", "8", "--runner.seed", "0", "--server-port", port]
    with (
        running(tmp_path, "plugrl-run-server", *server_flags) as server,
        running(tmp_path, "plugrl-run-env-client", "classic-v1", *client_flags) as client,
    ):
        ends_with(server, 0)
        ends_with(client, 0)
    (metrics,) = tmp_path.glob("runs/*/rollout/proc_000/metrics/episode_metrics.jsonl")
    returns = [json.loads(line)["return"] for line in metrics.read_text().splitlines()]
    print(f"first {sum(returns[:20]) / 20:.0f}, last {sum(returns[-20:]) / 20:.0f}")
    assert sum(returns[:20]) / 20 < 50
    assert sum(returns[-20:]) / 20 > 150


@pytest.mark.slow
def test_sac_trains_on_a_pendulum_from_a_client(tmp_path):
    port = free_port()
    server_flags = ["sac-policy", "default", "sac", "default", "--policy.device", "cpu",
                    "--policy.state-dim", "3", "--policy.action-dim", "1",
                    "--policy.action-high", "2", "--policy.action-low", "-2",
                    "--algo.global-steps", "1000", "--algo.learning-starts", "200",
                    "--port", port]  # fmt: skip
    client_flags = ["--env.name", "Pendulum-v1", *ENDLESS, "--server-port", port]
    with (
        running(tmp_path, "plugrl-run-server", *server_flags) as server,
        running(tmp_path, "plugrl-run-env-client", "classic-v1", *client_flags) as client,
    ):
        ends_with(server, 0)
        ends_with(client, 0)
