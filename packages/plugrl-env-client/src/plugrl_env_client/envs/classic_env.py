"""``classic-v1``: Gymnasium's classic control, toy text and Box2D."""

from __future__ import annotations

import dataclasses

from plugrl_env_client.envs.gym_env import GymEnv, GymEnvConfig
from plugrl_env_client.utils.registration import register_env, register_env_config

__all__ = ["ClassicEnv", "ClassicEnvConfig"]


@register_env_config("Classic-v1")
@dataclasses.dataclass
class ClassicEnvConfig(GymEnvConfig):
    """Options of a classic environment."""

    name: str = "CartPole-v1"
    """Which one: CartPole-v1, Pendulum-v1, LunarLander-v3, ..."""


@register_env("Classic-v1")
class ClassicEnv(GymEnv[ClassicEnvConfig]):
    """A classic environment; its state vector is ``obs``, float32."""
