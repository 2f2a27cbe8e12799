"""Configuration that policies on state vectors share. Needs no torch."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from plugrl_server.common.ranges import UNBOUNDED, Ranges
from plugrl_server.policy.torch_config import BaseTorchPolicyConfig

__all__ = ["ActorCriticPolicyConfig"]


@dataclasses.dataclass
class ActorCriticPolicyConfig(BaseTorchPolicyConfig):
    """A policy and a value function on state vectors."""

    _ranges: ClassVar[Ranges] = {
        "obs_dim": (1, UNBOUNDED),
        "hidden_dims": (1, UNBOUNDED),
        "obs_clip": (0, UNBOUNDED),
    }

    obs_dim: int = 17
    """Width of the state vector."""
    hidden_dims: tuple[int, ...] = (64, 64)
    """Hidden layers of policy and value function."""
    state_keys: tuple[str, ...] = ("obs",)
    """Names under ``states`` that are concatenated, in this order."""
    normalize_observations: bool = True
    """Subtract the running mean and divide by the running spread."""
    obs_clip: float = 10.0
    """Bound of normalised observations."""
    freeze_obs_stats: bool = False
    """Do not update the running mean and spread."""
    deterministic: bool = False
    """Always the likeliest action; for evaluation."""
