"""PPO's gradient step for two plain tanh MLPs on a CPU, with its derivatives written by hand.

A minibatch of 64 through two 2x64 networks is a few dozen microseconds of arithmetic. Recording it
for automatic differentiation, walking thirteen parameter tensors in the optimizer and again for the
norm costs several times that. Here actor and critic run as one batched product per layer, their
parameters lie in one vector, and so do gradients and Adam's moments: one norm, one Adam.

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
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["FusedPPO", "Minibatch", "PlainLayers", "StepOutputs", "supports"]

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_tanh_backward = torch.ops.aten.tanh_backward.default
_NORM_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_


class PlainLayers(NamedTuple):
    """An actor and a critic that are nothing but linear layers with tanh between them.

    Attributes:
        actor: its linear layers; at least two.
        critic: its linear layers, of the same hidden widths; the last has one output.
        log_std: the parameter of a Gaussian actor, [A]; None for a categorical one.
        log_std_bounds: where an optimizer step leaves ``log_std``.
    """

    actor: Sequence[nn.Linear]
    critic: Sequence[nn.Linear]
    log_std: nn.Parameter | None
    log_std_bounds: tuple[float, float]


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
        entropy: mean over the minibatch, scalar.
        grad_norm: before clipping.
    """

    log_prob: Tensor
    value: Tensor
    entropy: Tensor
    grad_norm: float


def supports(layers: PlainLayers, optimizer: torch.optim.Optimizer) -> bool:
    """Return whether these layers and this optimizer can take the fused step."""
    hidden = [(layer.out_features, layer.in_features) for layer in layers.actor[:-1]]
    same = hidden == [(layer.out_features, layer.in_features) for layer in layers.critic[:-1]]
    parameters = _parameters(layers)
    plain_adam = type(optimizer) is torch.optim.Adam and all(
        group["weight_decay"] == 0.0 and not group["amsgrad"] and not group["maximize"]
        for group in optimizer.param_groups
    )
    return (
        plain_adam
        and len(optimizer.param_groups) == 1
        and {id(p) for p in optimizer.param_groups[0]["params"]} == {id(p) for p in parameters}
        and same
        and len(hidden) > 0
        and layers.critic[-1].out_features == 1
        and all(p.device.type == "cpu" and p.dtype == parameters[0].dtype for p in parameters)
    )


def _parameters(layers: PlainLayers) -> list[Tensor]:
    """List the parameters in the order of the flat vector: joint layers interleaved, then heads."""
    order: list[Tensor] = []
    for actor, critic in zip(layers.actor[:-1], layers.critic[:-1], strict=True):
        order += [actor.weight, critic.weight, actor.bias, critic.bias]
    for head in (layers.actor[-1], layers.critic[-1]):
        order += [head.weight, head.bias]
    return order if layers.log_std is None else [*order, layers.log_std]


class _Views:
    """One flat vector, cut the way the arithmetic wants it; used for parameters and gradients."""

    def __init__(self, flat: Tensor, layers: PlainLayers) -> None:
        self.by_parameter: list[Tensor] = []
        start = 0
        for parameter in _parameters(layers):
            stop = start + parameter.numel()
            self.by_parameter.append(flat[start:stop].view(parameter.shape))
            start = stop
        self.joint_weight: list[Tensor] = []  # [2, H, inputs] per hidden layer
        self.joint_bias: list[Tensor] = []  # [2, H]
        start = 0
        for layer in layers.actor[:-1]:
            n_weights, n_biases = 2 * layer.weight.numel(), 2 * layer.out_features
            weight = flat[start : start + n_weights].view(2, *layer.weight.shape)
            bias = flat[start + n_weights : start + n_weights + n_biases].view(2, -1)
            self.joint_weight.append(weight)
            self.joint_bias.append(bias)
            start += n_weights + n_biases
        heads = self.by_parameter[4 * (len(layers.actor) - 1) :]
        self.actor_weight, self.actor_bias, critic_weight, self.critic_bias = heads[:4]
        self.critic_weight = critic_weight.view(-1)
        self.log_std = heads[4] if len(heads) > 4 else flat[:0]


