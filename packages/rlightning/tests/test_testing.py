"""The conformance kits pass what is right and name what is wrong."""

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlightning.build import build_data_buffer, check_config
from rlightning.config import BufferConfig, EnvConfig, MainConfig
from rlightning.env import BaseEnv
from rlightning.errors import ContractError
from rlightning.policy.ppo_policy import PPOPolicy
from rlightning.testing import (
    TargetEnv,
    check_buffer,
    check_engine,
    check_env,
    check_policy,
    random_env_ret,
    random_response,
)
from rlightning.types import EnvMeta, EnvRet

gym.register("RlightningTarget-v0", TargetEnv)


def config_of(**train):
    config = MainConfig.from_dict(
        {
            "engine": "syncrl",
            "verbose": False,
            "debug": False,
            "env": {
                "name": "t",
                "backend": "gymnasium",
                "task": "RlightningTarget-v0",
                "num_envs": 4,
                "max_episode_steps": 10,
            },
            "buffer": {"type": "RolloutBuffer", "capacity": 256},
            "policy": {"type": "PPOPolicy", "optim_cfg": {"lr": 0.01}},
            "train": {"max_epochs": 2, "seed": 0, "torch_threads": 1, **train},
            "log": {"level": "ERROR"},
        }
    )
    check_config(config)
    return config


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
def test_gymnasium_environments_pass(task, rows):
    check_env(EnvConfig(name="e", backend="gymnasium", task=task, num_envs=rows), steps=210)


class Worker(BaseEnv):
    """One row, episodes of three steps; `fault` breaks one rule."""

    fault = ""

    def get_observation_space(self):
        return gym.spaces.Box(-1, 1, (2,), np.float32)

    def get_action_space(self):
        return gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        if seed is not None:
            self.random = np.random.default_rng(None if self.fault == "seed" else seed)
        return EnvRet("else" if self.fault == "id" else self.env_id, self._look())

    def step(self, policy_resp):
        self.steps += 1
        ended = np.bool_(self.steps == 3)
        info = {}
        if ended:
            self.steps = 0
            info = {"final_obs": self._look(), "_final_obs": np.bool_(True)}
        if self.fault == "final":
            info = {}
        reward = np.ones(1, np.float32) if self.fault == "reward" else np.float32(1)
        no = np.float32(0) if self.fault == "flag" else np.bool_(False)
        return EnvRet(self.env_id, self._look(), reward, no, ended, info)

    def _look(self):
        scale = 5 if self.fault == "space" else 1
        return (scale * self.random.uniform(0.5, 1, 2)).astype(np.float32)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("", None),
        ("seed", "two different first observations"),
        ("id", "expected the worker's"),
        ("reward", r"last_reward has shape \(1,\); expected \(\)"),
        ("flag", "last_terminated has dtype float32; expected bool"),
        ("space", "observation is not in Box"),
        ("final", "hand over each finished episode's last observation"),
    ],
)
def test_a_worker_that_breaks_one_rule_is_told_which(fault, text):
    worker = Worker(EnvConfig(name="w", backend="w", task="t"))
    worker.fault = fault
    if text is None:
        check_env(worker)
    else:
        with pytest.raises(ContractError, match=text):
            check_env(worker)


META = EnvMeta("e-0", gym.spaces.Discrete(3), gym.spaces.Box(-1, 1, (4,)), 2)


@pytest.mark.parametrize(
    "action_space",
    [
        gym.spaces.Discrete(3),
        gym.spaces.Box(-1, 1, (2,)),
        gym.spaces.MultiDiscrete([2, 3]),
        gym.spaces.MultiBinary(3),
    ],
)
@pytest.mark.parametrize("rows", [1, 2])
def test_ppo_passes_for_every_kind_of_action(action_space, rows):
    meta = EnvMeta("e-0", action_space, gym.spaces.Box(-1, 1, (4,)), rows)
    check_policy(PPOPolicy, config_of().policy, meta)


class Forgetful(PPOPolicy):
    """Its checkpoint forgets the critic's head."""

    def load_checkpoint(self, path):
        before = self.actor_critic.value_head.weight.detach().clone()
        super().load_checkpoint(path)
        with torch.no_grad():
            self.actor_critic.value_head.weight.copy_(before)


def test_a_policy_whose_checkpoint_forgets_a_tensor_is_told_which():
    with pytest.raises(ContractError, match=r"EVAL differs from TRAIN in \['actor_critic.value"):
        check_policy(Forgetful, config_of().policy, META)


class WrongShape(PPOPolicy):
    """Answers one action for two rows."""

    batched_rollout = False

    def rollout_step(self, env_ret, **kwargs):
        response = super().rollout_step(env_ret)
        response.action = response.action[:1]
        return response


def test_a_policy_that_answers_the_wrong_shape_is_told_what_was_expected():
    with pytest.raises(ContractError, match=r"the action has shape \(1,\); expected \(2,\)"):
        check_policy(WrongShape, config_of().policy, META)


@pytest.mark.parametrize("kind", ["RolloutBuffer", "ReplayBuffer"])
def test_the_buffers_pass(kind):
    check_buffer(lambda: build_data_buffer(kind, BufferConfig(type=kind, capacity=64)))


def test_a_buffer_that_mixes_rewards_up_is_told_so():
    def broken():
        buffer = build_data_buffer("RolloutBuffer", BufferConfig(type="RolloutBuffer", capacity=64))
        keep = buffer._store
        buffer._store = lambda rows: keep({**rows, ("reward",): rows["reward",].roll(1)})
        return buffer

    with pytest.raises(ContractError, match="another step's"):
        check_buffer(broken)


def test_the_synchronous_engine_passes():
    check_engine(config_of())


def test_random_values_fit_the_spaces():
    env_ret = random_env_ret(META, seed=3)
    assert env_ret.observation.shape == (2, 4)
    assert random_response(META, "e-0", value=1.0).action.shape == (2,)


@pytest.mark.parametrize("continuous", [False, True])
def test_ppo_learns_the_target_in_seconds(tmp_path, continuous):
    """A random policy scores 3.3 of 10, or -6.7 and worse; the best is 10, or 0."""
    from rlightning.launch import run_main, train_main

    config = config_of(max_epochs=30, max_rollout_steps=64, eval_episodes=20)
    config.env[0].env_kwargs.continuous = continuous
    config.log.log_dir = str(tmp_path)
    results = []

    def main(run):
        train_main(run)
        from rlightning.utils.logger import get_metrics_logger

        results.append(get_metrics_logger().latest["eval/episode_return"])

    run_main(main, config)
    assert results[0] > (-0.5 if continuous else 9.0)
