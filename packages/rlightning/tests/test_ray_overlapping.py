"""Engines that act while they learn, on Ray: how they end, how they fail, and what holds them."""

import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
    open_cluster,
)
from rlightning.checkpoint import list_checkpoints
from rlightning.config import MainConfig
from rlightning.env import BaseEnv
from rlightning.policy import BasePolicy
from rlightning.runtime import open_run
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.logger import close_logger
from rlightning.utils.logger.files import read_rows
from rlightning.utils.registry import ENVS, POLICIES

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@ENVS.register("ray_paced")
class Paced(BaseEnv):
    """Shows nothing, as slowly as asked; `fails_at` a step, where asked to."""

    takes_arrays = True

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.env = gym.make("CartPole-v1")
        self.settings = self.config.env_kwargs.to_dict()
        self.taken = 0

    def reset(self):
        return EnvRet(self.env_id, np.zeros(4, np.float32))

    def step(self, policy_resp):
        time.sleep(self.settings.get("sleep_s", 0.0))
        self.taken += 1
        fail("env", self.settings.get("fails"), self.taken > 5)
        return EnvRet(self.env_id, np.zeros(4, np.float32), 1.0)


def fail(stage, wanted, is_time):
    if stage == wanted and is_time:
        raise ZeroDivisionError(f"the {stage} broke")


@POLICIES.register("RayFailsSomewhere")
class Failing(BasePolicy):
    """Learns next to nothing, and raises once in one of its stages, when something was learned."""

    batched_rollout = True

    def construct_network(self, env_meta, *args, **kwargs):
        self.actor = nn.Linear(4, 2)
        self.settings = self.config.model_cfg.to_dict()
        self.has_learned = self.has_failed = False

    def setup_optimizer(self, optim_cfg):
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.01)

    def fail(self, stage):
        if not self.has_failed and (self.has_learned or self.weights_version >= 1):
            self.has_failed = stage == self.settings["fails"]
            fail(stage, self.settings["fails"], is_time=True)

    def rollout_step(self, env_ret, **kwargs):
        self.fail("actor")
        action = torch.zeros(len(env_ret.observation), dtype=torch.int64)
        return PolicyResponse(env_ret.env_id, action=action)

    def postprocess(self, env_ret=None, policy_resp=None):
        self.fail("postprocessing")
        return policy_resp

    def update_dataset(self, data):
        self.fail("dataset")
        self.dataset = data

    def train(self, *args, **kwargs):
        self.fail("learner")
        time.sleep(self.settings.get("sleep_s", 0.0))
        loss = self.actor(self.dataset["observation"]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.has_learned = True
        return {"loss": float(loss.detach())}

    def get_trainable_parameters(self):
        if self.role_type == "train":
            self.fail("sender of weights")
        return super().get_trainable_parameters()

    def load_state_dict(self, *args, **kwargs):
        if self.role_type == "eval":
            self.fail("loader of weights")
        return super().load_state_dict(*args, **kwargs)


def fails_in_the_storage(reward):
    fails_in_the_storage.calls += 1
    fail("storage", "storage", is_time=fails_in_the_storage.calls > 20)
    return reward


fails_in_the_storage.calls = 0


def configuration(
    folder, *, remote=(), policy=None, env=None, buffer=None, engine="asyncrl", **train
):
    here = dict.fromkeys(("remote_train", "remote_eval", "remote_storage", "remote_env"), False)
    return MainConfig.from_dict(
        {
            "engine": engine,
            "debug": False,
            "verbose": False,
            "env": {"name": "e", "backend": "ray_paced", "task": "none", "env_kwargs": env or {}},
            "buffer": buffer
            or {"type": "RolloutBuffer", "capacity": 64, "sampler": {"type": "batch"}},
            "policy": {"type": "RayFailsSomewhere", "model_cfg": {"fails": None, **(policy or {})}},
            "train": {
                "max_epochs": 100_000,
                "batch_size": 16,
                "max_rollout_steps": 4,
                "eval_episodes": 1,
                "max_eval_rollout_steps": 2,
                "seed": 3,
                "torch_threads": 1,
                **train,
            },
            "log": {"log_dir": str(folder), "project": "p", "name": "n", "level": "ERROR"},
            "cluster": {**here, **{f"remote_{role}": True for role in remote}},
        }
    )


def run(config, **stages):
    """Run to the end; return the engine."""
    check_config(config)
    open_run(config)
    try:
        with open_cluster(config):
            env_group = build_env_group(config.env)
            policy_group = build_policy_group(config.policy.type, config.policy, config.cluster)
            buffer = build_data_buffer(config.buffer.type, config.buffer, seed=3, **stages)
            engine = build_engine(config, env_group, policy_group, buffer)
            engine.run()
            return engine
    finally:
        close_logger()


STAGES = {
    "env": "env", "actor": "eval", "postprocessing": "eval", "loader of weights": "eval",
    "dataset": "train", "learner": "train", "sender of weights": "train", "storage": "storage",
}  # fmt: skip


@pytest.mark.parametrize(
    "stage", [s if s == "storage" else pytest.param(s, marks=pytest.mark.slow) for s in STAGES]
)
def test_an_error_in_any_stage_of_a_worker_ends_the_run_with_itself(ray_cluster, tmp_path, stage):
    """A hundred thousand epochs would not end in the test's time."""
    role = STAGES[stage]
    engine = "async_rsl" if stage == "postprocessing" else "asyncrl"
    stages = {"reward_preprocessor": fails_in_the_storage} if stage == "storage" else {}
    config = configuration(
        tmp_path, remote=[role], policy={"fails": stage}, env={"fails": stage}, engine=engine
    )
    with pytest.raises(ZeroDivisionError, match=f"the {stage} broke") as caught:
        run(config, **stages)
    worker = "buffer-0" if role == "storage" else f"{role}-0"
    note = "\n".join(caught.value.__notes__)
    assert f"in worker {worker}:\nTraceback" in note
    assert list_checkpoints(tmp_path / "p" / "n" / "checkpoints")[-1].name == "crashed"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["asyncrl", "async_rsl"])
