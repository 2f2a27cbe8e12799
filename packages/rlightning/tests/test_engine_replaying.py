"""Runs that learn from a replay: when they begin to, and from what a resumed one goes on."""

import pytest

from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
)
from rlightning.config import MainConfig
from rlightning.errors import ConfigError
from rlightning.runtime import open_run
from rlightning.utils.logger import close_logger
from rlightning.utils.logger.files import read_rows

EPISODES = {"storage": {"unit": "episode"}}


@pytest.fixture(autouse=True)
def _logs_end_with_each_test():
    yield
    close_logger()


def run(folder, *, engine="syncrl", kind="SACPolicy", buffer=None, resume_from=None, **train):
    """Run a small one; return what it was and the checkpoint it left."""
    task = "CartPole-v1" if kind == "DQNPolicy" else "Pendulum-v1"
    env = {"name": "e", "backend": "gymnasium", "task": task, "num_envs": 2}
    config = MainConfig.from_dict(
        {
            "engine": engine,
            "debug": False,
            "verbose": False,
            "env": env | {"max_episode_steps": 20},
            "buffer": {"type": "ReplayBuffer", "capacity": 100} | (buffer or {}),
            "policy": {"type": kind, "model_cfg": {"hidden_sizes": [8]}},
            "train": {
                "max_epochs": 4,
                "max_rollout_steps": 8,
                "batch_size": 5,
                "eval_episodes": 1,
                "seed": 7,
                "save_best": False,
                "torch_threads": 1,
            }
            | train,
            "log": {"log_dir": str(folder), "project": "p", "name": "n", "level": "CRITICAL"},
        }
    )
    check_config(config)
    context = open_run(config, resume_from=resume_from)
    parts = (
        build_env_group(config.env),
        build_policy_group(config.policy.type, config.policy),
        build_data_buffer(config.buffer.type, config.buffer, seed=config.train.seed),
    )
    try:
        loop = build_engine(config, *parts)
        loop.run()
    finally:
        close_logger()
    return loop, context.checkpoint_dir / "epoch_last"


def updates(loop):
    """How many gradient steps each epoch that learned had behind it."""
    rows = read_rows(loop.run_context.run_dir / "metrics.jsonl")
    return {row["epoch"]: row["train/updates"] for row in rows if "train/updates" in row}


@pytest.mark.parametrize("kind", ["SACPolicy", "TD3Policy", "DQNPolicy", "RLPDPolicy"])
def test_a_replay_of_episodes_is_learned_from_once_it_holds_a_batch_of_them(tmp_path, kind):
    """A batch is of five, and each rollout of two environments gives two."""
    loop, _ = run(tmp_path, kind=kind, buffer=EPISODES, max_epochs=5)
    assert updates(loop) == {2: 1.0, 3: 2.0, 4: 3.0}


def test_a_replay_of_episodes_that_draws_them_again_begins_with_as_many_as_it_is_told(tmp_path):
    loop, _ = run(tmp_path, buffer=EPISODES | {"min_size": 3}, max_epochs=3)
    assert list(updates(loop)) == [1, 2]


def test_a_batch_of_more_episodes_than_the_buffer_can_hold_is_told(tmp_path):
    message = r"waits for 20 episodes, and the buffer is full with 12 of them: .* 100 transitions"
    with pytest.raises(ConfigError, match=message):
        run(tmp_path, buffer=EPISODES, batch_size=20, max_epochs=9)
