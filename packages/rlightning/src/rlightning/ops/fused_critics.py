"""What the fused steps of SAC and TD3 share: their rows, how critics regress, borrowed parameters.

Shape suffixes: ``B`` rows of a minibatch, ``A`` action dimensions, ``E`` critics.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rlightning.ops.flat_mlp import FlatAdam, FlatMLP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Rows", "adam_of", "borrowed", "regress"]


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


def adam_of(optimizer: torch.optim.Optimizer, network: FlatMLP) -> FlatAdam:
    """Return the Adam of a network's parameters."""
    return FlatAdam(optimizer, network.parameters, cut=network.cut, zeros=network.zeros)


@contextlib.contextmanager
def borrowed(networks: Sequence[FlatMLP], adams: Sequence[FlatAdam]) -> Iterator[None]:
    """Take parameters and optimizer states for the duration of the block, without autograd."""
    with torch.no_grad():
        for network in networks:
            network.pull()
        for adam in adams:
            adam.begin()
        try:
            yield
        finally:
            for network in networks:
                network.push()
            for adam in adams:
                adam.end()


def regress(
    critic: FlatMLP,
    adam: FlatAdam,
    rows: Rows,
    target_B: Tensor,
    on_non_finite: Callable[[Tensor, Tensor], None],
) -> Tensor:
    """Step the critics towards their target, by the loss of `q_learning.ensemble_loss`.

    Returns:
        Their values from before, [E, B].
    """
    out, kept = critic.forward(torch.cat([rows.features, rows.action], -1))
    q_EB = out.squeeze(-1)
    d_q = (q_EB - target_B).mul_(2.0 / len(target_B))
    if rows.weight is not None:
        d_q *= rows.weight
    critic.gradients(kept, d_q.unsqueeze(-1), into=adam.gradient)
    adam.step(critic.flat, on_non_finite)
    return q_EB
