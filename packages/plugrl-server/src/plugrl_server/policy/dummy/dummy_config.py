"""Configuration of ``dummy-policy``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from plugrl_server.common.ranges import UNBOUNDED, Ranges
from plugrl_server.policy.base_policy import BasePolicyConfig
from plugrl_server.policy.registration import register_policy_config

__all__ = ["DummyPolicyConfig"]


@register_policy_config("dummy-policy")
@dataclasses.dataclass
class DummyPolicyConfig(BasePolicyConfig):
    """Random actions."""

    _ranges: ClassVar[Ranges] = {
        "action_dim": (1, UNBOUNDED),
        "action_horizon": (1, UNBOUNDED),
    }

    discrete: bool = False
    """Draw integers below `action_dim` instead of vectors in [-1, 1)."""
    action_dim: int = 7
    """Width of an action, or number of discrete actions."""
    action_horizon: int = 4
    """Actions per chunk."""
