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
from rlightning.errors import CheckpointError, ConfigError
from rlightning.runtime import open_run
from rlightning.utils.logger import close_logger
from rlightning.utils.logger.files import read_rows

EPISODES = {"storage": {"unit": "episode"}}


@pytest.fixture(autouse=True)
def _logs_end_with_each_test():
    yield
    close_logger()


def run(
    folder, *, engine="syncrl", kind="SACPolicy", buffer=None, model=None, resume_from=None, **train
):
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
            "policy": {"type": kind, "model_cfg": {"hidden_sizes": [8]} | (model or {})},
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


# ---- resuming ----------------------------------------------------------------------------------

KEPT = {"save_contents": True}


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        (
            {"buffer": KEPT},
            {"engine": "asyncrl", "buffer": KEPT},
            r"of another kind.*this run's have that note(.|\n)*engine: syncrl there, asyncrl",
        ),
        (
            {"engine": "asyncrl", "buffer": KEPT},
            {"engine": "rsl", "buffer": KEPT},
            r"of another kind.*the saved have that note(.|\n)*engine: asyncrl there, rsl here",
        ),
        (
            {"buffer": KEPT},
            {"buffer": EPISODES | KEPT},
            r"of a ReplayBuffer of transitions, and this run's buffer is a ReplayBuffer of episodes"
            r"(.|\n)*buffer.storage.unit: transition there, episode here",
        ),
        (
            {"buffer": EPISODES | KEPT},
            {"buffer": KEPT},
            r"of a ReplayBuffer of episodes(.|\n)*buffer.storage.unit: episode there, transition",
        ),
        (
            {"buffer": KEPT},
            {"buffer": KEPT | {"capacity": 50}},
            r"room for 102 (.|\n)*this one's is 52(.|\n)*buffer.capacity: 100 there, 50 here",
        ),
        (
            {},
            {"model": {"hidden_sizes": [4]}},
            r"policy.model_cfg.hidden_sizes: \[8\] there, \[4\]",
        ),
        (
            {},
            {"model": {"normalize_observations": True}},
            r"policy.model_cfg.normalize_observations: None there, True here",
        ),
        ({}, {"learn_temperature": False}, r"train.learn_temperature: True there, False here"),
    ],
    ids=["later", "earlier", "episodes", "steps", "capacity", "network", "normaliser", "optimizer"],
)
def test_a_run_whose_state_does_not_fit_says_which_settings_differ(tmp_path, first, then, message):
    _, checkpoint = run(tmp_path, **first)
    with pytest.raises(CheckpointError, match=message) as caught:
        run(tmp_path, resume_from=checkpoint, **then | {"max_epochs": 6})
    assert "max_epochs" not in str(caught.value), "which every resumed run changes"


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ({}, {"engine": "asyncrl"}),
        ({"engine": "asyncrl"}, {"buffer": EPISODES}),
        ({"buffer": EPISODES}, {"engine": "rsl", "buffer": {"capacity": 60}}),
        ({"buffer": KEPT}, {"engine": "asyncrl"}),
        ({"engine": "asyncrl", "buffer": KEPT}, {}),
        ({"buffer": KEPT}, {"buffer": EPISODES}),
        ({"buffer": KEPT}, {"buffer": {"capacity": 50}}),
    ],
    ids=str,
)
def test_without_saved_transitions_a_run_goes_on_with_another_engine_and_buffer(
    tmp_path, first, then
):
    """Those that are there are left alone where ``save_contents`` is off now."""
    _, checkpoint = run(tmp_path, **first)
    loop, _ = run(tmp_path, resume_from=checkpoint, **then | {"max_epochs": 9})
    assert loop.epoch == 9
    assert updates(loop)


def test_saved_transitions_get_priorities_where_a_run_goes_on_with_them(tmp_path):
    _, checkpoint = run(tmp_path, buffer=KEPT)
    more = KEPT | {"prioritized": True}
    loop, _ = run(tmp_path, resume_from=checkpoint, buffer=more, max_epochs=5)
    assert loop.epoch == 5


def test_a_run_with_another_on_policy_buffer_than_before_goes_on(tmp_path):
    rollout = {"type": "RolloutBuffer"}
    _, checkpoint = run(tmp_path, kind="PPOPolicy", buffer=rollout | KEPT)
    loop, _ = run(tmp_path, kind="PPOPolicy", buffer=rollout, resume_from=checkpoint, max_epochs=5)
    assert loop.epoch == 5
