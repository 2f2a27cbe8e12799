"""TD3's gradient step for plain MLPs on a CPU, with its derivatives written by hand.

The same step, to rounding, as ``ops.td3`` with autograd and ``torch.optim.Adam`` (a test holds them
together), which remains the general path. Parameters are borrowed as in ``fused_sac``.

Shape suffixes: ``B`` rows of a minibatch, ``A`` action dimensions, ``E`` critics. Actions are unit
actions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from rlightning.ops.flat_mlp import FlatMLP
from rlightning.ops.fused_critics import FusedStep, are_plain
from rlightning.ops.q_learning import ensemble_loss, td_target
from rlightning.ops.td3 import clipped_double_value, noisy_action

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    actor, slow = [layers.actor], [layers.target_actor]
    stacks = (actor, layers.critics, slow, layers.target_critics)
    learned = ((optimizers.actor, actor), (optimizers.critic, layers.critics))
    return are_plain(layers.activation, stacks, learned)


class FusedTD3(FusedStep):
    """TD3's step; see `FusedStep`.

    Args:
        layers: the networks.
        optimizers: theirs; `supports` must hold.
        settings: numbers of the update.
        on_non_finite: see `FusedStep`.
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
        stacks = ([layers.actor], layers.critics, [layers.target_actor], layers.target_critics)
        networks = [FlatMLP(members, layers.activation) for members in stacks]
        super().__init__(networks, **optimizers._asdict(), on_non_finite=on_non_finite)
        self._slow_actor, self._slow_critic = networks[2:]

    def step(
        self, rows: Rows, *, learn_actor: bool, move_targets: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Take one gradient step; see `FusedStep.step`."""
        target = self._target(rows)
        q = self._regress(rows, target)
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
        self._step_actor(kept, d_out[None])
        return -values.mean()
