"""``atari-v1``: Atari games with the usual treatment of frames."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from plugrl_env_client.envs.gym_env import GymEnv, GymEnvConfig
from plugrl_env_client.envs.gym_observation import ImageLayout  # noqa: TC001  # read by tyro
from plugrl_env_client.utils.registration import register_env, register_env_config

__all__ = ["AtariEnv", "AtariEnvConfig"]


@register_env_config("Atari-v1")
@dataclasses.dataclass
class AtariEnvConfig(GymEnvConfig):
    """Options of an Atari game."""

    name: str = "ALE/Pong-v5"
    """Which game."""
    image_layout: ImageLayout = "chw"
    """Stacked frames come first."""


@register_env("Atari-v1")
class AtariEnv(GymEnv[AtariEnvConfig]):
    """An Atari game: four stacked grey frames, the image ``image``, uint8 ``[n, 84, 84, 4]``."""

    wrappers: ClassVar[tuple[str, ...]] = ("atari",)