def test_workers_of_every_kind_with_a_slow_environment_go_on_to_the_end(
    ray_cluster, tmp_path, engine
):
    """A batch takes five seconds: what waits for it neither gives up nor learns from less."""
    config = configuration(
        tmp_path, remote=["train", "eval", "storage", "env"], env={"sleep_s": 0.3}, engine=engine,
        max_epochs=2, max_staleness=50,
    )  # fmt: skip
    assert run(config).epoch == 2
    ages = [
        row
        for row in read_rows(tmp_path / "p" / "n" / "metrics.jsonl")
        if "weights/staleness" in row
    ]
    assert len(ages) == 2


@pytest.mark.parametrize("fast", ["learner", pytest.param("env", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "remote", [["storage", "env"], pytest.param(["env"], marks=pytest.mark.slow)],
    ids=["storage elsewhere", "storage here"],
)  # fmt: skip
def test_the_limiter_holds_an_off_policy_run_to_its_ratio(ray_cluster, tmp_path, remote, fast):
    """Whoever is fast waits: 640 rows sampled, 4 per row inserted after the first 64."""
    buffer = {
        "type": "ReplayBuffer", "capacity": 1000, "min_size": 64, "samples_per_insert": 4.0,
        "error_buffer": 32.0,
    }  # fmt: skip
    config = configuration(
        tmp_path, remote=remote, buffer=buffer, batch_size=32, max_epochs=20, max_rollout_steps=1,
        env={"sleep_s": 0.01 if fast == "learner" else 0.0},
        policy={"sleep_s": 0.05 if fast == "env" else 0.0},
    )  # fmt: skip
    engine = run(config)
    assert engine.epoch == 20
    least, most = (64 + (640 + off) / 4 for off in (-32, 32))
    assert least <= engine.env_steps <= most + 3, "the last row waits for what follows it"
