"""The training server with workers on Ray: the plain server's weights, kills, the protocol."""

import contextlib
import logging
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from plugrl_protocol.conformance.server_cli import main as check_server
from plugrl_server import cli, cli_args, cli_ray
from plugrl_server.cluster.places import open_places
from plugrl_server.testing import IdentityTask, TaskClient
from rlightning.errors import WorkerLostError

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

PPO = ["gaussian-policy", "default", "ppo", "default", "--policy.obs-dim", "2"]
PPO += ["--policy.action-dim", "2", "--policy.device", "cpu", "--algo.buffer-size", "64"]
PPO += ["--algo.batch-size", "32", "--algo.update-epochs", "2", "--algo.global-steps", "256"]
CARTPOLE = ["categorical-policy", "default", "ppo", "default", "--policy.obs-dim", "4"]
CARTPOLE += ["--policy.num-actions", "2", "--policy.device", "cpu", "--algo.save-interval", "2"]
CARTPOLE += ["--algo.batch-size", "32", "--algo.update-epochs", "2", "--algo.buffer-size", "128"]
SERVED = ["--rlightning", "cartpole_ppo", "train.max_epochs=3", "train.max_rollout_steps=32"]
SERVED += ["env.num_envs=1", "train.minibatch_size=16", "train.ppo_epochs=2", "train.seed=3"]
SERVED += ["verbose=false"]
WAIT_S = 500


