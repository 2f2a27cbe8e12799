"""``mujoco-v1``: Gymnasium's MuJoCo bodies."""

from __future__ import annotations

import dataclasses

from plugrl_env_client.envs.gym_env import GymEnv, GymEnvConfig
from plugrl_env_client.utils.registration import register_env, register_env_config

__all__ = ["MuJoCoEnv", "MuJoCoEnvConfig"]


@register_env_config("MuJoCo-v1")
@dataclasses.dataclass
class MuJoCoEnvConfig(GymEnvConfig):
    """Options of a MuJoCo environment."""

    name: str = "HalfCheetah-v5"
    """Which body: HalfCheetah-v5, Hopper-v5, Ant-v5, ..."""


@register_env("MuJoCo-v1")
class MuJoCoEnv(GymEnv[MuJoCoEnvConfig]):
    """A MuJoCo environment; its state vector is ``obs``, float32."""
