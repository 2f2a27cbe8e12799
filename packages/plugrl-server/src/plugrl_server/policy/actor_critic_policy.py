"""A policy and a value function on state vectors: what ``gaussian-policy`` and others share.

The networks are rlightning's `ActorCritic`, observations are normalised by rlightning's
`RunningMeanStd`. Algorithms call `evaluate_actions`, `get_value` and `update_obs_stats`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch.nn.functional import linear

from plugrl_server.policy.base_torch_policy import BaseTorchPolicy
from plugrl_server.policy.observation import join_states
from rlightning.models.actor_critic import ActorCritic, ActorCriticOptions
from rlightning.ops.normalization import RunningMeanStd

if TYPE_CHECKING:
    from torch import Tensor

    from plugrl_server.policy.actor_critic_config import ActorCriticPolicyConfig

__all__ = ["ActorCriticPolicy", "ActorCriticRuntimeState"]


@dataclasses.dataclass
class ActorCriticRuntimeState:
    """What is needed to learn from an action. Tensors on the CPU."""

    obs: Any
    """The state vector before normalisation, float32 ``[n, obs_dim]``."""
    action: Any
    """As drawn, before any clipping, ``[n, *A]``."""
    logprob: Any
    """float32 ``[n]``."""
    value: Any
    """float32 ``[n]``."""


class ActorCriticPolicy(BaseTorchPolicy, ABC):
    """One action per step from a state vector.

    Args:
        config: widths and switches.
        action_space: of one environment.
        log_std_init: logarithm of the spread of continuous actions at the start.
    """

    runtime_state: type[ActorCriticRuntimeState] = ActorCriticRuntimeState

    def __init__(
        self,
        config: ActorCriticPolicyConfig,
        action_space: spaces.Space[Any],
        *,
        log_std_init: float = 0.0,
    ) -> None:
        super().__init__(config)
        space = spaces.Box(-np.inf, np.inf, (config.obs_dim,), np.float32)
        options = ActorCriticOptions(
            hidden_sizes=tuple(config.hidden_dims),
            shared_encoder=False,
            activation="tanh",
            log_std_init=log_std_init,
        )
        self.actor_critic = ActorCritic(space, action_space, options)
        self.obs_stats = RunningMeanStd((config.obs_dim,), clip=config.obs_clip)
        self.action_space = action_space
        self.action_horizon = 1
        self.to(self.device)
        self._layers = self.actor_critic.plain_layers()
        self._scale: tuple[tuple[int, int], Tensor, Tensor] | None = None

    def prepare_observation(self, _obs: dict[str, Any]) -> np.ndarray[Any, Any]:
        """Give the state vector, float32 ``[n, obs_dim]``.

        Raises:
            ObservationError: the client sends other states than ``state_keys`` and ``obs_dim`` say.
        """
        return join_states(_obs, self.config.state_keys, self.config.obs_dim)

    @torch.no_grad()
    def get_action_and_runtime_state(
        self, _obs: dict[str, Any]
    ) -> tuple[np.ndarray[Any, Any], ActorCriticRuntimeState]:
        """Draw one action per row (the likeliest one if ``deterministic``), ``[n, 1, *A]``."""
        obs = self.extract_model_obs_tensor(_obs)
        distribution, value = self._forward(self._normalize(obs.to(self.device)))
        action = distribution.mode() if self.config.deterministic else distribution.sample()
        state = self.runtime_state(
            obs=obs,
            action=action.cpu(),
            logprob=distribution.log_prob(action).cpu(),
            value=value.cpu(),
        )
        return self.to_env(state.action.numpy())[:, None], state

    def _forward(self, obs: Tensor) -> tuple[Any, Tensor]:
        """Compute what ``actor_critic`` computes, without the cost of calling eighteen modules.

        A small network's forward pass is mostly the overhead of its calls.
        """
        layers = self._layers
        if layers is None:
            distribution, value = self.actor_critic(obs)
            return distribution, value
        features, critic_features = obs, obs
        for layer in layers.actor[:-1]:
            features = torch.tanh(linear(features, layer.weight, layer.bias))
        for layer in layers.critic:
            last = layer is layers.critic[-1]
            critic_features = linear(critic_features, layer.weight, layer.bias)
            critic_features = critic_features if last else torch.tanh(critic_features)
        return self.actor_critic.action_head(features), critic_features.squeeze(-1)

    def to_env(self, action: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Turn drawn actions into what environments get; ``[n, *A]`` both."""
        return action

    def fake_runtime_state(self, batch_size: int) -> ActorCriticRuntimeState:
        """Zeros of the right shapes and dtypes."""
        shape = (batch_size, *(self.action_space.shape or ()))
        is_box = isinstance(self.action_space, spaces.Box)
        return self.runtime_state(
            obs=torch.zeros(batch_size, self.config.obs_dim),
            action=torch.zeros(shape, dtype=torch.float32 if is_box else torch.int64),
            logprob=torch.zeros(batch_size),
            value=torch.zeros(batch_size),
        )

    def _normalize(self, obs: Tensor) -> Tensor:
        """Do what ``obs_stats.normalize`` does, with its two factors kept until they change."""
        if not self.config.normalize_observations:
            return obs
        stats = self.obs_stats
        # Every update writes in place, which counts the version up; a copy lies elsewhere.
        key = (stats.mean.data_ptr(), stats.mean._version)
        if self._scale is None or self._scale[0] != key:
            factor = stats.std.reciprocal().to(torch.float32)
            self._scale = (key, stats.mean.to(torch.float32), factor)
        _, mean, factor = self._scale
        clip = self.config.obs_clip
        return ((obs - mean) * factor).clamp_(-clip, clip)

    def evaluate_actions(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Judge stored actions with the current networks; differentiable.

        Args:
            obs: state vectors as stored, ``[B, obs_dim]``.
            action: as stored, ``[B, *A]``.

        Returns:
            Log-probabilities, entropies and values, ``[B]`` each.
        """
        distribution, value = self.actor_critic(self._normalize(obs.to(self.device)))
        action = action.to(self.device)
        return distribution.log_prob(action), distribution.entropy(), value

    @torch.no_grad()
    def get_value(self, _obs: dict[str, Any]) -> Tensor:
        """Estimate values, on the CPU, ``[n]``."""
        obs = self.extract_model_obs_tensor(_obs).to(self.device)
        return self.actor_critic.value(self._normalize(obs)).cpu()

    def update_obs_stats(self, obs: Tensor) -> None:
        """Learn the mean and spread of state vectors ``[B, obs_dim]``, unless they are frozen."""
        if self.config.normalize_observations and not self.config.freeze_obs_stats:
            self.obs_stats.update(obs.to(self.device))

    def project(self) -> None:
        """Keep bounded parameters in their bounds; call it after every optimizer step."""
        self.actor_critic.project()

    def critic_parameters(self) -> list[torch.nn.Parameter]:
        """What belongs to the value function alone."""
        network = self.actor_critic
        trunk = [] if network.critic_trunk is None else list(network.critic_trunk.parameters())
        return [*trunk, *network.value_head.parameters()]
