"""An environment worker that dies is started again by the next step, whatever is asked before."""

import gymnasium as gym
import numpy as np
import pytest

from rlightning.config import EnvConfig
from rlightning.env import BaseEnv
from rlightning.env.env_proxy import EnvProxy
from rlightning.errors import EnvWorkerError
from rlightning.runtime.base import WorkerSpec
from rlightning.runtime.supervision import Supervised
from rlightning.testing import LocalRuntime
from rlightning.types import EnvRet, PolicyResponse


class Settings(BaseEnv):
    """Shows its steps and whether it evaluates."""

    has_test_set = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.env = gym.make("CartPole-v1")
        self.shown = np.zeros(2, np.float32)

    def reset(self):
        self.shown[0] = 0
        return EnvRet(self.env_id, self.shown.copy())

    def step(self, policy_resp):
        self.shown[0] += 1
        ended = bool(self.shown[0] % 2 == 0)
        info = {"final_obs": self.shown.copy(), "_final_obs": np.True_} if ended else {}
        return EnvRet(self.env_id, self.shown.copy(), 1.0, ended, False, info)

    def get_state(self):
        return {"shown": self.shown.tolist()}

    def apply_evaluate_cfg(self):
        self.shown[1] = 1


@pytest.fixture
def runtime():
    return LocalRuntime()


@pytest.fixture
def env(runtime):
    def spawn(make, args):
        spec = WorkerSpec(name="env-0", make=make, args=args)
        return Supervised(runtime, spec, max_restarts=1)

    config = EnvConfig.from_dict({"name": "e", "backend": "none", "task": "none"})
    env = EnvProxy(Settings, config, 0, None, "train", spawn)
    env.init()
    env._reset()
    return env


def act(env):
    return env._step(PolicyResponse(env.env_id, action=np.zeros(1, np.int64)))


def test_what_is_asked_between_steps_does_not_end_a_run(env, runtime):
    act(env), act(env), act(env)
    assert env.get_env_stats()["episode_length"] == [2.0, 1]
    assert env.get_state() == {"shown": [3.0, 0.0]}
    runtime.close()  # the worker is gone
    assert env.get_env_stats(reset=True) == {}
    assert env.get_state() is None, "what is saved starts new episodes"
    assert env.has_test_set
    env.finish_rollout()
    env.offload()
    env.reload()
    env.apply_evaluate_cfg()
    env_ret = act(env)
    assert env_ret.info["_lost"]
    assert env_ret.observation.tolist() == [0.0, 1.0], "with the settings that it was to have"
    assert env.take_lost_episodes() == 1
    assert act(env).observation.tolist() == [1.0, 1.0]


def test_a_worker_that_dies_too_often_ends_the_run(env, runtime):
    runtime.close()
    act(env)
    runtime.close()
    with pytest.raises(EnvWorkerError, match="1 times already"):
        act(env)
