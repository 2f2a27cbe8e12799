"""Continuous actions for PPO."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, final

import numpy as np
from gymnasium import spaces

from plugrl_server.policy.actor_critic_policy import ActorCriticPolicy, ActorCriticRuntimeState
from plugrl_server.policy.registration import register_policy

if TYPE_CHECKING:
    from plugrl_server.policy.gaussian.gaussian_config import GaussianPolicyConfig

__all__ = ["GaussianPolicy", "GaussianRuntimeState"]


@dataclasses.dataclass
class GaussianRuntimeState(ActorCriticRuntimeState):
    """See `ActorCriticRuntimeState`; the action is float32 ``[n, action_dim]``."""


@register_policy("gaussian-policy")
@final
class GaussianPolicy(ActorCriticPolicy):
    """Tanh networks, orthogonal weights, one spread per action dimension.

    Args:
        config: widths and switches.
    """

    runtime_state = GaussianRuntimeState

    def __init__(self, config: GaussianPolicyConfig) -> None:
        space = spaces.Box(-np.inf, np.inf, (config.action_dim,), np.float32)
        super().__init__(config, space, log_std_init=config.log_std_init)
        self.action_dim = config.action_dim

    def to_env(self, action: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Clip to ``action_clip``."""
        clip = self.config.action_clip
        clipped: np.ndarray[Any, Any] = np.maximum(action, -clip)
        np.minimum(clipped, clip, out=clipped)
        return clipped
