"""What the fused steps of SAC and TD3 share: their rows, borrowed parameters, how critics regress.

Shape suffixes: ``B`` rows of a minibatch, ``A`` action dimensions, ``E`` critics.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rlightning.ops.flat_mlp import ACTIVATIONS, Activations, FlatAdam, FlatMLP, is_plain_adam

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

__all__ = ["FusedStep", "Rows", "are_plain"]


class Rows(NamedTuple):
    """Rows of one gradient step, float32.

    Attributes:
        features: [B, D].
        action: unit actions, [B, A].
        reward: [B].
        discount: zero after a termination, [B].
        next_features: [B, D].
        weight: of importance sampling, [B]; ones if None.
    """

    features: Tensor
    action: Tensor
    reward: Tensor
    discount: Tensor
    next_features: Tensor
    weight: Tensor | None


def are_plain(
    activation: str,
    stacks: Sequence[Sequence[Sequence[nn.Linear]]],
    learned: Sequence[tuple[torch.optim.Optimizer, Sequence[Sequence[nn.Linear]]]],
) -> bool:
    """Return whether networks and optimizers can take a fused step.

    Args:
        activation: between the layers.
        stacks: groups of networks of one shape, each a list of layers.
        learned: the optimizers, with the group that each has all parameters of.
    """
    return (
        activation in ACTIVATIONS
        and all(FlatMLP.supports(members) for members in stacks)
        and all(
            is_plain_adam(optimizer, [p for m in members for x in m for p in x.parameters()])
            for optimizer, members in learned
        )
    )


class FusedStep:
    """A gradient step, between two moments at which parameters are borrowed and given back.

    Args:
        networks: actor and critics, which learn, and then slow ones.
        actor: the actor's optimizer.
        critic: the critics'.
        on_non_finite: called with each parameter and its gradient where a gradient is not finite,
            before its network moves; it may raise.
    """

    def __init__(
        self,
        networks: Sequence[FlatMLP],
        *,
        actor: torch.optim.Optimizer,
        critic: torch.optim.Optimizer,
        on_non_finite: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._networks = networks
        self._actor, self._critic = networks[:2]
        self._actor_adam, self._critic_adam = (
            FlatAdam(optimizer, network.parameters, cut=network.cut, zeros=network.zeros)
            for optimizer, network in ((actor, self._actor), (critic, self._critic))
        )
        self._adams = [self._actor_adam, self._critic_adam]
        self._on_non_finite = on_non_finite
        self.is_borrowed = False
        """Whether `step` may be called."""

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Take parameters for the duration of an update; autograd is off inside.

        After an error inside, modules and optimizers are as of the last whole step of each network.
        """
        with torch.no_grad():
            for network in self._networks:
                network.pull()
            for adam in self._adams:
                adam.begin()
            self.is_borrowed = True
            try:
                yield
            finally:
                self.is_borrowed = False
                for network in self._networks:
                    network.push()
                for adam in self._adams:
                    adam.end()

    def step(
        self, rows: Rows, *, learn_actor: bool, move_targets: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Take one gradient step; call it inside `borrowed`.

        Args:
            rows: the minibatch.
            learn_actor: whether policy, and temperature, learn too.
            move_targets: whether the slow networks follow.

        Returns:
            Metrics, and TD errors from before the step, [B].
        """
        raise NotImplementedError

    def _regress(self, rows: Rows, target_B: Tensor) -> Tensor:
        """Step the critics towards their target, by the loss of `q_learning.ensemble_loss`.

        Returns:
            Their values from before, [E, B].
        """
        out, kept = self._critic.forward(torch.cat([rows.features, rows.action], -1))
        q_EB = out.squeeze(-1)
        d_q = (q_EB - target_B).mul_(2.0 / len(target_B))
        if rows.weight is not None:
            d_q *= rows.weight
        self._critic.gradients(kept, d_q.unsqueeze(-1), into=self._critic_adam.gradient)
        self._critic_adam.step(self._critic.flat, self._on_non_finite)
        return q_EB

    def _step_actor(self, kept: Activations, d_out: Tensor) -> None:
        """Step the actor, given the derivative of its loss by what it answered."""
        self._actor.gradients(kept, d_out, into=self._actor_adam.gradient)
        self._actor_adam.step(self._actor.flat, self._on_non_finite)
