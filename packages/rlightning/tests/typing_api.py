"""Code as a user writes it, checked by mypy and never run: names, signatures and their types."""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import nn

import rlightning
from rlightning.buffer import DataBuffer
from rlightning.buffer.rollout_buffer import RolloutBuffer
from rlightning.buffer.sampler import AllDataSampler, BaseSampler, BatchSampler, UniformSampler
from rlightning.engine import BaseEngine, SyncRLEngine
from rlightning.env import BaseEnv, EnvGroup
from rlightning.env import EnvMeta as EnvMetaOfEnv
from rlightning.env.utils.utils import default_env_preprocess_fn
from rlightning.policy import BasePolicy, PolicyGroup
from rlightning.policy.base_policy import PolicyRole, set_nested_attr
from rlightning.types import (
    BatchedData,
    EnvMeta,
    EnvRet,
    MultiAgentEnvRet,
    MultiAgentPolicyResponse,
    PolicyResponse,
    Processed_EnvRet_fields,
)
from rlightning.utils.builders import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    define_env_instance_cfgs,
)
from rlightning.utils.config import (
    BufferConfig,
    ClusterConfig,
    Config,
    EnvConfig,
    LogConfig,
    MainConfig,
    PolicyConfig,
    ResourcePoolConfig,
    SamplerConfig,
    StorageConfig,
    TrainConfig,
    WeightBufferConfig,
)
from rlightning.utils.launch import launch
from rlightning.utils.logger import get_logger, get_metrics_logger, log_metric, setup_logger
from rlightning.utils.profiler import profiler
from rlightning.utils.registry import (
    BUFFERS,
    ENGINE,
    ENVS,
    POLICIES,
    WEIGHTS,
    Registry,
    load_modules_from_config,
)

assert_type(rlightning.__version__, str)
assert_type(Processed_EnvRet_fields, tuple[str, str, str, str, str])

SECTIONS: tuple[type[Config], ...] = (
    BufferConfig,
    ClusterConfig,
    EnvConfig,
    LogConfig,
    MainConfig,
    PolicyConfig,
    ResourcePoolConfig,
    SamplerConfig,
    StorageConfig,
    TrainConfig,
    WeightBufferConfig,
)
REGISTRIES: tuple[Registry, ...] = (BUFFERS, ENGINE, ENVS, POLICIES, WEIGHTS)
SAMPLERS: tuple[type[BaseSampler], ...] = (AllDataSampler, BatchSampler, UniformSampler)
LOGGING = (get_logger, get_metrics_logger, log_metric, setup_logger, profiler)


@POLICIES.register("MyPolicy")
class MyPolicy(BasePolicy):
    """The guide's policy, with annotations."""

    actor: nn.Linear

    def construct_network(self, env_meta: EnvMeta, *args: Any, **kwargs: Any) -> None:
        self.actor = nn.Linear(4, env_meta.action_space.shape[0])

    def setup_optimizer(self, optim_cfg: Any) -> None:
        self.optimizer = torch.optim.AdamW(self.actor.parameters(), lr=optim_cfg.lr)

    def rollout_step(self, env_ret: EnvRet, **kwargs: Any) -> PolicyResponse:
        observation = env_ret.observation.float().unsqueeze(0)
        return PolicyResponse(env_id=env_ret.env_id, action=self.actor(observation), value=0.0)

    def postprocess(
        self, env_ret: EnvRet | None = None, policy_resp: PolicyResponse | None = None
    ) -> None:
        pass

    def update_dataset(self, data: Any) -> None:
        self.dataset = data

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.log_metric("kl", 0.0)
        return {"loss": 0.0}

    def get_trainable_parameters(self) -> dict[str, Any]:
        return {name: module.state_dict() for name, module in self.model_list}

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> None:
        for name, module in self.model_list:
            module.load_state_dict(state_dict[name], strict=strict)


@ENVS.register("my_env")
class MyEnv(BaseEnv):
    """An environment of one's own, with a key of its own."""

    class Extras(Config):
        """Its keys."""

        gravity: float = 9.81

    def reset(self, *args: Any, **kwargs: Any) -> EnvRet:
        return EnvRet(env_id=self.env_id, observation=0)

    def step(self, policy_resp: PolicyResponse) -> EnvRet:
        return EnvRet(self.env_id, policy_resp.action, 1.0, False, False, info={"episode_info": {}})


@BUFFERS.register()
class MyBuffer(RolloutBuffer):
    """A buffer of one's own."""


@ENGINE.register("my_engine")
class MyEngine(SyncRLEngine):
    """An engine whose hooks are overridden."""

    def _pre_rollout_hook(self) -> None:
        super()._pre_rollout_hook()

    def _post_train_hook(self) -> None:
        self.log({"epoch": self.epoch}, "mine")


def values() -> None:
    """Types of what travels."""
    batch = BatchedData(["a", "b"], [1, 2])
    assert_type(batch, BatchedData[int])
    assert_type(batch["a"], int)
    assert_type(batch.ids(), tuple[str, ...])
    assert_type(batch.values(), tuple[int, ...])
    ret = MultiAgentEnvRet("a", 0)
    assert_type(ret.cpu(), EnvRet)
    assert_type(EnvRet.fields(), tuple[str, ...])
    assert_type(PolicyResponse("a", action=1).numpy(), PolicyResponse)
    assert_type(PolicyResponse("a").compute_sent_latency(), float)
    assert_type(MultiAgentPolicyResponse("a").to_dict(), dict[str, Any])
    assert_type(PolicyRole("train"), PolicyRole)
    assert_type(EnvMetaOfEnv(num_envs=2).num_envs, int | None)
    set_nested_attr(nn.Module(), "x", 1)


def main(config: MainConfig) -> None:
    """The usual five lines."""
    load_modules_from_config(config)
    assert_type(config.train.max_epochs, int)
    assert_type(config.env, list[EnvConfig])
    assert_type(define_env_instance_cfgs(config.env[0], 2), list[EnvConfig])
    env_group = build_env_group(config.env, preprocess_fn=default_env_preprocess_fn)
    policy_group = build_policy_group(config.policy.type, config.policy, config.cluster)
    buffer = build_data_buffer(config.buffer.type, config.buffer)
    engine = build_engine(config, env_group, policy_group, buffer)
    assert_type(env_group, EnvGroup)
    assert_type(policy_group, PolicyGroup)
    assert_type(buffer, DataBuffer)
    assert_type(engine, BaseEngine)
    engine.run()


if __name__ == "__main__":
    launch(main_func=main, config_path="conf")
