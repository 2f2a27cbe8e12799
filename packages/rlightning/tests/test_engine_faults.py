"""Environments that return NaN, raise, hang or die end a run with a name, its checkpoint kept."""

import re
import sys
import time

import psutil
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
from rlightning.checkpoint import find_checkpoint, load_checkpoint
from rlightning.config import MainConfig
from rlightning.errors import ConfigError, EnvWorkerError, NonFiniteError, UnknownNameError
from rlightning.policy import BasePolicy
from rlightning.runtime import open_run
from rlightning.types import PolicyResponse
from rlightning.utils.logger import close_logger
from rlightning.utils.registry import POLICIES

FAULTY = '''
import os, time
import gymnasium as gym
import numpy as np

class Faulty(gym.Env):
    """Fine for `after` steps, then faulty; other rows of the worker stay fine."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fault="none", after=20):
        self.fault, self.after, self.steps = fault, after, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        reward = 1.0
        if self.steps > self.after:
            if self.fault == "nan":
                reward = float("nan")
            elif self.fault == "raise":
                raise ZeroDivisionError("the arm fell off")
            elif self.fault == "hang":
                time.sleep(1e6)
            elif self.fault == "die":
                os._exit(1)
        return np.zeros(1, np.float32), reward, False, self.steps % 5 == 0, {}

gym.register("Faulty-v0", Faulty)
'''


@POLICIES.register("TinyFaultPolicy")
class Tiny(BasePolicy):
    batched_rollout = True

    def construct_network(self, env_meta, *args, **kwargs):
        self.actor = nn.Linear(1, 2)

    def setup_optimizer(self, optim_cfg):
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def rollout_step(self, env_ret, **kwargs):
        action = torch.zeros(len(env_ret.observation), dtype=torch.int64)
        return PolicyResponse(env_ret.env_id, action=action)

    def postprocess(self, env_ret=None, policy_resp=None): ...

    def update_dataset(self, data):
        self.dataset = data

    def train(self, *args, **kwargs):
        self.optimizer.zero_grad()
        self.actor(self.dataset["observation"]).mean().backward()
        self.optimizer.step()


@pytest.fixture(scope="module", autouse=True)
def _faulty_module(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faulty_environments.py").write_text(FAULTY)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(autouse=True)
def _logs_end_with_each_test():
    yield
    close_logger()


def configuration(folder, fault, *, vectorization="sync", **changes):
    return MainConfig.from_dict(
        {
            "engine": "syncrl",
            "debug": False,
            "verbose": False,
            "env": {
                "name": "arm",
                "backend": "gymnasium",
                "task": "faulty_environments:Faulty-v0",
                "num_envs": 2,
                "vectorization": vectorization,
                "step_timeout_s": 2.0,
                "env_kwargs": {"fault": fault, "after": 20},
            },
            "buffer": {"type": "RolloutBuffer", "capacity": 16},
            "policy": {"type": "TinyFaultPolicy"},
            "train": {"max_epochs": 50, "seed": 1, "save_interval": 1, "save_best": False},
            "log": {"log_dir": str(folder), "name": "n", "level": "CRITICAL"},
            **changes,
        }
    )


def run(config):
    check_config(config)
    open_run(config)
    group = build_policy_group(config.policy.type, config.policy)
    buffer = build_data_buffer(config.buffer.type, config.buffer, seed=1)
    engine = build_engine(config, build_env_group(config.env), group, buffer)
    try:
        engine.run()
    finally:
        close_logger()
    return engine


def newest(config):
    return load_checkpoint(find_checkpoint(config.run.run_dir))


def test_a_reward_that_is_not_finite_names_environment_row_and_step(tmp_path):
    config = configuration(tmp_path, "nan")
    with pytest.raises(NonFiniteError) as caught:
        run(config)
    text = str(caught.value)
    assert text.startswith("reward of env 'arm' worker 0 (row 0) is not finite at step 21")
    assert "The run stopped before it could reach the parameters." in text
    saved = newest(config)
    assert saved.epoch == 2
    assert torch.isfinite(saved.weights["weights"]["actor"]["weight"]).all()
    assert not (config.run.checkpoint_dir / "epoch_last").exists()


def test_an_environment_that_raises_is_named_with_its_cause(tmp_path):
    config = configuration(tmp_path, "raise")
    with pytest.raises(EnvWorkerError, match=r"env 'arm' worker 0: .*the arm fell off"):
        run(config)
    saved = newest(config)
    assert saved.epoch == 2


@pytest.mark.parametrize("fault", ["raise", "hang", "die"])
def test_a_faulty_environment_process_ends_the_run_in_time_and_leaves_none_behind(tmp_path, fault):
    config = configuration(tmp_path, fault, vectorization="async")
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    begin = time.monotonic()
    with pytest.raises(EnvWorkerError, match=r"env 'arm' worker 0: "):
        run(config)
    assert time.monotonic() - begin < 60
    assert find_checkpoint(config.run.run_dir).name == "crashed"  # nothing learned is lost
    assert newest(config).epoch == 2
    left = [
        child
        for child in psutil.Process().children(recursive=True)
        if child.pid not in before
        and child.status() != psutil.STATUS_ZOMBIE
        and "forkserver" not in " ".join(child.cmdline())
        and "resource_tracker" not in " ".join(child.cmdline())
    ]
    assert left == []


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"engine": "synrl"}, UnknownNameError, "is not in the engine registry. Did you mean 's"),
        ({"engine": None}, ConfigError, "`engine` is not set; choose one of .*syncrl"),
        (
            {"policy": {"type": "PPOPolcy"}},
            UnknownNameError,
            "'PPOPolcy' is not in the policy registry. Did you mean 'PPOPolicy'",
        ),
        (
            {"buffer": {"type": "RoloutBuffer", "capacity": 1}},
            UnknownNameError,
            "'RoloutBuffer' is not in the buffer registry. Did you mean 'RolloutBuffer'",
        ),
        (
            {"env": {"name": "a", "backend": "gymnasum", "task": "CartPole-v1"}},
            UnknownNameError,
            "'gymnasum' is not in the env registry. Did you mean 'gymnasium'",
        ),
        (
            {"env": {"name": "a", "backend": "gymnasium", "task": "CartPole-v1", "num_env": 3}},
            ConfigError,
            "`env`: unknown key 'num_env'. Did you mean 'num_envs'",
        ),
        ({"train": {"max_epochs": 1, "evl_interval": 1}}, ConfigError, "mean 'eval_interval'"),
    ],
)
def test_wrong_names_are_refused_before_anything_is_built(tmp_path, changes, kind, message):
    with pytest.raises(kind) as caught:
        check_config(configuration(tmp_path, "none", **changes))
    assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "json:JSONDecoder"}, "engine 'json:JSONDecoder' is .* subclass of BaseEngine"),
        ({"policy": {"type": "json:JSONDecoder"}}, "policy .* expected a subclass of BasePolicy"),
        (
            {"buffer": {"type": "json:JSONDecoder", "capacity": 1}},
            "buffer .* expected a subclass of DataBuffer",
        ),
        (
            {"env": {"name": "a", "backend": "json:JSONDecoder", "task": "t"}},
            "backend .* expected a subclass of BaseEnv",
        ),
    ],
)
def test_a_class_of_another_kind_is_refused_before_anything_is_built(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        check_config(configuration(tmp_path, "none", **changes))


def test_an_environment_that_does_not_exist_suggests_one(tmp_path):
    env = {"name": "a", "backend": "gymnasium", "task": "CartPol-v1"}
    with pytest.raises(ConfigError, match="CartPole"):
        build_env_group(configuration(tmp_path, "none", env=env).env)
