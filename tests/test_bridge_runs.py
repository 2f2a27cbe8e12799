"""Whole runs with environments that dial in: every engine, chunks, processes that are killed."""

import pathlib
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import rlightning
from plugrl_env_client.runner.rollout import RolloutOptions
from plugrl_server.algorithm.rlightning.rlightning_algorithm import (
    RLightningAlgorithm,
    RLightningConfig,
)
from plugrl_server.algorithm.rlightning.served_policy import ServedPolicy
from plugrl_server.common.checkpoint_manager import load_checkpoint_from_path
from plugrl_server.testing import serve
from rlightning.env.remote_env import RemoteEnv, RemoteEnvClient
from rlightning.launch import run_main, train_main
from rlightning.utils.logger.files import read_rows
from rlightning.utils.registry import POLICIES

BIN = pathlib.Path(sys.executable).parent
SMALL = (
    "env.num_envs=2", "train.max_epochs=3", "train.max_rollout_steps=32",
    "train.minibatch_size=32", "train.eval_episodes=2",
)  # fmt: skip


def rows_of(folder):
    (path,) = folder.glob("*/run/metrics.jsonl")
    return list(read_rows(path))


def values(folder, key):
    return [row[key] for row in rows_of(folder) if key in row]


def two(bridge, task="CartPole-v1", **options):
    return lambda port: [bridge.Client(port, task, seed=seed, **options) for seed in (1, 2)]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("cartpole_ppo", ["engine=rsl", *SMALL]),
        ("cartpole_ppo", ["engine=asyncrl", *SMALL, "train.batch_size=64"]),
        ("pendulum_sac", ["env.num_envs=2", "engine=asyncrl", "train.max_epochs=20",
                          "buffer.min_size=64", "train.batch_size=64", "train.minibatch_size=32",
                          "train.eval_episodes=2"]),
    ],
)  # fmt: skip
def test_every_engine_trains_and_evaluates_with_two_clients(
    name, overrides, tmp_path, monkeypatch, bridge
):
    task = bridge.config_of(name, tmp_path).env[0].task
    bridge.train_remotely(name, tmp_path, monkeypatch, *overrides, make_clients=two(bridge, task))
    assert values(tmp_path, "eval/episodes") == [2.0]
    assert values(tmp_path, "eval/unfinished") == [0.0]


def test_an_evaluation_in_between_takes_turns_with_training_and_counts_whole_episodes(
    tmp_path, monkeypatch, bridge
):
    overrides = [*SMALL, "train.eval_interval=1", "env.num_envs=1", "train.eval_episodes=3"]
    bridge.train_remotely("cartpole_ppo", tmp_path, monkeypatch, *overrides)
    assert values(tmp_path, "eval/episodes") == [3.0, 3.0, 3.0]
    lengths, returns = (
        values(tmp_path, "eval/episode_length"),
        values(tmp_path, "eval/episode_return"),
    )
    assert lengths == returns, "CartPole pays 1 a step: a part of an episode would show"
    lost = values(tmp_path, "rollout/lost_episodes")
    assert lost[0] == 0
    assert max(lost[1:]) == 1, "the episode that an evaluation interrupted"


def test_a_client_of_two_environments_with_chunks_of_actions(tmp_path, monkeypatch, bridge):
    options = RolloutOptions(num_episodes=10**6, seed=1, action_horizon=4)
    overrides = [*SMALL, "env.action_horizon=4", "train.max_rollout_steps=64"]
    weights = bridge.train_remotely(
        "cartpole_ppo", tmp_path, monkeypatch, *overrides,
        make_clients=lambda port: [
            bridge.Client(port, "CartPole-v1", num_envs=2, options=options)
        ],
    )  # fmt: skip
    logits = weights["weights"]["actor_critic"]["action_head.logits.weight"]
    assert logits.shape[0] == 2 * 4, "four choices between two"
    returns = values(tmp_path, "rollout/episode_return")
    assert returns == values(tmp_path, "rollout/episode_length"), "in steps, not chunks"
    assert min(returns) > 4


