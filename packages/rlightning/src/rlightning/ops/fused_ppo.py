"""PPO's gradient step for two plain tanh MLPs on a CPU, with its derivatives written by hand.

A minibatch of 64 through two 2x64 networks is a few dozen microseconds of arithmetic. Recording it
for automatic differentiation, dispatching every small operation, walking thirteen parameter tensors
in the optimizer and again for the norm costs many times that. Here the networks are those of
``plain_networks``: one batched product per layer in numpy, parameters in one vector; and so are
gradients and Adam's moments: one norm, one Adam.

The result is the same step, to rounding, as ``ops.losses`` with autograd and ``torch.optim.Adam``
(a test holds them together), which remains the general path. Parameters and moments are borrowed:
they come from the modules and the optimizer when an update begins and go back when it ends, so
checkpoints, weight publication and the other path never see a difference.

Shape suffixes: ``B`` rows of a minibatch, ``D`` input features, ``H`` a hidden width, ``A`` outputs
of the actor. Where actor and critic run as one there is a leading axis of 2, actor first.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rlightning.ops.flat_mlp import is_plain_adam
from rlightning.ops.plain_networks import (
    Array,
    FlatViews,
    PlainLayers,
    PlainNetworks,
    Workspace,
    matmul,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["FusedPPO", "Minibatch", "StepOutputs", "supports"]

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_NORM_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class Minibatch(NamedTuple):
    """Rows of one gradient step.

    Attributes:
        features: network inputs, float32, [B, D] on the fused path (any form on the other).
        action: [B, A] float32 for a Gaussian actor, indices [B] int64 for a categorical one.
        log_prob: of those actions when they were taken, [B].
        advantage: as it enters the loss, i.e. already standardised if it is to be, [B].
        value_target: what the critic regresses on, [B].
        old_value: the critic's prediction when the data was collected, in the same unit, [B].
    """

    features: Tensor
    action: Tensor
    log_prob: Tensor
    advantage: Tensor
    value_target: Tensor
    old_value: Tensor


class StepOutputs(NamedTuple):
    """What the networks said just before a gradient step.

    Attributes:
        log_prob: of the minibatch's actions, [B].
        value: [B].
        entropy: mean over the minibatch.
        grad_norm: before clipping.
    """

    log_prob: Tensor
    value: Tensor
    entropy: float
    grad_norm: float


def supports(layers: PlainLayers, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether these layers and this optimizer can take the fused step."""
    return layers.are_supported() and is_plain_adam(optimizer, layers.parameters())


class _Rows(NamedTuple):
    """A minibatch as arrays, without what the fused step does not read."""

    features: Array
    action: Array
    log_prob: Array
    advantage: Array
    value_target: Array


