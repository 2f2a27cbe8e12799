"""SAC's gradient step for plain MLPs on a CPU, with its derivatives written by hand.

The same step, to rounding, as ``ops.soft_actor_critic`` with autograd and ``torch.optim.Adam`` (a
test holds them together), which remains the general path; up to twice as fast. Parameters are
borrowed: they come from the modules when an update begins and go back when it ends, so checkpoints,
weight publication and the other path never see a difference.

Shape suffixes: ``B`` rows of a minibatch, ``A`` action dimensions, ``E`` critics. Actions are unit
actions.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from rlightning.ops.distributions import squashed_gaussian_log_prob
from rlightning.ops.flat_mlp import Activations, FlatAdam, FlatMLP, is_plain_adam
from rlightning.ops.fused_critics import FusedStep, are_plain
from rlightning.ops.q_learning import ensemble_loss, td_target
from rlightning.ops.soft_actor_critic import soft_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rlightning.ops.fused_critics import Rows

__all__ = ["FusedSAC", "SACLayers", "SACOptimizers", "SACSettings", "supports"]


class SACLayers(NamedTuple):
    """The networks of SAC that are nothing but linear layers with an activation between them.

    Attributes:
        actor: features to means and squeezed ``log_std`` side by side.
        critics: features and unit actions side by side to a value, each.
        targets: their slow copies.
        activation: ``relu`` or ``tanh``.
        log_alpha: logarithm of the temperature, a scalar.
        log_std_bounds: what ``log_std`` is squeezed into.
    """

    actor: Sequence[nn.Linear]
    critics: Sequence[Sequence[nn.Linear]]
    targets: Sequence[Sequence[nn.Linear]]
    activation: str
    log_alpha: nn.Parameter
    log_std_bounds: tuple[float, float]


class SACOptimizers(NamedTuple):
    """The optimizers, all plain Adam; without one of the temperature it stays as it is."""

    actor: torch.optim.Optimizer
    critic: torch.optim.Optimizer
    temperature: torch.optim.Optimizer | None


class SACSettings(NamedTuple):
    """Numbers of the update: how far slow critics move, and the entropy to hold, in nats."""

    tau: float
    target_entropy: float


class _Draw(NamedTuple):
    """Actions drawn from the policy, and what their derivatives need; [B, A] each."""

    action: Tensor
    log_prob: Tensor
    noise: Tensor
    std: Tensor
    squeezed: Tensor


def supports(layers: SACLayers, optimizers: SACOptimizers) -> bool:
    """Return whether these networks and optimizers can take the fused step."""
    actor, temperature = [layers.actor], optimizers.temperature
    learned = ((optimizers.actor, actor), (optimizers.critic, layers.critics))
    return are_plain(layers.activation, (actor, layers.critics, layers.targets), learned) and (
        temperature is None or is_plain_adam(temperature, [layers.log_alpha])
    )


class FusedSAC(FusedStep):
    """SAC's step; see `FusedStep`.

    Args:
        layers: the networks.
        optimizers: theirs; `supports` must hold.
        settings: numbers of the update.
        on_non_finite: see `FusedStep`.
    """

    def __init__(
        self,
        layers: SACLayers,
        optimizers: SACOptimizers,
        settings: SACSettings,
        *,
        on_non_finite: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._layers, self._settings = layers, settings
        stacks = ([layers.actor], layers.critics, layers.targets)
        networks = [FlatMLP(members, layers.activation) for members in stacks]
        actor, critic, temperature = optimizers
        super().__init__(networks, actor=actor, critic=critic, on_non_finite=on_non_finite)
        self._target = networks[2]
        self._log_alpha = layers.log_alpha.detach().reshape(1).clone()
        self._alpha_adam: FlatAdam | None = None
        if temperature is not None:
            self._alpha_adam = FlatAdam(
                temperature,
                [layers.log_alpha],
                cut=lambda flat: [flat.view(())],
                zeros=lambda: torch.zeros_like(self._log_alpha),
            )
            self._adams.append(self._alpha_adam)

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Take parameters and the temperature; see `FusedStep.borrowed`."""
        with super().borrowed():
            self._log_alpha.copy_(self._layers.log_alpha)
            try:
                yield
            finally:
                self._layers.log_alpha.copy_(self._log_alpha.view(()))

    def step(
        self, rows: Rows, *, learn_actor: bool, move_targets: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Take one gradient step; see `FusedStep.step`."""
        n_rows = len(rows.reward)
        # The policy does not move before it is asked about both, so it is asked once.
        features = rows.next_features
        if learn_actor:
            features = torch.cat([rows.next_features, rows.features])
        out, kept = self._actor.forward(features)
        first, second = slice(0, n_rows), slice(n_rows, None)
        drawn = self._draw(out[0, first])
        target = self._target_of(rows, drawn)
        q = self._regress(rows, target)
        metrics = {"critic_loss": ensemble_loss(q, target, rows.weight), "q": q.mean()}
        if learn_actor:
            drawn = self._draw(out[0, second])
            metrics |= self._learn_actor(rows.features, drawn, kept.rows(second))
        if move_targets:
            self._target.flat.lerp_(self._critic.flat, self._settings.tau)
        return metrics, (q - target).abs_().mean(0)

    def _draw(self, out_B2A: Tensor) -> _Draw:
        """Draw unit actions from what the actor answered."""
        mean, raw = out_B2A.chunk(2, -1)
        low, high = self._layers.log_std_bounds
        squeezed = raw.tanh()
        log_std = low + 0.5 * (high - low) * (squeezed + 1.0)
        noise, std = torch.empty_like(mean).normal_(), log_std.exp()
        pre_tanh = torch.addcmul(mean, noise, std)
        log_prob = squashed_gaussian_log_prob(pre_tanh, mean, log_std)
        return _Draw(pre_tanh.tanh(), log_prob, noise, std, squeezed)

    def _target_of(self, rows: Rows, drawn: _Draw) -> Tensor:
        """Compute the soft value targets, [B]; `drawn` are actions that may follow."""
        later, _ = self._target.forward(torch.cat([rows.next_features, drawn.action], -1))
        value = soft_value(later.squeeze(-1), drawn.log_prob, self._log_alpha.exp())
        return td_target(rows.reward, rows.discount, value)

    def _learn_actor(self, features: Tensor, drawn: _Draw, kept: Activations) -> dict[str, Tensor]:
        """Step policy and temperature; `kept` is of these features."""
        n_rows, alpha = len(features), self._log_alpha.exp()
        action = drawn.action
        out, valued = self._critic.forward(torch.cat([features, action], -1))
        lowest, which = out.squeeze(-1).min(0)
        loss = (alpha * drawn.log_prob - lowest).mean()
        d_lowest = torch.full((n_rows, 1), -1.0 / n_rows, dtype=out.dtype)
        columns = slice(features.shape[1], None)
        d_action = self._critic.chosen_input_gradient(valued, which, d_lowest, columns)
        # With u the action before tanh: d a / d u = 1 - a^2, d log_prob / d u = 2 a, and
        # log_prob also falls by log_std.
        weight = alpha / n_rows
        d_mean = d_action * (1.0 - action * action) + (2.0 * weight) * action
        low, high = self._layers.log_std_bounds
        slope = (0.5 * (high - low)) * (1.0 - drawn.squeezed * drawn.squeezed)
        d_raw = (d_mean * drawn.std * drawn.noise - weight) * slope
        self._step_actor(kept, torch.cat([d_mean, d_raw], -1)[None])
        entropy = -drawn.log_prob.mean()
        if self._alpha_adam is not None:
            self._alpha_adam.gradient.copy_(alpha * (entropy - self._settings.target_entropy))
            self._alpha_adam.step(self._log_alpha, self._on_non_finite)
        return {
            "actor_loss": loss,
            "entropy": entropy,
            "temperature": self._log_alpha.exp().squeeze(0),
        }
