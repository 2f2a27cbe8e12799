"""A policy and a value function for any supported pair of spaces, in one module."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlightning.models.action_mask import MASK, has_action_mask, without_action_mask
from rlightning.models.encoders import ImageOptions, is_image, make_encoder
from rlightning.models.heads import (
    LOG_STD_BOUNDS,
    ActionDistribution,
    CategoricalHead,
    GaussianHead,
    make_action_head,
)
from rlightning.models.mlp import MLP, linear
from rlightning.ops.plain_networks import PlainLayers, PlainNetworks

__all__ = ["ActorCritic", "ActorCriticOptions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticOptions:
    """The shape of the networks."""

    hidden_sizes: Sequence[int] | None = None
    """Hidden layers behind the encoder; None: (64, 64), or none if there is an image."""
    activation: str = "tanh"
    """Of the hidden layers."""
    shared_encoder: bool | None = None
    """Whether actor and critic share encoder and hidden layers; None: only if there is an image."""
    log_std_init: float = 0.0
    """Initial logarithm of the standard deviation of Box actions."""
    images: ImageOptions = field(default_factory=ImageOptions)
    """How image observations are encoded."""


class ActorCritic(nn.Module):
    """Observations to an action distribution and a value.

    Args:
        observation_space: of one environment. An action mask in it (see `action_mask`) is obeyed,
            and is no feature.
        action_space: of one environment.
        options: the shape of the networks.

    Attributes:
        is_masked: whether observations hold an action mask.
        actor_trunk: encoder and hidden layers of the policy.
        critic_trunk: those of the critic; None if the two are shared.
        action_head: features to an ``ActionDistribution``.
        value_head: features to a value.

    Raises:
        ConfigError: a space or an activation is not supported.
    """

    critic_trunk: nn.Sequential | None

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        options: ActorCriticOptions | None = None,
    ) -> None:
        super().__init__()
        options = options or ActorCriticOptions()
        self.is_masked = has_action_mask(observation_space, action_space)
        if self.is_masked:
            observation_space = without_action_mask(observation_space)
        has_image = _has_image(observation_space, options.images)
        shared = has_image if options.shared_encoder is None else options.shared_encoder
        sizes = options.hidden_sizes
        if sizes is None:
            sizes = () if has_image else (64, 64)

        def trunk() -> tuple[nn.Sequential, int]:
            encoder = make_encoder(observation_space, options.images)
            body = MLP(encoder.out_features, sizes, activation_name=options.activation)
            return nn.Sequential(encoder, body), body.out_features

        self.actor_trunk, width = trunk()
        self.critic_trunk = None if shared else trunk()[0]
        self.action_head = make_action_head(action_space, width, log_std_init=options.log_std_init)
        self.value_head = linear(width, 1, gain=1.0)
        self._plain: PlainNetworks | None = None
        self._may_be_plain = True

    def forward(self, observation: Any) -> tuple[ActionDistribution, Tensor]:
        """Compute both outputs.

        Args:
            observation: a batch, in the form ``encoders`` describes.

        Returns:
            The distribution over actions, and values [B].
        """
        features = self.actor_trunk(observation)
        critic_features = features if self.critic_trunk is None else self.critic_trunk(observation)
        distribution = self.masked(self.action_head(features), observation)
        return distribution, self.value_head(critic_features).squeeze(-1)

    def masked(self, distribution: Any, observation: Any) -> ActionDistribution:
        """Return the distribution over the actions that there are in these observations."""
        if self.is_masked:
            distribution = distribution.masked(observation[MASK])
        return distribution  # type: ignore[no-any-return]  # what a head has made

    @torch.no_grad()
    def act(self, observation: Any) -> tuple[ActionDistribution, Tensor]:
        """Compute what ``forward`` does, without gradients.

        Where the networks are plain and on a CPU this takes a fifth of the time.
        """
        plain, head = self._plain_networks(), self.action_head
        if plain is None:
            result: tuple[ActionDistribution, Tensor] = self(observation)
            return result
        assert isinstance(head, (GaussianHead, CategoricalHead))  # what plain_layers promises
        plain.refresh()
        out, value = plain.forward(self.actor_trunk[0](observation).numpy())
        distribution = self.masked(head.distribution(torch.from_numpy(out)), observation)
        return distribution, torch.from_numpy(value)

    def _plain_networks(self) -> PlainNetworks | None:
        """Decide once whether the networks are plain; on a GPU they never are."""
        if self._may_be_plain and self._plain is None:
            layers = self._layers()
            self._may_be_plain = layers is not None
            if layers is not None and layers.are_supported():
                self._plain = PlainNetworks(layers)
        return self._plain if self.value_head.weight.is_cpu else None

    def value(self, observation: Any) -> Tensor:
        """Compute the values of a batch alone, [B]."""
        trunk = self.critic_trunk if self.critic_trunk is not None else self.actor_trunk
        value: Tensor = self.value_head(trunk(observation)).squeeze(-1)
        return value

    def plain_layers(self) -> PlainLayers | None:
        """Return the linear layers if this is two plain tanh MLPs behind one parameterless encoder.

        None if the networks are shared, convolve, have another activation or no hidden layer, if
        the head is neither Gaussian nor categorical, or if actions are masked.
        """
        return None if self.is_masked else self._layers()

    def _layers(self) -> PlainLayers | None:
        """Return `plain_layers`, whatever becomes of what they answer."""
        encoder, body = self.actor_trunk
        if self.critic_trunk is None or any(True for _ in encoder.parameters()):
            return None
        kinds = [type(layer) for layer in body.children()]
        if not kinds or kinds != [nn.Linear, nn.Tanh] * (len(kinds) // 2):
            return None
        head, log_std = self.action_head, None
        if isinstance(head, GaussianHead):
            log_std, last = head.log_std, head.mean
        elif isinstance(head, CategoricalHead):
            last = head.logits
        else:
            return None
        actor = [*_linear(self.actor_trunk), last]
        critic = [*_linear(self.critic_trunk), self.value_head]
        return PlainLayers(actor, critic, log_std, LOG_STD_BOUNDS)

    def plain_inputs(self, observation: Any, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return what ``plain_layers`` read and answer: features [B, F], and flat actions.

        Args:
            observation: a batch.
            action: [B, *A] as the environment counts; comes back as [B, A], or [B] from zero.
        """
        head = self.action_head
        if isinstance(head, CategoricalHead):
            flat = action.long() - head.start
        else:
            flat = action.reshape(len(action), -1)
        return self.actor_trunk[0](observation), flat

    def critic_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that only the critic uses."""
        if self.critic_trunk is not None:
            yield from self.critic_trunk.parameters()
        yield from self.value_head.parameters()

    def project(self) -> None:
        """Keep bounded parameters in their bounds; call it after every optimizer step."""
        if isinstance(self.action_head, GaussianHead):
            self.action_head.project()


def _has_image(space: spaces.Space[Any], images: ImageOptions) -> bool:
    if isinstance(space, spaces.Dict):
        return any(_has_image(inner, images) for inner in space.spaces.values())
    if isinstance(space, spaces.Tuple):
        return any(_has_image(inner, images) for inner in space.spaces)
    return is_image(space, images)


def _linear(trunk: nn.Module) -> list[nn.Linear]:
    return [layer for layer in trunk.modules() if isinstance(layer, nn.Linear)]
