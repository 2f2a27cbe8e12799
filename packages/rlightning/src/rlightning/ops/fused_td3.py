"""TD3's gradient step for plain MLPs on a CPU, with its derivatives written by hand.

The same step, to rounding, as ``ops.td3`` with autograd and ``torch.optim.Adam`` (a test holds them
together), which remains the general path. Parameters are borrowed as in ``fused_sac``.

Shape suffixes: ``B`` rows of a minibatch, ``A`` action dimensions, ``E`` critics. Actions are unit
actions.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from rlightning.ops.flat_mlp import ACTIVATIONS, FlatMLP, is_plain_adam
from rlightning.ops.fused_critics import adam_of, borrowed, regress
from rlightning.ops.q_learning import ensemble_loss, td_target
from rlightning.ops.td3 import clipped_double_value, noisy_action

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rlightning.ops.fused_critics import Rows

__all__ = ["FusedTD3", "TD3Layers", "TD3Optimizers", "TD3Settings", "supports"]


class TD3Layers(NamedTuple):
    """The networks of TD3 that are nothing but linear layers with an activation between them.

    Attributes:
        actor: features to actions before tanh.
        target_actor: its slow copy.
        critics: features and unit actions side by side to a value, each.
        target_critics: their slow copies.
        activation: ``relu`` or ``tanh``.
    """

    actor: Sequence[nn.Linear]
    target_actor: Sequence[nn.Linear]
    critics: Sequence[Sequence[nn.Linear]]
    target_critics: Sequence[Sequence[nn.Linear]]
    activation: str


class TD3Optimizers(NamedTuple):
    """The optimizers, both plain Adam."""

    actor: torch.optim.Optimizer
    critic: torch.optim.Optimizer


class TD3Settings(NamedTuple):
    """Numbers of the update: how far slow networks move, and the noise of target actions."""

    tau: float
    target_noise: float
    target_noise_clip: float


def supports(layers: TD3Layers, optimizers: TD3Optimizers) -> bool:
    """Return whether these networks and optimizers can take the fused step."""
    if layers.activation not in ACTIVATIONS:
        return False
    stacks = ([layers.actor], [layers.target_actor], layers.critics, layers.target_critics)
    if not all(FlatMLP.supports(members) for members in stacks):
        return False
    critics = [p for member in layers.critics for layer in member for p in layer.parameters()]
    actor = [p for layer in layers.actor for p in layer.parameters()]
    return is_plain_adam(optimizers.actor, actor) and is_plain_adam(optimizers.critic, critics)


class FusedTD3:
    """The gradient step, between two moments at which parameters are borrowed and given back.

    Args:
        layers: the networks.
        optimizers: theirs; `supports` must hold.
        settings: numbers of the update.
        on_non_finite: called with each parameter and its gradient where a gradient is not finite,
            before its network moves; it may raise.
    """

    def __init__(
        self,
        layers: TD3Layers,
        optimizers: TD3Optimizers,
        settings: TD3Settings,
        *,
        on_non_finite: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._settings = settings
        self._on_non_finite = on_non_finite
        activation = layers.activation
        self._actor = FlatMLP([layers.actor], activation)
        self._critic = FlatMLP(layers.critics, activation)
        self._slow_actor = FlatMLP([layers.target_actor], activation)
        self._slow_critic = FlatMLP(layers.target_critics, activation)
        self._actor_adam = adam_of(optimizers.actor, self._actor)
        self._critic_adam = adam_of(optimizers.critic, self._critic)
        self.is_borrowed = False
        """Whether `step` may be called."""

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Take parameters for the duration of an update; autograd is off inside.

        After an error inside, modules and optimizers are as of the last whole step of each network.
        """
        networks = (self._actor, self._critic, self._slow_actor, self._slow_critic)
        with borrowed(networks, (self._actor_adam, self._critic_adam)):
            self.is_borrowed = True
            try:
                yield
            finally:
                self.is_borrowed = False

    def step(
        self, rows: Rows, *, learn_actor: bool, move_targets: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Take one gradient step; call it inside `borrowed`.

        Args:
            rows: the minibatch.
            learn_actor: whether the policy learns too.
            move_targets: whether the slow networks follow.

        Returns:
            Metrics, and TD errors from before the step, [B].
        """
        target = self._target(rows)
        q = regress(self._critic, self._critic_adam, rows, target, self._on_non_finite)
        metrics = {"critic_loss": ensemble_loss(q, target, rows.weight), "q": q.mean()}
        if learn_actor:
            metrics["actor_loss"] = self._learn_actor(rows.features)
        if move_targets:
            self._slow_actor.flat.lerp_(self._actor.flat, self._settings.tau)
            self._slow_critic.flat.lerp_(self._critic.flat, self._settings.tau)
        return metrics, (q - target).abs_().mean(0)

    def _target(self, rows: Rows) -> Tensor:
        """Compute the smoothed double-critic targets, [B]."""
        settings = self._settings
        out, _ = self._slow_actor.forward(rows.next_features)
        action = noisy_action(
            out[0].tanh(), std=settings.target_noise, noise_clip=settings.target_noise_clip
        )
        later, _ = self._slow_critic.forward(torch.cat([rows.next_features, action], -1))
        return td_target(rows.reward, rows.discount, clipped_double_value(later.squeeze(-1)))

    def _learn_actor(self, features: Tensor) -> Tensor:
        """Step the policy towards what the first critic values; return its loss from before."""
        out, kept = self._actor.forward(features)
        action = out[0].tanh()
        values, valued = self._critic.forward(torch.cat([features, action], -1), n_members=1)
        d_value = torch.full_like(values[0], -1.0 / len(features))
        columns = slice(features.shape[1], None)
        d_action = self._critic.input_gradient(valued, d_value, columns)
        d_out = d_action.mul_(1.0 - action * action)
        self._actor.gradients(kept, d_out[None], into=self._actor_adam.gradient)
        self._actor_adam.step(self._actor.flat, self._on_non_finite)
        return -values.mean()
