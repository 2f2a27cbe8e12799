"""Multi-layer perceptrons with orthogonal initialisation."""

import math
from collections.abc import Sequence

from torch import nn

from rlightning.errors import ConfigError, did_you_mean

__all__ = ["ACTIVATIONS", "HIDDEN_GAIN", "MLP", "activation", "linear"]

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "mish": nn.Mish,
    "relu": nn.ReLU,
    "selu": nn.SELU,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}
"""Activation layers by the name a configuration uses."""

HIDDEN_GAIN = math.sqrt(2.0)
"""Orthogonal gain of hidden layers."""


def activation(name: str) -> nn.Module:
    """Return a new activation layer.

    Raises:
        ConfigError: no activation has that name; close ones are suggested.
    """
    try:
        return ACTIVATIONS[name]()
    except KeyError:
        raise ConfigError(
            f"activation {name!r} is unknown.{did_you_mean(name, ACTIVATIONS)} "
            f"Known: {', '.join(ACTIVATIONS)}."
        ) from None


def linear(in_features: int, out_features: int, *, gain: float = HIDDEN_GAIN) -> nn.Linear:
    """Return a linear layer with an orthogonal weight of the given gain and a zero bias.

    On-policy learning starts better when the last layer of a policy has a tiny gain (0.01), that of
    a critic gain 1 (Andrychowicz et al. 2021, "What Matters for On-Policy Deep Actor-Critic
    Methods?").
    """
    layer = nn.Linear(in_features, out_features)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class MLP(nn.Sequential):
    """Linear layers, each followed by an activation; optionally a last one without.

    Args:
        in_features: size of the input's last axis.
        hidden_sizes: widths of the hidden layers; may be empty.
        out_features: width of a final layer without activation; none is added if None.
        activation_name: a key of ``ACTIVATIONS``.
        out_gain: orthogonal gain of the final layer.
        layer_norm: normalise each hidden layer before its activation.

    Attributes:
        out_features: size of the output's last axis.
    """

    def __init__(
        self,
        in_features: int,
        hidden_sizes: Sequence[int],
        out_features: int | None = None,
        *,
        activation_name: str = "tanh",
        out_gain: float = 1.0,
        layer_norm: bool = False,
    ) -> None:
        layers: list[nn.Module] = []
        width = in_features
        for size in hidden_sizes:
            normalized = [nn.LayerNorm(size)] if layer_norm else []
            layers += [linear(width, size), *normalized, activation(activation_name)]
            width = size
        if out_features is not None:
            layers.append(linear(width, out_features, gain=out_gain))
            width = out_features
        super().__init__(*layers)
        self.out_features = width
