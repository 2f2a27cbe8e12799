"""Configuration of ``sac-policy``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from plugrl_server.common.ranges import FINITE, UNBOUNDED, Ranges
from plugrl_server.policy.registration import register_policy_config
from plugrl_server.policy.torch_config import BaseTorchPolicyConfig

__all__ = ["SACPolicyConfig"]


@register_policy_config("sac-policy")
@dataclasses.dataclass
class SACPolicyConfig(BaseTorchPolicyConfig):
    """A squashed Gaussian and two action-value networks."""

    _ranges: ClassVar[Ranges] = {
        "state_dim": (1, UNBOUNDED),
        "action_dim": (1, UNBOUNDED),
        "action_high": (-FINITE, FINITE),
        "action_low": (-FINITE, FINITE),
        "alpha": (1e-12, FINITE),
        "hidden_dims": (1, UNBOUNDED),
    }

    state_dim: int = 11
    """Width of the state vector."""
    action_dim: int = 3
    """Width of an action."""
    action_high: float = 1.0
    """Upper bound of every action dimension."""
    action_low: float = -1.0
    """Lower bound of every action dimension."""
    alpha: float = 0.2
    """Temperature; its initial value where it is tuned."""
    autotune: bool = True
    """Learn the temperature towards an entropy of minus `action_dim`."""
    hidden_dims: tuple[int, ...] = (256, 256)
    """Hidden layers of all networks."""
    state_keys: tuple[str, ...] = ("obs",)
    """Names under ``states`` that are concatenated, in this order."""
    deterministic: bool = False
    """Act with the mean; for evaluation."""
