"""Networks of off-policy learning: critics of actions, squashed actors, and action values.

Actors and critics speak in unit actions, ``[B, A]`` flat and in [-1, 1]; `UnitActions` converts
from and to those of a bounded Box.
"""

from __future__ import annotations

import copy
import math
from typing import Any, TypeVar, cast

import numpy as np
import torch
from gymnasium import spaces
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from rlightning.errors import ConfigError
from rlightning.models.action_mask import MASK, has_action_mask, without_action_mask
from rlightning.models.encoders import Encoder, make_encoder
from rlightning.models.image_config import ImageConfig
from rlightning.models.mlp import MLP
from rlightning.ops.q_learning import dueling_values

__all__ = [
    "ActionValues",
    "CriticConfig",
    "DeterministicActor",
    "QEnsemble",
    "QNetworkConfig",
    "SquashedGaussianActor",
    "UnitActions",
    "frozen_copy",
    "plain_layers",
]

LOG_STD_BOUNDS = (-5.0, 2.0)
"""Range of a squashed Gaussian's ``log_std``; wider ones saturate tanh, narrower are no noise."""

_OUT_GAIN = 0.01  # the first actions hardly depend on the state
_Module = TypeVar("_Module", bound=nn.Module)


class QNetworkConfig(ImageConfig):
    """The keys of ``model_cfg`` that describe the networks of off-policy algorithms."""

    hidden_sizes: list[PositiveInt] = Field(default_factory=lambda: [256, 256])
    """Hidden layers behind the encoder."""
    activation: str = "relu"
    """Activation of the hidden layers."""
    normalize_observations: bool = False
    """Shift and scale vector observations by everything learned from so far."""

    def make_encoder(self, observation_space: spaces.Space[Any]) -> Encoder:
        """Return what turns observations into features."""
        return make_encoder(observation_space, self.image_options())

    def make_mlp(
        self,
        in_features: int,
        out_features: int,
        *,
        out_gain: float = 1.0,
        layer_norm: bool = False,
    ) -> MLP:
        """Return the hidden layers and one more that answers."""
        return MLP(
            in_features,
            self.hidden_sizes,
            out_features,
            activation_name=self.activation,
            out_gain=out_gain,
            layer_norm=layer_norm,
        )


class CriticConfig(QNetworkConfig):
    """The keys of ``model_cfg`` where critics judge actions of a Box."""

    n_critics: int = Field(default=2, ge=1)
    """Critics of the ensemble."""
    layer_norm: bool = False
    """Normalise the critics' hidden layers (Ba et al. 2016, arXiv:1607.06450)."""


class UnitActions(nn.Module):
    """Converts between a Box's actions and unit actions.

    Args:
        space: of one environment.

    Attributes:
        size: numbers in an action.

    Raises:
        ConfigError: the space is no Box, or not bounded on all sides.
    """

    center: Tensor
    half_width: Tensor

    def __init__(self, space: spaces.Space[Any]) -> None:
        super().__init__()
        if not isinstance(space, spaces.Box):
            raise ConfigError(
                f"the action space is {space}; SACPolicy and TD3Policy take a Box. DQNPolicy "
                "takes a Discrete one, PPOPolicy both"
            )
        if not space.is_bounded("both"):
            raise ConfigError(
                f"the action space {space} is not bounded on all sides, which SACPolicy and "
                "TD3Policy need; rescale or clip actions in the environment, or use PPOPolicy"
            )
        low, high = (torch.as_tensor(np.array(x, np.float32)) for x in (space.low, space.high))
        self.shape = tuple(space.shape)
        self.size = int(np.prod(self.shape, dtype=int))
        # Not persistent: they follow from the space, and belong to no set of weights.
        self.register_buffer("center", ((high + low) / 2).reshape(-1), persistent=False)
        self.register_buffer("half_width", ((high - low) / 2).reshape(-1), persistent=False)

    def to_env(self, unit: Tensor) -> Tensor:
        """Unit actions [B, A] to the space's, [B, *shape]."""
        return (self.center + self.half_width * unit).reshape(-1, *self.shape)

    def to_unit(self, action: Tensor) -> Tensor:
        """The space's actions [B, *shape] to unit ones, [B, A]."""
        flat = action.reshape(len(action), self.size).to(torch.float32)
        return (flat - self.center) / self.half_width

    def sample(self, n_rows: int) -> Tensor:
        """Draw uniform unit actions, [n_rows, A]."""
        return torch.rand(n_rows, self.size, device=self.center.device) * 2.0 - 1.0


