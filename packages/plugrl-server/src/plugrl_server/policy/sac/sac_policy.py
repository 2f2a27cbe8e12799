"""The networks of soft actor-critic, and acting with them."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from plugrl_server.errors import PolicyContractError
from plugrl_server.policy.base_torch_policy import BaseTorchPolicy
from plugrl_server.policy.observation import join_states
from plugrl_server.policy.registration import register_policy
from rlightning.models.mlp import MLP
from rlightning.ops.distributions import squashed_gaussian_log_prob, squashed_gaussian_sample
from rlightning.ops.q_learning import polyak_update

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from plugrl_server.policy.sac.sac_config import SACPolicyConfig

__all__ = ["SACPolicy"]

LOG_STD_BOUNDS = (-5.0, 2.0)


@register_policy("sac-policy")
@final
class SACPolicy(BaseTorchPolicy):
    """Actions ``low + (tanh(u) + 1) / 2 * (high - low)`` with Gaussian ``u``; two critics.

    Args:
        config: widths, bounds and the temperature.

    Attributes:
        actor: state to means and logarithms of deviations, ``[B, 2 * action_dim]``.
        critics: two networks, ``(state, action)`` to a value each.
        target_critics: their slow copies.
        log_alpha: logarithm of the temperature; a parameter, so that it is saved.

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
        hidden, width = tuple(config.hidden_dims), config.state_dim + config.action_dim
        self.actor = MLP(
            config.state_dim, hidden, 2 * config.action_dim, activation_name="relu", out_gain=0.01
        )
        self.critics = nn.ModuleList(
            MLP(width, hidden, 1, activation_name="relu") for _ in range(2)
        )
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(requires_grad=False)
        self.log_alpha = nn.Parameter(torch.tensor(math.log(config.alpha)))
        self.log_alpha.requires_grad = config.autotune
        self.to(self.device)

    # ---- acting --------------------------------------------------------------------------------

    def prepare_observation(self, _obs: dict[str, Any]) -> np.ndarray[Any, Any]:
        """Give the state vector, float32 ``[n, state_dim]``.

        Raises:
            ObservationError: the client sends other states than the configuration says.
        """
        return join_states(_obs, self.config.state_keys, self.config.state_dim)

    @torch.no_grad()
    def get_action_and_runtime_state(self, _obs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Draw one action per row, ``[n, 1, action_dim]``; keep the state and the action."""
        obs = self.extract_model_obs_tensor(_obs)
        mean, log_std = self._distribution(obs.to(self.device))
        if self.config.deterministic:
            squashed = mean.tanh()
        else:
            squashed, _ = squashed_gaussian_sample(mean, log_std)
        action = self._scale(squashed).cpu()
        return action.numpy()[:, None], {"obs": obs, "action": action}

    def fake_runtime_state(self, batch_size: int) -> dict[str, Any]:
        """Zeros of the right shapes and dtypes."""
        return {
            "obs": torch.zeros(batch_size, self.config.state_dim),
            "action": torch.zeros(batch_size, self.action_dim),
        }

    def _distribution(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = self.actor(obs).chunk(2, dim=-1)
        low, high = LOG_STD_BOUNDS
        return mean, low + 0.5 * (high - low) * (raw.tanh() + 1.0)

    def _scale(self, squashed: Tensor) -> Tensor:
        low, high = self.config.action_low, self.config.action_high
        scaled: Tensor = low + (squashed + 1.0) * (0.5 * (high - low))
        return scaled

    # ---- learning ------------------------------------------------------------------------------

    def sample_with_log_prob(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Draw differentiable actions.

        Args:
            obs: ``[B, state_dim]`` on the policy's device.

        Returns:
            Actions ``[B, action_dim]`` within the bounds and their log-densities ``[B]``, the
            change of volume from tanh and from the bounds included.
        """
        mean, log_std = self._distribution(obs)
        squashed, pre_tanh = squashed_gaussian_sample(mean, log_std)
        scale = 0.5 * (self.config.action_high - self.config.action_low)
        log_prob = squashed_gaussian_log_prob(pre_tanh, mean, log_std)
        return self._scale(squashed), log_prob - self.action_dim * math.log(scale)

    def q_values(self, obs: Tensor, action: Tensor, *, target: bool = False) -> Tensor:
        """Estimate action values by both critics (or their slow copies), ``[2, B]``."""
        joined = torch.cat([obs, action], -1)
        critics = self.target_critics if target else self.critics
        return torch.stack([critic(joined).squeeze(-1) for critic in critics])

    def actor_parameters(self) -> list[nn.Parameter]:
        """What the policy's optimizer moves."""
        return list(self.actor.parameters())

    def critic_parameters(self) -> list[nn.Parameter]:
        """What the critics' optimizer moves."""
        return list(self.critics.parameters())

    def update_targets(self, tau: float) -> None:
        """Move the slow critics a fraction `tau` of the way."""
        polyak_update(self.target_critics.parameters(), self.critics.parameters(), tau=tau)