class FusedPPO:
    """The gradient step, between two moments at which parameters are borrowed and given back.

    Args:
        layers: the networks; ``supports`` must hold for them.
        optimizer: the plain Adam whose state and hyper-parameters are used.
        clip_ratio: of the surrogate.
        value_coef: weight of the mean squared error of the critic.
        entropy_coef: weight of the entropy bonus.
        max_grad_norm: norm that the whole gradient is clipped to.
        on_non_finite: called with each parameter and its gradient when the gradient's norm is not
            finite, before anything moves; it may raise.
    """

    def __init__(
        self,
        layers: PlainLayers,
        optimizer: torch.optim.Optimizer,
        *,
        clip_ratio: float,
        value_coef: float,
        entropy_coef: float,
        max_grad_norm: float,
        on_non_finite: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._on_non_finite = on_non_finite
        self._optimizer = optimizer
        self._clip_ratio, self._value_coef = clip_ratio, value_coef
        self._entropy_coef, self._max_grad_norm = entropy_coef, max_grad_norm
        self._networks = PlainNetworks(layers)
        self._gradient, self._exp_avg, self._exp_avg_sq, self._scratch = (
            self._networks.zeros() for _ in range(4)
        )
        self._gradients = FlatViews(self._gradient, layers)
        self._n_steps = 0

    # ---- borrowing -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Take parameters and moments for the duration of an update; autograd is off inside.

        An error inside leaves modules and optimizer as they were before.
        """
        networks, states = self._networks, self._optimizer.state
        with torch.no_grad():
            networks.pull()
            for name, flat in self._moments():
                for parameter, view in networks.paired(flat):
                    state = states[parameter]
                    view[...] = state[name].numpy() if state else 0.0
            state = states[networks.parameters[0]]
            self._n_steps = int(state["step"]) if state else 0
            self._project()
            # Overflowing ratios become infinite gradients, which are looked for and reported.
            with np.errstate(over="ignore", invalid="ignore"):
                yield
            for name, flat in self._moments():
                for parameter, view in networks.paired(flat):
                    states[parameter][name] = torch.from_numpy(view.copy())
            for parameter, view in networks.paired(networks.flat):
                parameter.copy_(torch.from_numpy(view))
                states[parameter]["step"] = torch.tensor(float(self._n_steps))

    def _moments(self) -> tuple[tuple[str, Array], ...]:
        return (("exp_avg", self._exp_avg), ("exp_avg_sq", self._exp_avg_sq))

    # ---- the step ------------------------------------------------------------------------------

    def step(self, minibatch: Minibatch) -> StepOutputs:
        """Take one gradient step; call it inside ``borrowed``."""
        rows = _Rows(*(column.numpy() for column in minibatch[:5]))
        networks = self._networks
        out_BA, value_B = networks.forward(rows.features)
        actor = self._categorical if networks.layers.log_std is None else self._gaussian
        log_prob_B, d_out_BA, entropy = actor(rows, out_BA)
        d_value_B = (value_B - rows.value_target) * (2.0 * self._value_coef / len(value_B))
        work = networks.workspace(len(value_B))
        self._backward(rows.features, work, d_out_BA, d_value_B)
        norm = math.sqrt(float(np.dot(self._gradient, self._gradient)))
        if not math.isfinite(norm):
            for parameter, gradient in networks.paired(self._gradient):
                self._on_non_finite(parameter, torch.from_numpy(gradient))
        if norm > self._max_grad_norm:
            self._gradient *= self._max_grad_norm / (norm + _NORM_EPS)
        self._adam()
        self._project()
        return StepOutputs(torch.from_numpy(log_prob_B), torch.from_numpy(value_B), entropy, norm)

    def _backward(
        self, features_BD: Array, work: Workspace, d_out_BA: Array, d_value_B: Array
    ) -> None:
        """Fill the gradient of everything but ``log_std`` from those of the two outputs."""
        w, g = self._networks.weights, self._gradients
        actor_BH, critic_BH = work.hidden[-1]
        matmul(d_out_BA.T, actor_BH, out=g.actor_weight)
        d_out_BA.sum(0, out=g.actor_bias)
        matmul(critic_BH.T, d_value_B, out=g.critic_weight)
        d_value_B.sum(keepdims=True, out=g.critic_bias)
        matmul(d_out_BA, w.actor_weight, out=work.d_hidden[-1][0])
        np.multiply(d_value_B[:, None], w.critic_weight, out=work.d_hidden[-1][1])
        for i in reversed(range(len(work.hidden))):
            d_pre, slope = work.d_hidden[i], work.slope[i]
            np.square(work.hidden[i], out=slope)  # d tanh(x) / dx = 1 - tanh(x)^2
            np.subtract(1.0, slope, out=slope)
            d_pre *= slope
            d_pre.sum(1, out=g.joint_bias[i])
            if i:
                matmul(d_pre.transpose(0, 2, 1), work.hidden[i - 1], out=g.joint_weight[i])
                matmul(d_pre, w.joint_weight[i], out=work.d_hidden[i - 1])
        for network in range(2):
            matmul(work.d_hidden[0][network].T, features_BD, out=g.joint_weight[0][network])

    def _surrogate(self, rows: _Rows, log_prob_B: Array) -> Array:
        """Differentiate the clipped surrogate by the log-probabilities; [B]."""
        ratio_B = np.exp(log_prob_B - rows.log_prob)
        gain_B = ratio_B * rows.advantage
        np.clip(ratio_B, 1.0 - self._clip_ratio, 1.0 + self._clip_ratio, out=ratio_B)
        ratio_B *= rows.advantage
        # d ratio / d log_prob = ratio; where the clipped term is the smaller one it is constant.
        d_log_prob_B = np.where(gain_B <= ratio_B, gain_B, 0.0)
        d_log_prob_B *= -1.0 / len(gain_B)
        return d_log_prob_B

    def _gaussian(self, rows: _Rows, mean_BA: Array) -> tuple[Array, Array, float]:
        """Return log-probabilities, the gradient by the means, the entropy; fill ``log_std``'s."""
        log_std, n_actions = self._networks.weights.log_std, mean_BA.shape[1]
        inverse_std = np.exp(-log_std)
        z_BA = (rows.action - mean_BA) * inverse_std
        z_squared_BA = z_BA * z_BA
        log_std_sum = float(log_std.sum())
        log_prob_B = z_squared_BA.sum(1)
        log_prob_B *= -0.5
        log_prob_B -= log_std_sum + n_actions * _HALF_LOG_2PI
        d_log_prob_B = self._surrogate(rows, log_prob_B)
        # d log_prob / d mean = z / std, d log_prob / d log_std = z^2 - 1,
        # d entropy / d log_std = 1.
        d_log_std = matmul(z_squared_BA.T, d_log_prob_B, out=self._gradients.log_std)
        d_log_std -= float(d_log_prob_B.sum()) + self._entropy_coef
        z_BA *= inverse_std
        z_BA *= d_log_prob_B[:, None]
        return log_prob_B, z_BA, log_std_sum + n_actions * (0.5 + _HALF_LOG_2PI)

    def _categorical(self, rows: _Rows, logits_BA: Array) -> tuple[Array, Array, float]:
        """Return log-probabilities, the gradient by the logits and the mean entropy."""
        n_rows = len(logits_BA)
        chosen = (np.arange(n_rows), rows.action)
        log_p_BA = logits_BA - logits_BA.max(1, keepdims=True)
        log_p_BA -= np.log(np.exp(log_p_BA).sum(1, keepdims=True))
        p_BA = np.exp(log_p_BA)
        log_prob_B = log_p_BA[chosen]
        d_log_prob_B = self._surrogate(rows, log_prob_B)
        # d log_prob / d logits = onehot - p
        d_logits_BA = p_BA * -d_log_prob_B[:, None]
        d_logits_BA[chosen] += d_log_prob_B
        minus_entropy_B1 = (p_BA * log_p_BA).sum(1, keepdims=True)
        if self._entropy_coef:
            # d entropy / d logits = -p (log p + entropy)
            d_logits_BA += p_BA * (log_p_BA - minus_entropy_B1) * (self._entropy_coef / n_rows)
        return log_prob_B, d_logits_BA, -float(minus_entropy_B1.mean())

    def _adam(self) -> None:
        """Adam (Kingma & Ba 2015), bias corrections folded into step size and epsilon."""
        group = self._optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        self._n_steps += 1
        correction = math.sqrt(1.0 - beta2**self._n_steps)
        step_size = float(group["lr"]) * correction / (1.0 - beta1**self._n_steps)
        scratch = self._scratch
        np.multiply(self._gradient, 1.0 - beta1, out=scratch)
        self._exp_avg *= beta1
        self._exp_avg += scratch
        np.square(self._gradient, out=scratch)
        scratch *= 1.0 - beta2
        self._exp_avg_sq *= beta2
        self._exp_avg_sq += scratch
        np.sqrt(self._exp_avg_sq, out=scratch)
        scratch += group["eps"] * correction
        np.divide(self._exp_avg, scratch, out=scratch)
        scratch *= step_size
        self._networks.flat -= scratch

    def _project(self) -> None:
        if self._networks.layers.log_std is not None:
            log_std = self._networks.weights.log_std
            np.clip(log_std, *self._networks.layers.log_std_bounds, out=log_std)
