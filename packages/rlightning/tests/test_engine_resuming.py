"""Resuming with another environment than before, and with what an actor alone holds."""

import sys

import pytest
import torch
from torch import nn

from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
)
from rlightning.checkpoint import load_checkpoint
from rlightning.config import MainConfig
from rlightning.policy import BasePolicy
from rlightning.runtime import open_run
from rlightning.types import PolicyResponse
from rlightning.utils.logger import close_logger
from rlightning.utils.logger.files import read_rows
from rlightning.utils.registry import POLICIES

WALK = '''
import gymnasium as gym
import numpy as np

class Walk(gym.Env):
    """Episodes of `length` steps, each worth `worth`."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length=5, worth=1.0):
        self.length, self.worth, self.steps = length, worth, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.zeros(1, np.float32), self.worth, self.steps == self.length, False, {}

class Other(Walk):
    """As `Walk`, and the episodes are counted in tens."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, 10 * reward, *rest

gym.register("Walk-v0", Walk, max_episode_steps=100)
gym.register("Other-v0", Other, max_episode_steps=100)
'''


@POLICIES.register("OwnNoisePolicy")
class OwnNoise(BasePolicy):
    """Acts with a generator of its own, and learns from what it did."""

    batched_rollout = True

    def construct_network(self, env_meta, *args, **kwargs):
        self.actor = nn.Linear(1, 1)
        self.noise = torch.Generator().manual_seed(5)

    def setup_optimizer(self, optim_cfg):
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def rollout_step(self, env_ret, **kwargs):
        rows = len(env_ret.observation)
        action = torch.randint(2, (rows,), generator=self.noise)  # in evaluation, too
        return PolicyResponse(env_ret.env_id, action=action)

    def postprocess(self, env_ret=None, policy_resp=None): ...

    def update_dataset(self, data):
        self.dataset = data

    def train(self, *args, **kwargs):
        self.optimizer.zero_grad()
        target = self.dataset["action"].float().mean()
        (self.actor(self.dataset["observation"]).mean() - target).square().backward()
        self.optimizer.step()


@pytest.fixture(scope="module", autouse=True)
def _walking_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("walking")
    (folder / "walking_environments.py").write_text(WALK)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


def run(folder, *, resume_from=None, env=None, epochs=2, **train):
    config = MainConfig.from_dict(
        {
            "engine": "syncrl",
            "debug": False,
            "verbose": False,
            "env": {
                "name": "walk",
                "backend": "gymnasium",
                "task": "walking_environments:Walk-v0",
                "num_envs": 2,
                **(env or {}),
            },
            "buffer": {"type": "RolloutBuffer", "capacity": 128},
            "policy": {"type": "OwnNoisePolicy"},
            "train": {
                "max_epochs": epochs,
                "max_rollout_steps": 17,
                "eval_episodes": 2,
                "seed": 7,
                "save_best": False,
                "torch_threads": 1,
                **train,
            },
            "log": {"log_dir": str(folder), "project": "p", "name": "n", "level": "ERROR"},
        }
    )
    check_config(config)
    context = open_run(config, resume_from=resume_from)
    env_group = build_env_group(config.env)
    policy_group = build_policy_group(config.policy.type, config.policy)
    buffer = build_data_buffer(config.buffer.type, config.buffer, seed=config.train.seed)
    engine = build_engine(config, env_group, policy_group, buffer)
    engine.run()
    close_logger()
    return engine, context.checkpoint_dir / "epoch_last", (context.run_dir / "run.log").read_text()


@pytest.mark.parametrize(
    ("change", "worth", "length"),
    [
        ({"env_kwargs": {"length": 9, "worth": 10.0}}, 90.0, 9),
        ({"task": "walking_environments:Other-v0"}, 50.0, 5),
        ({"max_episode_steps": 3}, 3.0, 3),
        ({"num_envs": 3}, 5.0, 5),
        ({"num_workers": 2}, 5.0, 5),
    ],
    ids=["env_kwargs", "task", "max_episode_steps", "num_envs", "num_workers"],
)
def test_a_run_that_is_resumed_in_other_environments_is_in_them(tmp_path, change, worth, length):
    """And not in the old ones, whose settings are a part of the state of their episodes."""
    _, checkpoint, _ = run(tmp_path)
    engine, _, log = run(tmp_path, resume_from=checkpoint, env=change, epochs=3)
    assert engine.last_metrics["rollout/episode_return"] == worth
    assert engine.last_metrics["rollout/episode_length"] == length
    assert "the checkpoint is not from the middle of these environments' episodes" in log


def test_a_run_that_is_resumed_with_more_patience_goes_on_in_its_episodes(tmp_path):
    _, checkpoint, _ = run(tmp_path)
    _, _, log = run(tmp_path, resume_from=checkpoint, env={"step_timeout_s": 9.0}, epochs=3)
    assert "new ones start" not in log


def test_a_generator_that_a_policy_acts_with_is_resumed_and_evaluation_leaves_it_alone(tmp_path):
    _, through, _ = run(tmp_path / "1", epochs=4)
    _, first, _ = run(tmp_path / "2", epochs=2)
    _, resumed, _ = run(tmp_path / "2", resume_from=first, epochs=4)
    _, watched, _ = run(tmp_path / "3", epochs=4, eval_interval=1)
    weights = [
        load_checkpoint(path).weights["weights"]["actor"]["bias"].item()
        for path in (through, resumed, watched)
    ]
    assert weights[0] == weights[1] == weights[2]


def test_an_evaluation_that_was_interrupted_comes_after_resuming(tmp_path, monkeypatch):
    """It is neither left out nor written twice."""
    through, _, _ = run(tmp_path / "1", epochs=3, eval_interval=1)
    evaluate, count = type(through).evaluate, []

    def interrupted(self, *args, **kwargs):
        count.append(self.epoch)
        if len(count) == 2:
            self.run_context.stop.request()
        return evaluate(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(type(through), "evaluate", interrupted)
        _, checkpoint, _ = run(tmp_path / "2", epochs=3, eval_interval=1)
    assert count == [1, 2]
    run(tmp_path / "2", resume_from=checkpoint, epochs=3, eval_interval=1)
    points = [
        [row["env_step"] for row in rows if row["stream"] == "eval"]
        for rows in (read_rows(tmp_path / name / "p" / "n" / "metrics.jsonl") for name in "12")
    ]
    assert points[0] == points[1] == [34, 68, 102]