def test_a_policy_whose_horizon_is_not_its_clients_is_refused_with_both_named(
    tmp_path, monkeypatch, bridge
):
    options = RolloutOptions(num_episodes=10**6, action_horizon=8)
    clients = []

    def make(port):
        clients.append(bridge.Client(port, "CartPole-v1", options=options))
        threading.Timer(1.0, bridge.Client(port, "CartPole-v1").start).start()
        return clients

    overrides = [*SMALL, "env.num_envs=1", "env.action_horizon=2"]
    bridge.train_remotely("cartpole_ppo", tmp_path, monkeypatch, *overrides, make_clients=make)
    assert "chunk of 2 steps; 8 were declared" in str(clients[0].error)


def start_client(port, folder, *flags):
    return subprocess.Popen(
        [BIN / "plugrl-run-env-client", "classic-v1", "--server-port", str(port),
         "--num-episodes", "1000000", *flags],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
    )  # fmt: skip


def test_a_killed_client_is_waited_for_and_the_run_goes_on_when_another_comes(
    tmp_path, monkeypatch, bridge
):
    processes, reached = [], threading.Event()
    step = RemoteEnv.step

    def noting(self, response):
        if self.purpose == "train" and self._num_steps == 100:
            reached.set()
        return step(self, response)

    monkeypatch.setattr(RemoteEnv, "step", noting)

    def make(port):
        processes.append(start_client(port, tmp_path))

        def kill_and_replace():
            assert reached.wait(60)
            processes[0].send_signal(signal.SIGKILL)
            processes.append(start_client(port, tmp_path, "--runner.seed", "5"))

        threading.Thread(target=kill_and_replace, daemon=True).start()
        return []

    try:
        overrides = [*SMALL, "env.num_envs=1", "train.max_epochs=40", "env.row_timeout_s=60"]
        overrides += ["train.ppo_epochs=1"]
        weights = bridge.train_remotely(
            "cartpole_ppo", tmp_path, monkeypatch, *overrides, make_clients=make
        )
        assert weights["weights"]
        assert sum(values(tmp_path, "rollout/lost_episodes")) == 1
        assert processes[1].wait(30) == 0, "the run is finished"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_checkpoint_is_evaluated_by_clients_too(tmp_path, monkeypatch, bridge):
    bridge.train_in_process("cartpole_ppo", tmp_path / "one", *SMALL)
    (saved,) = (tmp_path / "one").glob("*/run")
    config = bridge.config_of(
        "cartpole_ppo", tmp_path / "two", *SMALL, "engine=eval", "env.backend=env_server",
        "env.port=0", f"train.checkpoint={saved}",
    )  # fmt: skip
    join = RemoteEnv._join_hub

    def join_and_dial(self):
        hub = join(self)
        for client in two(bridge)(hub.port):
            client.start()
        return hub

    monkeypatch.setattr(RemoteEnv, "_join_hub", join_and_dial)
    run_main(train_main, config)
    assert values(tmp_path / "two", "eval/episodes") == [2.0]


def test_an_environment_of_ones_own_dials_in(tmp_path, monkeypatch, bridge):
    """`RemoteEnvClient` plays any environment of this package; with its seed, the same episodes."""
    from rlightning.env import EnvGroup

    in_process = bridge.train_in_process("cartpole_ppo", tmp_path / "one", *SMALL)

    def make(port):
        config = bridge.config_of("cartpole_ppo", tmp_path / "two", *SMALL, "env.seed=0").env[0]
        client = RemoteEnvClient(EnvGroup.build_env(config), "127.0.0.1", port, seed=0)
        return [threading.Thread(target=client.run, daemon=True)]

    remote = bridge.train_remotely(
        "cartpole_ppo", tmp_path / "two", monkeypatch, *SMALL, make_clients=make
    )
    bridge.assert_same_weights(in_process, remote)