class QEnsemble(nn.Module):
    """Several critics of (observation, unit action), behind one encoder.

    Args:
        observation_space: of one environment.
        n_actions: numbers in an action.
        config: the number and shape of the networks.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        n_actions: int,
        config: CriticConfig,
    ) -> None:
        super().__init__()
        self.encoder = config.make_encoder(observation_space)
        width = self.encoder.out_features + n_actions
        self.critics = nn.ModuleList(
            config.make_mlp(width, 1, layer_norm=config.layer_norm) for _ in range(config.n_critics)
        )

    def forward(self, observation: Any, unit: Tensor) -> Tensor:
        """Map B observations and actions [B, A] to values, [E, B]."""
        inputs = torch.cat([self.encoder(observation), unit], -1)
        return torch.stack([critic(inputs).squeeze(-1) for critic in self.critics])


class SquashedGaussianActor(nn.Module):
    """Observations to the mean and ``log_std`` of a Gaussian whose tanh is the unit action.

    A new one acts nearly at random, whatever the observation: means near 0, ``log_std`` near 0.

    Args:
        observation_space: of one environment.
        n_actions: numbers in an action, A.
        config: the shape of the network.
    """

    def __init__(
        self, observation_space: spaces.Space[Any], n_actions: int, config: QNetworkConfig
    ) -> None:
        super().__init__()
        self.encoder = config.make_encoder(observation_space)
        self.body = config.make_mlp(self.encoder.out_features, 2 * n_actions, out_gain=_OUT_GAIN)
        low, high = LOG_STD_BOUNDS
        last = cast("nn.Linear", self.body[-1])
        with torch.no_grad():  # a standard deviation of 1: tanh of it is close to uniform
            last.bias[n_actions:] = math.atanh((low + high) / (low - high))

    def forward(self, observation: Any) -> tuple[Tensor, Tensor]:
        """Map B observations to means and ``log_std``, [B, A] each."""
        mean, spread = self.body(self.encoder(observation)).chunk(2, -1)
        low, high = LOG_STD_BOUNDS
        # Squeezed into its bounds, not clamped: a gradient is alive everywhere.
        return mean, low + 0.5 * (high - low) * (spread.tanh() + 1.0)


class DeterministicActor(nn.Module):
    """Observations to unit actions.

    Args:
        observation_space: of one environment.
        n_actions: numbers in an action, A.
        config: the shape of the network.
    """

    def __init__(
        self, observation_space: spaces.Space[Any], n_actions: int, config: QNetworkConfig
    ) -> None:
        super().__init__()
        self.encoder = config.make_encoder(observation_space)
        self.body = config.make_mlp(self.encoder.out_features, n_actions, out_gain=_OUT_GAIN)

    def forward(self, observation: Any) -> Tensor:
        """Map B observations to unit actions, [B, A]."""
        action: Tensor = self.body(self.encoder(observation)).tanh()
        return action


class ActionValues(nn.Module):
    """Observations to the values of all K actions of a Discrete space.

    Args:
        observation_space: of one environment. Of actions that a mask in it leaves out (see
            `action_mask`) the value is minus infinity.
        n_actions: K.
        config: the shape of the network.
        dueling: predict the state's value and the actions' advantages separately.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        n_actions: int,
        config: QNetworkConfig,
        *,
        dueling: bool = False,
    ) -> None:
        super().__init__()
        self.is_masked = has_action_mask(observation_space, spaces.Discrete(n_actions))
        if self.is_masked:
            observation_space = without_action_mask(observation_space)
        self.encoder = config.make_encoder(observation_space)
        self.n_values = 1 if dueling else 0
        self.body = config.make_mlp(self.encoder.out_features, self.n_values + n_actions)

    def forward(self, observation: Any) -> Tensor:
        """Map B observations to action values, [B, K]."""
        out: Tensor = self.body(self.encoder(observation))
        if self.n_values:
            out = dueling_values(out[:, : self.n_values], out[:, self.n_values :])
        if self.is_masked:
            out = out.masked_fill(~observation[MASK].bool(), -torch.inf)
        return out


def frozen_copy(network: _Module) -> _Module:
    """Return a copy that takes no gradients: a target network."""
    return copy.deepcopy(network).requires_grad_(requires_grad=False)


def plain_layers(network: nn.Module) -> list[nn.Linear]:
    """Return the linear layers of an MLP that is nothing else but activations; else none."""
    layers = list(network.children())
    linear, between = layers[::2], layers[1::2]
    plain = all(isinstance(layer, nn.Linear) for layer in linear)
    if not plain or any(isinstance(layer, (nn.Linear, nn.LayerNorm)) for layer in between):
        return []
    return cast("list[nn.Linear]", linear)