def flags(folder, *more):
    quiet = ["--log-level", "error", "--no-show-metric-table", "--no-show-progress-bar"]
    return ["--checkpoint-base-dir", str(folder), "--port", "0", "--exp-name", "a", *quiet, *more]


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Metrics go to files only, and the log to the test."""
    from plugrl_server.common.metrics import RunMetricSink
    from rlightning.utils.logger import MetricsLogger
    from rlightning.utils.logger.backends import BackendOptions

    def files_only(choice, run_dir, *, resumed_at):
        options = BackendOptions(project="p", name=run_dir.name, run_dir=run_dir)
        return RunMetricSink(MetricsLogger(logging.getLogger("metrics"), options))

    monkeypatch.setattr(cli, "_open_metrics", files_only)


@contextlib.contextmanager
def serving(server):
    """Run a server in a thread; its clients end it, or the block does."""
    listening = threading.Event()
    server._on_listening = lambda _: listening.set()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert listening.wait(WAIT_S)
        yield server
    finally:
        server.request_stop()
        thread.join(WAIT_S)
    assert not thread.is_alive()


@contextlib.contextmanager
def on_ray(argv):
    choice = cli_args.parse(argv, cli_ray.RayArgs, cli_ray.PROGRAM)
    with open_places(cli_ray.places_config(choice)) as places:
        yield cli.build_server(choice, places)


def play(server):
    """Play until the run is finished; return the weights."""
    with serving(server):
        client = TaskClient(f"ws://127.0.0.1:{server.port}", IdentityTask(2, discrete=False))
        assert client.play()
        client.close()
    return {
        name: tensor.clone()
        for name, tensor in server.trainer.algorithm.policy.state_dict().items()
    }


def play_cartpole(server, bridge):
    with serving(server):
        client = bridge.Client(server.port, "CartPole-v1")
        client.start()
        client.join(WAIT_S)
        assert client.error is None
        assert not client.is_alive()
    return server.trainer.algorithm.served.group.export_state()["weights"]


def test_one_worker_of_each_kind_ends_with_the_weights_of_the_plain_server(ray_cluster, tmp_path):
    here = play(cli.build_server(cli_args.parse([*PPO, *flags(tmp_path / "here")])))
    with on_ray([*PPO, *flags(tmp_path / "there")]) as server:
        there = play(server)
        assert server.trainer.version == 4
        assert server._metadata.values["algorithm"] == "PPOAlgorithm"
    for name, tensor in here.items():
        assert torch.equal(tensor, there[name]), name
    one, other = (
        (tmp_path / place / "ppo/gaussian-policy/a/256/model.safetensors").read_bytes()
        for place in ("here", "there")
    )
    assert one == other


def test_a_policy_of_rlightning_ends_with_the_weights_of_the_plain_server(
    ray_cluster, tmp_path, bridge
):
    log = f"log.log_dir={tmp_path}"
    plain = cli.build_server(cli_args.parse([*SERVED, log, *flags(tmp_path / "here")]))
    here = play_cartpole(plain, bridge)
    with on_ray([*SERVED, log, *flags(tmp_path / "there")]) as server:
        there = play_cartpole(server, bridge)
        assert server.trainer.version == 3
    bridge.assert_same_weights(here, there)


@pytest.mark.slow
def test_a_policy_of_rlightning_learns_in_two_workers_and_acts_in_two(
    ray_cluster, tmp_path, bridge
):
    argv = [*SERVED, f"log.log_dir={tmp_path}", *flags(tmp_path)]
    argv += ["--num-infer-workers", "2", "--num-ddp-workers", "2"]
    with on_ray(argv) as server:
        play_cartpole(server, bridge)
        assert server.trainer.version == 3
        one, other = server.trainer.algorithm.served.group.train_list
        bridge.assert_same_weights(one.export_weights(), other.export_weights())


@pytest.mark.slow
def test_a_learner_of_a_policy_of_rlightning_that_is_killed_ends_the_run_and_resume_goes_on(
    ray_cluster, tmp_path, bridge
):
    overrides = ["train.max_epochs=8", "train.save_interval=1", f"log.log_dir={tmp_path}"]
    argv = [*SERVED, *overrides, *flags(tmp_path)]
    with on_ray(argv) as server:
        algorithm = server.trainer.algorithm

        def kill():
            client = bridge.Client(server.port, "CartPole-v1")
            client.start()
            wait_until(lambda: algorithm.epoch >= 3)
            os.kill(algorithm.served.group.train_list[0].worker.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill, daemon=True)
        server._on_listening = lambda _: killer.start()
        with pytest.raises(WorkerLostError, match=r"learner-0 is lost: .*kill -9"):
            server.serve_forever()
        killer.join()
    with on_ray([*argv, "--resume"]) as server:
        assert 1 <= server.trainer.algorithm.epoch < 8
        play_cartpole(server, bridge)
        assert server.trainer.algorithm.epoch == 8


def test_two_and_two_workers_train_on_though_one_of_each_is_killed(
    ray_cluster, tmp_path, bridge, caplog
):
    argv = [*CARTPOLE, "--algo.train-itrs", "12", *flags(tmp_path, "--log-level", "warning")]
    argv += ["--num-infer-workers", "2", "--num-ddp-workers", "2"]
    with on_ray(argv) as server, caplog.at_level(logging.WARNING), serving(server):
        algorithm = server.trainer.algorithm
        clients = [bridge.Client(server.port, "CartPole-v1", num_envs=2) for _ in range(2)]
        for client in clients:
            client.start()
        wait_until(lambda: algorithm.train_itrs >= 3)
        os.kill(algorithm._actors._workers[1].pid, signal.SIGKILL)
        before = server.trainer.version
        wait_until(lambda: server.trainer.version >= before + 2)
        os.kill(algorithm._learners._workers[1].pid, signal.SIGKILL)
        for client in clients:
            client.join(WAIT_S)
    assert [client.error for client in clients] == [None, None], "told that the run is finished"
    assert algorithm.train_itrs == 12
    assert server.trainer.version > 12, "what was learned after the last checkpoint came again"
    assert server.trainer.metrics.refused_requests == 0
    assert "infer-1 is lost" in caplog.text
    assert "infer-1 is back" in caplog.text
    assert "learner-1 is lost" in caplog.text


def wait_until(condition):
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_every_clause_of_the_protocol_is_kept(ray_cluster, tmp_path, capsys):
    argv = [*PPO[:4], "--policy.obs-dim", "4", "--policy.state-keys", "state", *PPO[6:]]
    argv += ["--algo.global-steps", "1000000", "--feedback-wait-timeout", "1", *flags(tmp_path)]
    with on_ray([*argv, "--api-key", "key", "--num-infer-workers", "2"]) as server, serving(server):
        url = f"ws://127.0.0.1:{server.port}"
        states = ["--state-key", "state", "--state-dim", "4", "--feedback-timeout", "1"]
        code = check_server([url, "--timeout", "60", "--api-key", "key", *states])
    report = capsys.readouterr().out
    assert code == 0, report
    assert " 0 failed" in report


@pytest.mark.slow
def test_a_signal_saves_and_leaves_no_process_behind(tmp_path):
    program = pathlib.Path(sys.executable).parent / "plugrl-run-server-ray"
    argv = [*PPO, "--algo.global-steps", "1000000", *flags(tmp_path, "--log-level", "info")]
    command = [program, *argv, "--ray-address", "local"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stderr:
            if "listening on" in line:
                break
        port = int(line.rsplit(":", 1)[1])
        client = TaskClient(f"ws://127.0.0.1:{port}", IdentityTask(2, discrete=False))
        client.play(40)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) > 3
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        assert process.wait(WAIT_S) == 0
        assert "the same command with --exp-name a --resume goes on" in said
    client.close()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert list(tmp_path.glob("ppo/gaussian-policy/a/*/model.safetensors"))
