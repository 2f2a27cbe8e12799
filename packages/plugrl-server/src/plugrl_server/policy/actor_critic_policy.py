"""A policy and a value function on state vectors: what ``gaussian-policy`` and others share.

The networks are rlightning's `ActorCritic`, observations are normalised by rlightning's
`ObservationNormalizer`. Algorithms call `evaluate_actions`, `get_value` and `update_obs_stats`.
"""

from __future__ import annotations

import dataclasses
from abc import ABC
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from gymnasium import spaces

from plugrl_server.common.outliers import usual_rows
from plugrl_server.policy.base_torch_policy import BaseTorchPolicy
from plugrl_server.policy.observation import join_states
from plugrl_server.policy.state import LazyTensors
from rlightning.models.actor_critic import ActorCritic, ActorCriticOptions
from rlightning.models.normalizer import ObservationNormalizer
from rlightning.ops.plain_networks import PlainLayers, PlainNetworks, draw_gaussian

if TYPE_CHECKING:
    from torch import Tensor

    from plugrl_server.policy.actor_critic_config import ActorCriticPolicyConfig
    from rlightning.ops.normalization import RunningMeanStd

__all__ = ["ActorCriticPolicy", "ActorCriticRuntimeState"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"


@dataclasses.dataclass
class ActorCriticRuntimeState(LazyTensors):
    """What is needed to learn from an action. Tensors on the CPU."""

    obs: Any
    """The state vector before normalisation, float32 ``[n, obs_dim]``."""
    action: Any
    """As drawn, before any clipping, ``[n, *A]``."""
    logprob: Any
    """float32 ``[n]``."""
    value: Any
    """float32 ``[n]``."""


class _Scale(NamedTuple):
    """What observations are normalised with, as it was at one time."""

    key: tuple[int, int]
    mean: Tensor
    factor: Tensor
    mean_array: Array
    factor_array: Array


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
        # By the names of rlightning's PPOPolicy: a checkpoint of one loads in the other.
        self.observation_normalizer: ObservationNormalizer | None = None
        if config.normalize_observations:
            self.observation_normalizer = ObservationNormalizer(space, clip=config.obs_clip)
            # To ask modules for their parts takes longer than to normalise one row.
            self._moments: dict[str, Any] = self.obs_stats._buffers
        self.action_space = action_space
        self.action_horizon = 1
        self.to(self.device)
        self._plain: PlainNetworks | None = None
        self._may_be_plain = True
        self._scale: _Scale | None = None

    @property
    def obs_stats(self) -> RunningMeanStd:
        """Mean and spread of state vectors; only where they are normalised."""
        assert self.observation_normalizer is not None  # who asks has seen the configuration
        return cast("RunningMeanStd", self.observation_normalizer.statistics[0])

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is derived: arrays that share memory would be copied apart."""
        return {**self.__dict__, "_plain": None, "_scale": None}

    def prepare_observation(self, _obs: dict[str, Any]) -> Array:
        """Give the state vector, float32 ``[n, obs_dim]``.

        Raises:
            ObservationError: the client sends other states than ``state_keys`` and ``obs_dim`` say.
        """
        keys, width = self.config.state_keys, self.config.obs_dim
        return join_states(_obs, keys, width, width_flag="--policy.obs-dim")

    def get_action_and_runtime_state(
        self, _obs: dict[str, Any]
    ) -> tuple[Array, ActorCriticRuntimeState]:
        """Draw one action per row (the likeliest one if ``deterministic``), ``[n, 1, *A]``."""
        obs = self.prepare_observation(_obs)
        plain = self._plain_networks()
        action, logprob, value = self._act(obs) if plain is None else self._act_plain(plain, obs)
        state = self.runtime_state.of_arrays(
            {"obs": obs, "action": action, "logprob": logprob, "value": value}
        )
        return self.to_env(action)[:, None], state

    @torch.no_grad()
    def _act(self, obs: Array) -> tuple[Array, Array, Array]:
        """Draw actions; give their log-probabilities and the values, too."""
        distribution, value = self.actor_critic(self._normalize(torch.tensor(obs).to(self.device)))
        action, logprob = self._draw(distribution)
        return action.cpu().numpy(), logprob.cpu().numpy(), value.cpu().numpy()

    def _draw(self, distribution: Any) -> tuple[Tensor, Tensor]:
        if self.config.deterministic:
            action = distribution.mode()
            return action, distribution.log_prob(action)
        drawn: tuple[Tensor, Tensor] = distribution.sample_with_log_prob()
        return drawn

    def _act_plain(self, plain: PlainNetworks, obs: Array) -> tuple[Array, Array, Array]:
        """Do the same without modules: a small network's time is mostly the overhead of calls."""
        plain.refresh()
        out, value = plain.forward(self._normalize_array(obs))
        layers = plain.layers
        if layers.log_std is None or self.config.deterministic:
            head: Any = self.actor_critic.action_head
            with torch.no_grad():
                drawn, its_logprob = self._draw(head.distribution(torch.from_numpy(out)))
            action, logprob = drawn.numpy(), its_logprob.numpy()
        else:
            action, logprob = draw_gaussian(out, plain.spread, plain.workspace(len(out)).noise)
        return action, logprob, value

    def _plain_networks(self) -> PlainNetworks | None:
        """Decide once whether the networks are plain; on a GPU they never are."""
        if self._plain is None and self._may_be_plain:
            layers = self.actor_critic.plain_layers()
            self._may_be_plain = layers is not None and layers.are_supported()
            if layers is not None and self._may_be_plain:
                self._plain = PlainNetworks(layers)
        plain = self._plain
        return plain if plain is not None and plain.parameters[0].is_cpu else None

    def to_env(self, action: Array) -> Array:
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
        scale, clip = self._factors(), self.config.obs_clip
        return ((obs - scale.mean) * scale.factor).clamp_(-clip, clip)

    def _normalize_array(self, obs: Array) -> Array:
        """Do the same in numpy, which takes less time for a few numbers."""
        if not self.config.normalize_observations:
            return obs
        _, _, _, mean, factor = self._factors()
        clip = self.config.obs_clip
        normal: Array = obs - mean
        normal *= factor
        np.maximum(normal, -clip, out=normal)
        np.minimum(normal, clip, out=normal)
        return normal

    def _factors(self) -> _Scale:
        # Every update writes in place, which counts the version up; a copy lies elsewhere.
        known = self._moments["mean"]
        key = (known.data_ptr(), known._version)
        if self._scale is None or self._scale.key != key:
            stats = self.obs_stats
            mean, factor = stats.mean.float(), stats.std.reciprocal().float()
            self._scale = _Scale(key, mean, factor, mean.cpu().numpy(), factor.cpu().numpy())
        return self._scale

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
        """Learn the mean and spread of state vectors ``[B, obs_dim]``, unless they are frozen.

        Rows that are far from all others are left out; see `usual_rows`.
        """
        if self.config.normalize_observations and not self.config.freeze_obs_stats:
            self.obs_stats.update(usual_rows(obs.to(self.device), self.obs_stats))

    def project(self) -> None:
        """Keep bounded parameters in their bounds; call it after every optimizer step."""
        self.actor_critic.project()

    def critic_parameters(self) -> list[torch.nn.Parameter]:
        """What belongs to the value function alone."""
        network = self.actor_critic
        trunk = [] if network.critic_trunk is None else list(network.critic_trunk.parameters())
        return [*trunk, *network.value_head.parameters()]

    def plain_layers(self) -> PlainLayers | None:
        """Give the layers if they are all that there is: algorithms may take a short way then."""
        return self.actor_critic.plain_layers()

    @torch.no_grad()
    def plain_inputs(self, obs: Tensor, action: Tensor) -> tuple[Tensor, Tensor]:
        """Give what `plain_layers` read and answer for stored rows: normalised, and flat.

        Args:
            obs: state vectors as stored, ``[B, obs_dim]``.
            action: as stored, ``[B, *A]``.
        """
        return self.actor_critic.plain_inputs(self._normalize(obs.to(self.device)), action)
