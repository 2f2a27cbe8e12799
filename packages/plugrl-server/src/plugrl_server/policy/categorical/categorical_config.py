"""Configuration of ``categorical-policy``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from plugrl_server.common.ranges import UNBOUNDED, Ranges
from plugrl_server.policy.actor_critic_config import ActorCriticPolicyConfig
from plugrl_server.policy.registration import register_policy_config

__all__ = ["CategoricalPolicyConfig"]


@register_policy_config("categorical-policy")
@dataclasses.dataclass
class CategoricalPolicyConfig(ActorCriticPolicyConfig):
    """One of a number of discrete actions."""

    _ranges: ClassVar[Ranges] = {
        "num_actions": (1, UNBOUNDED),
    }

    obs_dim: int = 4
    """Width of the state vector."""
    num_actions: int = 2
    """How many actions there are; they are sent as 0, 1, ..."""
