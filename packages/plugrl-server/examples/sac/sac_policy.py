"""A policy of one's own for soft actor-critic, in one file: configuration, networks, registration.

Run it from anywhere::

    python sac_policy.py sac_policy default sac default --policy.state-dim 17 --policy.action-dim 6

It differs from the built-in ``sac-policy`` in nothing that matters; it is here to be read and
changed. `get_action_and_runtime_state` and `fake_runtime_state` are what every policy has; the
methods under "for the algorithm" are what ``sac`` asks of a policy.
"""

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from plugrl_server.policy.base_torch_policy import BaseTorchPolicy, BaseTorchPolicyConfig
from plugrl_server.policy.registration import register_policy, register_policy_config
from rlightning.ops.distributions import squashed_gaussian_log_prob, squashed_gaussian_sample
from rlightning.ops.q_learning import polyak_update

UID = "sac_policy"


@register_policy_config(UID)
@dataclasses.dataclass
class SACPolicyConfig(BaseTorchPolicyConfig):
    """A squashed Gaussian and two action-value networks."""

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
    """Learn the temperature."""
    hidden_dim: int = 256
    """Width of the two hidden layers of every network."""


def network(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.ReLU(),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Linear(hidden, outputs),
    )


@register_policy(UID)
class SACPolicy(BaseTorchPolicy):
    """Acts with ``tanh`` of a Gaussian, scaled to the bounds."""

    def __init__(self, config: SACPolicyConfig) -> None:
        super().__init__(config)
        self.action_dim, self.action_horizon = config.action_dim, 1
        width = config.state_dim + config.action_dim
        self.actor = network(config.state_dim, config.hidden_dim, 2 * config.action_dim)
        self.critics = nn.ModuleList(network(width, config.hidden_dim, 1) for _ in range(2))
        self.target_critics = copy.deepcopy(self.critics)
        # A parameter, not a plain tensor: checkpoints hold it.
        self.log_alpha = nn.Parameter(torch.tensor(math.log(config.alpha)))
        self.log_alpha.requires_grad = config.autotune
        self.half_range = 0.5 * (config.action_high - config.action_low)
        self.to(self.device)

    def prepare_observation(self, _obs: dict[str, Any]) -> np.ndarray:
        """Give all states side by side, in the order of their names."""
        states = _obs["states"]
        joined = [np.asarray(states[name], np.float32) for name in sorted(states)]
        return np.concatenate(joined, axis=1)

    @torch.no_grad()
    def get_action_and_runtime_state(self, _obs: dict[str, Any]) -> tuple[np.ndarray, dict]:
        """Draw one action per row, ``[n, 1, action_dim]``."""
        obs = self.extract_model_obs_tensor(_obs)
        action, _ = self.sample_with_log_prob(obs.to(self.device))
        action = action.cpu()
        return action[:, None, :].numpy(), {"obs": obs, "action": action}

    def fake_runtime_state(self, batch_size: int) -> dict:
        """Zeros of the same shapes and dtypes."""
        return {
            "obs": torch.zeros(batch_size, self.config.state_dim),
            "action": torch.zeros(batch_size, self.action_dim),
        }

    # ---- for the algorithm ---------------------------------------------------------------------

    def sample_with_log_prob(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Draw differentiable actions ``[B, action_dim]`` with their log-densities ``[B]``."""
        mean, log_std = self.actor(obs).chunk(2, dim=-1)
        log_std = log_std.clamp(-5.0, 2.0)
        squashed, pre_tanh = squashed_gaussian_sample(mean, log_std)
        log_prob = squashed_gaussian_log_prob(pre_tanh, mean, log_std)
        action = self.config.action_low + (squashed + 1.0) * self.half_range
        return action, log_prob - self.action_dim * math.log(self.half_range)

    def q_values(self, obs: Tensor, action: Tensor, *, target: bool = False) -> Tensor:
        """Estimate action values by both critics, ``[2, B]``."""
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


if __name__ == "__main__":
    from plugrl_server.cli import main

    main()
