"""Configuration of ``gaussian-policy``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from plugrl_server.common.ranges import FINITE, UNBOUNDED, Ranges
from plugrl_server.policy.actor_critic_config import ActorCriticPolicyConfig
from plugrl_server.policy.registration import register_policy_config

__all__ = ["GaussianPolicyConfig"]


@register_policy_config("gaussian-policy")
@dataclasses.dataclass
class GaussianPolicyConfig(ActorCriticPolicyConfig):
    """Continuous actions from a Gaussian whose spread does not depend on the state."""

    _ranges: ClassVar[Ranges] = {
        "action_dim": (1, UNBOUNDED),
        "action_clip": (0, UNBOUNDED),
        "log_std_init": (-FINITE, FINITE),
    }

    action_dim: int = 6
    """Width of an action."""
    action_clip: float = 1.0
    """Actions are sent within plus and minus this; stored actions are not clipped."""
    log_std_init: float = 0.0
    """Logarithm of the spread at the start."""
