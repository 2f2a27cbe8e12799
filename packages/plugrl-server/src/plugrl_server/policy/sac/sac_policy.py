"""The networks of soft actor-critic, and acting with them.

They are those of rlightning's `SACPolicy`, by the same names: a checkpoint of one loads in the
other.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from gymnasium import spaces
from torch import nn

from plugrl_server.errors import PolicyContractError
from plugrl_server.policy.base_torch_policy import BaseTorchPolicy
from plugrl_server.policy.observation import join_states
from plugrl_server.policy.registration import register_policy
from rlightning.models.q_networks import (
    CriticConfig,
    QEnsemble,
    SquashedGaussianActor,
    UnitActions,
    frozen_copy,
)
from rlightning.ops.distributions import squashed_gaussian_log_prob, squashed_gaussian_sample
from rlightning.ops.q_learning import polyak_update

if TYPE_CHECKING:
    from torch import Tensor

    from plugrl_server.policy.sac.sac_config import SACPolicyConfig

__all__ = ["SACPolicy"]


@register_policy("sac-policy")
@final
class SACPolicy(BaseTorchPolicy):
    """Actions ``low + (tanh(u) + 1) / 2 * (high - low)`` with Gaussian ``u``; two critics.

    Args:
        config: widths, bounds and the temperature.

    Attributes:
        actor: state to means and logarithms of deviations, ``[B, action_dim]`` each.
        critic: state and action, in [-1, 1], to the values of two networks, ``[2, B]``.
        target_critic: its slow copy.
        log_alpha: logarithm of the temperature; a parameter, so that it is saved.
        n_updates: gradient steps so far; a buffer, so that it is saved.

    Raises:
        PolicyContractError: the bounds are the wrong way round.
    """

    def __init__(self, config: SACPolicyConfig) -> None:
        super().__init__(config)
        if config.action_low >= config.action_high:
            raise PolicyContractError(
                f"action_low is {config.action_low}, action_high {config.action_high}; the lower "
                "bound must be the smaller one"
            )
        self.action_dim, self.action_horizon = config.action_dim, 1
        network = CriticConfig(hidden_sizes=list(config.hidden_dims), activation="relu")
        space = spaces.Box(-np.inf, np.inf, (config.state_dim,), np.float32)
        low, high = config.action_low, config.action_high
        self.unit_actions = UnitActions(spaces.Box(low, high, (config.action_dim,), np.float32))
        self.actor = SquashedGaussianActor(space, config.action_dim, network)
        self.critic = QEnsemble(space, config.action_dim, network)
        self.target_critic = frozen_copy(self.critic)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(config.alpha)))
        self.log_alpha.requires_grad = config.autotune
        self.n_updates: Tensor
        self.register_buffer("n_updates", torch.zeros((), dtype=torch.int64))
        self.to(self.device)

    # ---- acting --------------------------------------------------------------------------------

    def prepare_observation(self, _obs: dict[str, Any]) -> np.ndarray[Any, Any]:
        """Give the state vector, float32 ``[n, state_dim]``.

        Raises:
            ObservationError: the client sends other states than the configuration says.
        """
        keys, width = self.config.state_keys, self.config.state_dim
        return join_states(_obs, keys, width, width_flag="--policy.state-dim")

    @torch.no_grad()
    def get_action_and_runtime_state(self, _obs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Draw one action per row, ``[n, 1, action_dim]``; keep the state and the action."""
        obs = self.extract_model_obs_tensor(_obs)
        mean, log_std = self.actor(obs.to(self.device))
        if self.config.deterministic:
            squashed = mean.tanh()
        else:
            squashed, _ = squashed_gaussian_sample(mean, log_std)
        action = self.unit_actions.to_env(squashed).cpu()
        return action.numpy()[:, None], {"obs": obs, "action": action}

    def fake_runtime_state(self, batch_size: int) -> dict[str, Any]:
        """Zeros of the right shapes and dtypes."""
        return {
            "obs": torch.zeros(batch_size, self.config.state_dim),
            "action": torch.zeros(batch_size, self.action_dim),
        }

    # ---- learning ------------------------------------------------------------------------------

    def sample_with_log_prob(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Draw differentiable actions.

        Args:
            obs: ``[B, state_dim]`` on the policy's device.

        Returns:
            Actions ``[B, action_dim]`` within the bounds and their log-densities ``[B]``, the
            change of volume from tanh and from the bounds included.
        """
        mean, log_std = self.actor(obs)
        squashed, pre_tanh = squashed_gaussian_sample(mean, log_std)
        scale = 0.5 * (self.config.action_high - self.config.action_low)
        log_prob = squashed_gaussian_log_prob(pre_tanh, mean, log_std)
        return self.unit_actions.to_env(squashed), log_prob - self.action_dim * math.log(scale)

    def q_values(self, obs: Tensor, action: Tensor, *, target: bool = False) -> Tensor:
        """Estimate action values by both critics (or their slow copies), ``[2, B]``."""
        critic = self.target_critic if target else self.critic
        values: Tensor = critic(obs, self.unit_actions.to_unit(action))
        return values

    def actor_parameters(self) -> list[nn.Parameter]:
        """What the policy's optimizer moves."""
        return list(self.actor.parameters())

    def critic_parameters(self) -> list[nn.Parameter]:
        """What the critics' optimizer moves."""
        return list(self.critic.parameters())

    def update_targets(self, tau: float) -> None:
        """Move the slow critics a fraction `tau` of the way."""
        polyak_update(self.target_critic.parameters(), self.critic.parameters(), tau=tau)
