"""What users write, checked by mypy and never run: an environment, a rollout."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from gymnasium import spaces

from plugrl_env_client.agent import ConnectionReplaced, ServerStopped, WebSocketEnvClientAgent
from plugrl_env_client.envs.base_env import Action, BaseEnv, BaseEnvConfig, Observation
from plugrl_env_client.runner import RolloutResult, rollout
from plugrl_env_client.utils.registration import make_vec, register_env, register_env_config


@register_env_config("Typed-v1")
@dataclasses.dataclass
class TypedConfig(BaseEnvConfig):
    width: int = 2


@register_env("Typed-v1", max_episode_steps=10, best_reward_threshold_for_success=1.0)
class TypedEnv(BaseEnv[TypedConfig]):
    def __init__(self, config: TypedConfig, num_envs: int = 1) -> None:
        super().__init__(config, num_envs)
        self.single_action_space = spaces.Box(-1, 1, (config.width,), np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        self.seed_rngs(seed)
        return self.look(), {}

    def step(self, actions: Action) -> tuple[Observation, Any, Any, Any, dict[str, Any]]:
        no = np.zeros(self.num_envs, np.bool_)
        return self.look(), np.zeros(self.num_envs, np.float32), no, no, {}

    def look(self) -> Observation:
        pose = np.zeros((self.num_envs, self.config.width))
        return Observation({}, {"pose": pose}, "hold still")


def run(host: str, port: int) -> float | None:
    agent = WebSocketEnvClientAgent(host, port, api_key=None, reconnect_on_server_stop=False)
    env = make_vec("typed-v1", 4, config=TypedConfig(width=3))
    now = np.arange(4)
    try:
        observation, _ = env.reset(seed=0)
        action: dict[str, Any] = agent.infer(observation, env_indices=now, step_ids=now)
        env.step(action["action"][0])
    except (ServerStopped, ConnectionReplaced) as ended:
        return float(ended.close.code)
    result: RolloutResult = rollout(env, agent, num_episodes=8, replan_steps=None, num_envs=4)
    mean: float | None = result.summary()["mean_return"]
    return mean