def test_a_server_trains_several_clients_that_come_and_go(tmp_path, bridge):
    config = bridge.config_of(
        "cartpole_ppo", tmp_path, *SMALL, "train.max_epochs=12", "train.seed=0"
    )
    algorithm = RLightningAlgorithm(RLightningConfig(), ServedPolicy(config))
    with serve(algorithm) as running:
        port = running.server.port
        short = bridge.Client(port, "CartPole-v1", episodes=2, seed=1)
        long = bridge.Client(port, "CartPole-v1", num_envs=3, seed=2)
        other = bridge.Client(port, "Acrobot-v1", seed=3)
        for client in (short, long, other):
            client.start()
        other.join(30)
        assert "observation obs:6, policy has obs:4" in str(other.error)
        running.join(60)
        long.join(30)
    assert (short.error, long.error) == (None, None)
    assert algorithm.epoch == 12
    assert algorithm.buffer.size() == 0
    assert len(algorithm._table) <= 4, "chains of clients that left, or that were discarded, go"


def test_a_served_policy_resumes_exactly_where_it_was(tmp_path, bridge):
    """Counters, optimizer and weights come back; a rollout that was under way is collected anew."""
    bridge.train_served("pendulum_sac", tmp_path, "train.max_epochs=20", "buffer.min_size=64",
                        "train.batch_size=32", "train.minibatch_size=16",
                        "train.seed=0")  # fmt: skip
    checkpoint = load_checkpoint_from_path(tmp_path / "server")
    config = bridge.config_of("pendulum_sac", tmp_path, "train.seed=0")
    again = RLightningAlgorithm(RLightningConfig(), ServedPolicy(config))
    again.load_checkpoint(checkpoint)
    assert again.epoch == 20
    assert again.global_step == checkpoint.step == 160
    saved, loaded = checkpoint.model, again.served.group.train_list[0].export_weights()
    assert int(saved["extra"]["n_updates"]) == int(loaded["extra"]["n_updates"]) > 0
    rates = [
        state["step"]
        for state in again.served.group.train_list[0].optimizers["actor"].state.values()
    ]
    assert all(int(step) > 0 for step in rates)


def test_a_policy_that_takes_rows_as_a_trainer_steps_them_is_served_without_a_change(
    tmp_path, monkeypatch, bridge
):
    """The template's policy wants a leading row axis, and is not told of the wire."""
    template = pathlib.Path(rlightning.__file__).parent / "templates" / "algorithm"
    monkeypatch.syspath_prepend(template)
    others = {name: kind for name, kind in POLICIES.module_dict.items() if name != "MyPolicy"}
    monkeypatch.setattr(POLICIES, "module_dict", others)
    monkeypatch.delitem(sys.modules, "my_policy", raising=False)
    weights = bridge.train_served(
        "cartpole_ppo", tmp_path, "imports=[my_policy]", "policy.type=MyPolicy",
        "policy.model_cfg={hidden_size: 16}", "env.num_envs=2", "train.max_epochs=2",
        "train.max_rollout_steps=32", "~train.ppo_epochs", "~train.minibatch_size",
    )  # fmt: skip
    assert set(weights["weights"]) == {"actor", "critic"}
    POLICIES.module_dict.pop("MyPolicy", None)


def test_clients_of_an_off_policy_run_come_and_go_and_a_person_may_act(tmp_path, bridge):
    small = ["buffer.min_size=64", "train.batch_size=32", "train.minibatch_size=16"]
    config = bridge.config_of(
        "pendulum_sac", tmp_path, *small, "train.max_epochs=60", "train.seed=0"
    )
    algorithm = RLightningAlgorithm(RLightningConfig(), ServedPolicy(config))
    executed = np.full((1, 1), 0.25, np.float32)
    with serve(algorithm) as running:
        port = running.server.port
        short = bridge.Client(port, "Pendulum-v1", episodes=1, seed=1)
        long = bridge.Client(port, "Pendulum-v1", num_envs=2, seed=2)
        tell = short.agent.feedback

        def told(obs, rewards, terminated, truncated, info, **more):
            tell(obs, rewards, terminated, truncated, {"executed_action": executed[None]}, **more)

        short.agent.feedback = told
        for client in (short, long):
            client.start()
        running.join(60)
        for client in (short, long):
            client.join(30)
    assert (short.error, long.error) == (None, None)
    assert algorithm.epoch == 60
    batch = algorithm.buffer.get_all()
    assert len(batch) >= 60 * 8 - 3, "the last row of each environment waits for what follows"
    assert (batch["action"] == 0.25).any()
