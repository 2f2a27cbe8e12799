"""Last layers: features to action distributions and values.

An action head returns a small immutable distribution whose methods speak in the environment's
actions: shaped and offset as the space says. The maths is in ``ops.distributions``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlightning.errors import ConfigError
from rlightning.models.mlp import MLP, linear
from rlightning.ops import distributions as ops

__all__ = [
    "ActionDistribution",
    "BernoulliHead",
    "CategoricalHead",
    "GaussianHead",
    "MultiCategoricalHead",
    "ValueHead",
    "make_action_head",
]

POLICY_GAIN = 0.01
"""Orthogonal gain of a policy's last layer: the first actions hardly depend on the state."""

LOG_STD_BOUNDS = (-20.0, 2.0)
"""Range a learned ``log_std`` is held in; e^2 times an action's scale is noise already."""


class ActionDistribution(Protocol):
    """What a policy does with a state. Shapes: B rows, ``*A`` the action space's own shape."""

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw actions, [B, *A], in the action space's dtype family and offset."""

    def sample_with_log_prob(
        self, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw actions [B, *A] and return their log-probabilities [B]."""

    def mode(self) -> Tensor:
        """Return the likeliest actions, [B, *A]."""

    def log_prob(self, action: Tensor) -> Tensor:
        """Return log-probabilities (densities for Box) of actions [B, *A]; [B]."""

    def entropy(self) -> Tensor:
        """Return entropies in nats; [B]."""


class GaussianAction(NamedTuple):
    """Diagonal Gaussian over Box actions; unbounded: bounds are the environment border's affair."""

    mean: Tensor
    log_std: Tensor
    shape: tuple[int, ...]

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw float32 actions, [B, *A]."""
        sample = ops.gaussian_sample(self.mean, self.log_std, generator=generator)
        return sample.reshape(-1, *self.shape)

    def sample_with_log_prob(
        self, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw float32 actions [B, *A] and return their log-densities [B]."""
        sample, log_prob = ops.gaussian_sample_with_log_prob(
            self.mean, self.log_std, generator=generator
        )
        return sample.reshape(-1, *self.shape), log_prob

    def mode(self) -> Tensor:
        """Return the means, [B, *A]."""
        return self.mean.reshape(-1, *self.shape)

    def log_prob(self, action: Tensor) -> Tensor:
        """Return log-densities, [B]."""
        return ops.gaussian_log_prob(action.reshape(self.mean.shape), self.mean, self.log_std)

    def entropy(self) -> Tensor:
        """Return entropies, [B]."""
        return ops.gaussian_entropy(self.log_std).expand(len(self.mean))

    def masked(self, mask: Tensor) -> "MaskedGaussianAction":
        """Return the distribution of the dimensions that `mask`, [B, *A], keeps."""
        kept = mask.reshape(self.mean.shape).to(self.mean.dtype)
        return MaskedGaussianAction(self.mean, self.log_std, self.shape, kept)


class MaskedGaussianAction(NamedTuple):
    """A `GaussianAction` of which each row has some dimensions only; the others are always zero.

    Log-densities and entropies are those of the row's own dimensions. What would be drawn in the
    others reaches no environment; in a probability ratio it would only be noise, and in the entropy
    a pull on spreads that nothing answers.
    """

    mean: Tensor
    log_std: Tensor
    shape: tuple[int, ...]
    kept: Tensor

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw float32 actions, [B, *A]."""
        sample = ops.gaussian_sample(self.mean, self.log_std, generator=generator) * self.kept
        return sample.reshape(-1, *self.shape)

    def sample_with_log_prob(
        self, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw actions and return their log-densities [B]."""
        action = self.sample(generator)
        return action, self.log_prob(action)

    def mode(self) -> Tensor:
        """Return the means, [B, *A]."""
        return (self.mean * self.kept).reshape(-1, *self.shape)

    def log_prob(self, action: Tensor) -> Tensor:
        """Return log-densities, [B]."""
        sample = action.reshape(self.mean.shape)
        return ops.masked_gaussian_log_prob(sample, self.mean, self.log_std, self.kept)

    def entropy(self) -> Tensor:
        """Return entropies, [B]."""
        return ops.masked_gaussian_entropy(self.log_std, self.kept)


class CategoricalAction(NamedTuple):
    """Distribution over Discrete actions."""

    log_p: Tensor
    start: int

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw int64 actions, [B], the space's start included."""
        return ops.categorical_sample(self.log_p, generator=generator) + self.start

    def sample_with_log_prob(
        self, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw actions and return their log-probabilities [B]."""
        action = self.sample(generator)
        return action, self.log_prob(action)

    def mode(self) -> Tensor:
        """Return the likeliest actions, [B]."""
        return self.log_p.argmax(-1) + self.start

    def log_prob(self, action: Tensor) -> Tensor:
        """Return log-probabilities, [B]."""
        return ops.categorical_log_prob(self.log_p, action - self.start)

    def entropy(self) -> Tensor:
        """Return entropies, [B]."""
        return ops.categorical_entropy(self.log_p)

    def masked(self, mask: Tensor) -> "CategoricalAction":
        """Return the distribution over the actions that `mask`, [B, n_actions], keeps."""
        return CategoricalAction(ops.masked_log_softmax(self.log_p, mask.bool()), self.start)


class MultiCategoricalAction(NamedTuple):
    """Independent distributions over the parts of MultiDiscrete actions."""

    log_p: Tensor
    sizes: tuple[int, ...]
    start: Tensor

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw int64 actions, [B, *A], the space's start included."""
        index = ops.multi_categorical_sample(self.log_p, self.sizes, generator=generator)
        return index.reshape(-1, *self.start.shape) + self.start

    def sample_with_log_prob(
        self, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw actions and return their log-probabilities [B]."""
        action = self.sample(generator)
        return action, self.log_prob(action)

    def mode(self) -> Tensor:
        """Return the likeliest actions, [B, *A]."""
        index = ops.multi_categorical_mode(self.log_p, self.sizes)
        return index.reshape(-1, *self.start.shape) + self.start

    def log_prob(self, action: Tensor) -> Tensor:
        """Return log-probabilities, [B]."""
        index = (action.long() - self.start).reshape(len(action), -1)
        return ops.multi_categorical_log_prob(self.log_p, index, self.sizes)

    def entropy(self) -> Tensor:
        """Return entropies, [B]."""
        return ops.categorical_entropy(self.log_p)


class BernoulliAction(NamedTuple):
    """Independent bits: MultiBinary actions."""

    logits: Tensor
    shape: tuple[int, ...]

    def sample(self, generator: torch.Generator | None = None) -> Tensor:
        """Draw int64 zeros and ones, [B, *A]."""
        return ops.bernoulli_sample(self.logits, generator=generator).reshape(-1, *self.shape)

    def sample_with_log_prob(
        self, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw actions and return their log-probabilities [B]."""
        action = self.sample(generator)
        return action, self.log_prob(action)

    def mode(self) -> Tensor:
        """Return the likelier value of each bit, [B, *A]."""
        return (self.logits > 0).long().reshape(-1, *self.shape)

    def log_prob(self, action: Tensor) -> Tensor:
        """Return log-probabilities, [B]."""
        return ops.bernoulli_log_prob(self.logits, action.reshape(self.logits.shape))

    def entropy(self) -> Tensor:
        """Return entropies, [B]."""
        return ops.bernoulli_entropy(self.logits)


class GaussianHead(nn.Module):
    """Features to a Gaussian whose spread is learned but does not depend on the state.

    The parameter is a logarithm, and is clamped wherever it is read: no gradient, learning rate or
    restored value can make a standard deviation negative, zero or infinite. Call ``project`` after
    an optimizer step to keep the parameter itself inside, where its gradient is alive.

    Args:
        in_features: width of the features.
        shape: of one action.
        log_std_init: initial logarithm of every standard deviation.
    """

    def __init__(
        self, in_features: int, shape: Sequence[int], *, log_std_init: float = 0.0
    ) -> None:
        super().__init__()
        self.shape = tuple(shape)
        n_actions = int(np.prod(self.shape, dtype=int))
        self.mean = linear(in_features, n_actions, gain=POLICY_GAIN)
        self.log_std = nn.Parameter(torch.full((n_actions,), float(log_std_init)))

    def forward(self, features: Tensor) -> GaussianAction:
        """Map [B, F] to a distribution over [B, *A]."""
        return self.distribution(self.mean(features))

    def distribution(self, mean: Tensor) -> GaussianAction:
        """Return the distribution with those means, flat: [B, actions]."""
        return GaussianAction(mean, self.log_std.clamp(*LOG_STD_BOUNDS), self.shape)

    @torch.no_grad()
    def project(self) -> None:
        """Move ``log_std`` back into its bounds."""
        self.log_std.clamp_(*LOG_STD_BOUNDS)


class CategoricalHead(nn.Module):
    """Features to probabilities of a Discrete space's actions.

    Args:
        in_features: width of the features.
        n_actions: how many actions there are.
        start: the smallest action.
    """

    def __init__(self, in_features: int, n_actions: int, *, start: int = 0) -> None:
        super().__init__()
        self.logits = linear(in_features, n_actions, gain=POLICY_GAIN)
        self.start = start

    def forward(self, features: Tensor) -> CategoricalAction:
        """Map [B, F] to a distribution over [B]."""
        return self.distribution(self.logits(features))

    def distribution(self, logits: Tensor) -> CategoricalAction:
        """Return the distribution with those logits, [B, n_actions]."""
        return CategoricalAction(logits.log_softmax(-1), self.start)


class MultiCategoricalHead(nn.Module):
    """Features to probabilities of each part of a MultiDiscrete space.

    Args:
        in_features: width of the features.
        space: the action space; ``nvec`` may have any shape.
    """

    start: Tensor

    def __init__(self, in_features: int, space: spaces.MultiDiscrete) -> None:
        super().__init__()
        self.sizes = tuple(int(n) for n in space.nvec.ravel())
        self.logits = linear(in_features, sum(self.sizes), gain=POLICY_GAIN)
        start = torch.as_tensor(np.asarray(space.start, dtype=np.int64)).expand(space.shape)
        self.register_buffer("start", start.clone(), persistent=False)

    def forward(self, features: Tensor) -> MultiCategoricalAction:
        """Map [B, F] to a distribution over [B, *A]."""
        log_p = ops.multi_log_softmax(self.logits(features), self.sizes)
        return MultiCategoricalAction(log_p, self.sizes, self.start)


class BernoulliHead(nn.Module):
    """Features to probabilities of the bits of a MultiBinary space.

    Args:
        in_features: width of the features.
        shape: of one action.
    """

    def __init__(self, in_features: int, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.logits = linear(in_features, int(np.prod(self.shape, dtype=int)), gain=POLICY_GAIN)

    def forward(self, features: Tensor) -> BernoulliAction:
        """Map [B, F] to a distribution over [B, *A]."""
        return BernoulliAction(self.logits(features), self.shape)


def make_action_head(
    space: spaces.Space[Any], in_features: int, *, log_std_init: float = 0.0
) -> nn.Module:
    """Build the head of an action space.

    Args:
        space: Box, Discrete, MultiDiscrete or MultiBinary.
        in_features: width of the features.
        log_std_init: for Box: initial logarithm of the standard deviations.

    Returns:
        A module from [B, in_features] to an ``ActionDistribution``.

    Raises:
        ConfigError: the space is of another kind.
    """
    if isinstance(space, spaces.Box):
        return GaussianHead(in_features, space.shape, log_std_init=log_std_init)
    if isinstance(space, spaces.Discrete):
        return CategoricalHead(in_features, int(space.n), start=int(space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategoricalHead(in_features, space)
    if isinstance(space, spaces.MultiBinary):
        return BernoulliHead(in_features, space.shape)
    raise ConfigError(
        f"action space {space} is not supported by the built-in policies, which take Box, "
        "Discrete, MultiDiscrete and MultiBinary; flatten it in the environment or write a policy"
    )


class ValueHead(nn.Module):
    """Features to values through an MLP of its own, for models that bring only features.

    Args:
        input_dim: width of the features.
        hidden_sizes: widths of the hidden layers.
        output_dim: how many values per row.
        activation: name of the activation.
        bias_last: whether the last layer has a bias.
    """

    def __init__(
        self,
        input_dim: int,
        hidden_sizes: Sequence[int] = (512, 128),
        output_dim: int = 1,
        activation: str = "gelu",
        bias_last: bool = False,  # noqa: FBT001, FBT002 - a public signature
    ) -> None:
        super().__init__()
        self.body = MLP(input_dim, hidden_sizes, activation_name=activation)
        self.value = linear(self.body.out_features, output_dim, gain=1.0)
        if not bias_last:
            self.value.register_parameter("bias", None)

    def forward(self, features: Tensor) -> Tensor:
        """Map [..., input_dim] to [..., output_dim]."""
        values: Tensor = self.value(self.body(features))
        return values