def _tanh_(z: Tensor) -> Tensor:
    """Apply tanh in place; numpy's is vectorised and takes a fifth of the time of torch's."""
    array = z.numpy()
    np.tanh(array, out=array)
    return z


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
        self._layers, self._optimizer = layers, optimizer
        self._clip_ratio, self._value_coef = clip_ratio, value_coef
        self._entropy_coef, self._max_grad_norm = entropy_coef, max_grad_norm
        self._order = _parameters(layers)
        size = sum(parameter.numel() for parameter in self._order)
        self._flat, self._gradient, self._exp_avg, self._exp_avg_sq, self._scratch = (
            torch.zeros(size, dtype=self._order[0].dtype) for _ in range(5)
        )
        self._weights, self._gradients = (
            _Views(flat, layers) for flat in (self._flat, self._gradient)
        )
        self._n_steps = 0

    # ---- borrowing -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def borrowed(self) -> Iterator[None]:
        """Take parameters and moments for the duration of an update; autograd is off inside.

        An error inside leaves modules and optimizer as they were before.
        """
        with torch.no_grad():
            for name, flat in self._moments():
                for parameter, view in self._paired(flat):
                    state = self._optimizer.state[parameter]
                    view.copy_(state[name]) if state else view.zero_()
            for parameter, view in self._paired(self._flat):
                view.copy_(parameter)
            state = self._optimizer.state[self._order[0]]
            self._n_steps = int(state["step"]) if state else 0
            self._project()
            yield
            for name, flat in self._moments():
                for parameter, view in self._paired(flat):
                    self._optimizer.state[parameter][name] = view.clone()
            for parameter, view in self._paired(self._flat):
                parameter.copy_(view)
                step = torch.tensor(float(self._n_steps))
                self._optimizer.state[parameter]["step"] = step

    def _moments(self) -> tuple[tuple[str, Tensor], ...]:
        return (("exp_avg", self._exp_avg), ("exp_avg_sq", self._exp_avg_sq))

    def _paired(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self._order, _Views(flat, self._layers).by_parameter, strict=True)

    # ---- the step ------------------------------------------------------------------------------

    def step(self, minibatch: Minibatch) -> StepOutputs:
        """Take one gradient step; call it inside ``borrowed``."""
        hidden, out_BA, value_B = self._forward(minibatch.features)
        actor = self._categorical if self._layers.log_std is None else self._gaussian
        log_prob_B, d_out_BA, entropy = actor(minibatch, out_BA)
        error_B = value_B - minibatch.value_target
        d_value_B = error_B.mul_(2.0 * self._value_coef / len(error_B))
        self._backward(minibatch.features, hidden, d_out_BA, d_value_B)
        norm = float(self._gradient.norm())
        if not math.isfinite(norm):
            for parameter, gradient in self._paired(self._gradient):
                self._on_non_finite(parameter, gradient)
        if norm > self._max_grad_norm:
            self._gradient.mul_(self._max_grad_norm / (norm + _NORM_EPS))
        self._adam()
        self._project()
        return StepOutputs(log_prob_B, value_B, entropy, norm)

    def _forward(self, features_BD: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        """Return the hidden activations ([2, B, H] each), the actor's outputs and the values."""
        w = self._weights
        first_weight, first_bias = w.joint_weight[0], w.joint_bias[0]
        # Both networks read the same input: their first layers are one wide layer.
        wide = torch.addmm(first_bias.view(-1), features_BD, first_weight.flatten(0, 1).t())
        activation = _tanh_(wide).view(len(features_BD), 2, -1).transpose(0, 1)
        hidden = [activation]
        for weight, bias in zip(w.joint_weight[1:], w.joint_bias[1:], strict=True):
            activation = _tanh_(torch.baddbmm(bias.unsqueeze(1), activation, weight.mT))
            hidden.append(activation)
        out_BA = torch.addmm(w.actor_bias, activation[0], w.actor_weight.t())
        value_B = torch.addmv(w.critic_bias, activation[1], w.critic_weight)
        return hidden, out_BA, value_B

    def _backward(
        self, features_BD: Tensor, hidden: list[Tensor], d_out_BA: Tensor, d_value_B: Tensor
    ) -> None:
        """Fill the gradient of everything but ``log_std`` from those of the two outputs."""
        w, g, last = self._weights, self._gradients, hidden[-1]
        torch.mm(d_out_BA.t(), last[0], out=g.actor_weight)
        torch.sum(d_out_BA, 0, out=g.actor_bias)
        torch.mv(last[1].t(), d_value_B, out=g.critic_weight)
        torch.sum(d_value_B, 0, keepdim=True, out=g.critic_bias)
        d_hidden = torch.empty(last.shape, dtype=last.dtype)
        torch.mm(d_out_BA, w.actor_weight, out=d_hidden[0])
        torch.mul(d_value_B.unsqueeze(1), w.critic_weight, out=d_hidden[1])
        inputs = [features_BD, *hidden[:-1]]
        for i in reversed(range(len(hidden))):
            d_pre = _tanh_backward(d_hidden, hidden[i])
            torch.matmul(d_pre.mT, inputs[i], out=g.joint_weight[i])
            torch.sum(d_pre, 1, out=g.joint_bias[i])
            if i:
                d_hidden = torch.bmm(d_pre, w.joint_weight[i])

    def _surrogate(self, minibatch: Minibatch, log_prob_B: Tensor) -> Tensor:
        """Differentiate the clipped surrogate by the log-probabilities; [B]."""
        low, high = 1.0 - self._clip_ratio, 1.0 + self._clip_ratio
        ratio_B = (log_prob_B - minibatch.log_prob).exp_()
        gain_B = ratio_B * minibatch.advantage
        # d ratio / d log_prob = ratio; where the clipped term is the smaller one it is constant.
        unclipped = gain_B <= ratio_B.clamp_(low, high).mul_(minibatch.advantage)
        return gain_B.mul_(unclipped).mul_(-1.0 / len(gain_B))

    def _gaussian(self, minibatch: Minibatch, mean_BA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities, the gradient by the means, the entropy; fill ``log_std``'s."""
        log_std, n_actions = self._weights.log_std, mean_BA.shape[1]
        inverse_std = (-log_std).exp_()
        z_BA = (minibatch.action - mean_BA).mul_(inverse_std)
        z_squared_BA = z_BA * z_BA
        log_std_sum = log_std.sum()
        normalizer = log_std_sum + n_actions * _HALF_LOG_2PI
        log_prob_B = z_squared_BA.sum(1).mul_(-0.5).sub_(normalizer)
        d_log_prob_B = self._surrogate(minibatch, log_prob_B)
        # d log_prob / d mean = z / std, d log_prob / d log_std = z^2 - 1,
        # d entropy / d log_std = 1.
        d_log_std = self._gradients.log_std
        torch.mv(z_squared_BA.t(), d_log_prob_B, out=d_log_std)
        d_log_std.sub_(d_log_prob_B.sum() + self._entropy_coef)
        d_mean_BA = z_BA.mul_(inverse_std).mul_(d_log_prob_B.unsqueeze(1))
        return log_prob_B, d_mean_BA, log_std_sum + n_actions * (0.5 + _HALF_LOG_2PI)

    def _categorical(self, minibatch: Minibatch, out_BA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probabilities, the gradient by the logits and the mean entropy."""
        log_p_BA = out_BA.log_softmax(1)
        index_B1 = minibatch.action.unsqueeze(1)
        log_prob_B = log_p_BA.gather(1, index_B1).squeeze(1)
        d_log_prob_B1 = self._surrogate(minibatch, log_prob_B).unsqueeze(1)
        p_BA = log_p_BA.exp()
        # d log_prob / d logits = onehot - p
        d_logits_BA = p_BA * -d_log_prob_B1
        d_logits_BA.scatter_add_(1, index_B1, d_log_prob_B1)
        minus_entropy_B1 = (p_BA * log_p_BA).sum(1, keepdim=True)
        if self._entropy_coef:
            # d entropy / d logits = -p (log p + entropy)
            d_entropy_BA = log_p_BA.sub_(minus_entropy_B1).mul_(p_BA)
            d_logits_BA.add_(d_entropy_BA, alpha=self._entropy_coef / len(out_BA))
        return log_prob_B, d_logits_BA, minus_entropy_B1.mean().neg_()

    def _adam(self) -> None:
        """Adam (Kingma & Ba 2015), bias corrections folded into step size and epsilon."""
        group = self._optimizer.param_groups[0]
        beta1, beta2 = group["betas"]
        self._n_steps += 1
        correction = math.sqrt(1.0 - beta2**self._n_steps)
        step_size = float(group["lr"]) * correction / (1.0 - beta1**self._n_steps)
        self._exp_avg.lerp_(self._gradient, 1.0 - beta1)
        self._exp_avg_sq.mul_(beta2).addcmul_(self._gradient, self._gradient, value=1.0 - beta2)
        torch.sqrt(self._exp_avg_sq, out=self._scratch).add_(group["eps"] * correction)
        self._flat.addcdiv_(self._exp_avg, self._scratch, value=-step_size)

    def _project(self) -> None:
        if self._layers.log_std is not None:
            self._weights.log_std.clamp_(*self._layers.log_std_bounds)
