"""Discrete actions for PPO."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from gymnasium import spaces

from plugrl_server.policy.actor_critic_policy import ActorCriticPolicy
from plugrl_server.policy.registration import register_policy

if TYPE_CHECKING:
    from plugrl_server.policy.categorical.categorical_config import CategoricalPolicyConfig

__all__ = ["CategoricalPolicy"]


@register_policy("categorical-policy")
@final
class CategoricalPolicy(ActorCriticPolicy):
    """Indices, int64; a chunk is ``[n, 1]``, so that a client's action has no dimension.

    Args:
        config: widths and switches.
    """

    def __init__(self, config: CategoricalPolicyConfig) -> None:
        super().__init__(config, spaces.Discrete(config.num_actions))
        self.action_dim = 1
