"""PPO's gradient step for two plain tanh MLPs on a CPU, with its derivatives written by hand.

A minibatch of 64 through two 2x64 networks is a few dozen microseconds of arithmetic. Recording it
for automatic differentiation, dispatching every small operation, walking thirteen parameter tensors
in the optimizer and again for the norm costs many times that. Here actor and critic run as one
batched product per layer; their parameters lie in one vector, and so do gradients and Adam's
moments: one norm, one Adam. It is written in numpy, which dispatches twice as fast as torch and
has a tanh that takes a fifth of the time.

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
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["FusedPPO", "Minibatch", "PlainLayers", "StepOutputs", "supports"]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_NORM_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_

_NUMPY_PRODUCTS = 1 << 18
"""Multiplications in one product up to which numpy's OpenBLAS stays on the calling thread and beats
torch; larger products go to torch, whose threads are the ones a run configures."""


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
        entropy: mean over the minibatch.
        grad_norm: before clipping.
    """

    log_prob: Tensor
    value: Tensor
    entropy: float
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

    def __init__(self, flat: Array, layers: PlainLayers) -> None:
        self.by_parameter: list[Array] = []
        start = 0
        for parameter in _parameters(layers):
            stop = start + parameter.numel()
            self.by_parameter.append(flat[start:stop].reshape(parameter.shape))
            start = stop
        self.joint_weight: list[Array] = []  # [2, H, inputs] per hidden layer
        self.joint_bias: list[Array] = []  # [2, H]
        start = 0
        for layer in layers.actor[:-1]:
            middle = start + 2 * layer.weight.numel()
            stop = middle + 2 * layer.out_features
            self.joint_weight.append(flat[start:middle].reshape(2, *layer.weight.shape))
            self.joint_bias.append(flat[middle:stop].reshape(2, layer.out_features))
            start = stop
        heads = self.by_parameter[4 * (len(layers.actor) - 1) :]
        self.actor_weight, self.actor_bias, critic_weight, self.critic_bias = heads[:4]
        self.critic_weight = critic_weight.reshape(-1)
        self.log_std = heads[4] if len(heads) > 4 else flat[:0]


class _Rows(NamedTuple):
    """A minibatch as arrays, without what the fused step does not read."""

    features: Array
    action: Array
    log_prob: Array
    advantage: Array
    value_target: Array


class _Workspace:
    """Memory for one size of minibatch: activations and their gradients, [2, B, H] per layer."""

    def __init__(self, n_rows: int, layers: PlainLayers, dtype: Any) -> None:
        widths = [layer.out_features for layer in layers.actor[:-1]]
        # Both networks read the same input: their first layers are one wide layer, [B, 2H].
        self.wide = np.empty((n_rows, 2 * widths[0]), dtype)
        self.hidden = [self.wide.reshape(n_rows, 2, -1).transpose(1, 0, 2)]
        self.hidden += [np.empty((2, n_rows, width), dtype) for width in widths[1:]]
        self.d_hidden = [np.empty((2, n_rows, width), dtype) for width in widths]
        self.slope = [np.empty((2, n_rows, width), dtype) for width in widths]


def _matmul(left: Array, right: Array, out: Array) -> Array:
    """Write a (batched) matrix product, or a matrix-vector product, into `out`."""
    if right.ndim > 1 and left.shape[-2] * left.shape[-1] * right.shape[-1] <= _NUMPY_PRODUCTS:
        return np.matmul(left, right, out=out)
    product = torch.mv if right.ndim == 1 else torch.bmm if left.ndim == 3 else torch.mm
    product(torch.from_numpy(left), torch.from_numpy(right), out=torch.from_numpy(out))
    return out


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
        dtype = self._order[0].detach().numpy().dtype
        self._flat, self._gradient, self._exp_avg, self._exp_avg_sq, self._scratch = (
            np.zeros(size, dtype) for _ in range(5)
        )
        self._weights, self._gradients = (
            _Views(flat, layers) for flat in (self._flat, self._gradient)
        )
        self._workspaces: dict[int, _Workspace] = {}
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
                    view[...] = state[name].numpy() if state else 0.0
            for parameter, view in self._paired(self._flat):
                view[...] = parameter.numpy()
            state = self._optimizer.state[self._order[0]]
            self._n_steps = int(state["step"]) if state else 0
            self._workspaces.clear()  # the next rollout may have other sizes
            self._project()
            # Overflowing ratios become infinite gradients, which are looked for and reported.
            with np.errstate(over="ignore", invalid="ignore"):
                yield
            for name, flat in self._moments():
                for parameter, view in self._paired(flat):
                    self._optimizer.state[parameter][name] = torch.from_numpy(view.copy())
            for parameter, view in self._paired(self._flat):
                parameter.copy_(torch.from_numpy(view))
                step = torch.tensor(float(self._n_steps))
                self._optimizer.state[parameter]["step"] = step

    def _moments(self) -> tuple[tuple[str, Array], ...]:
        return (("exp_avg", self._exp_avg), ("exp_avg_sq", self._exp_avg_sq))

    def _paired(self, flat: Array) -> Iterator[tuple[Tensor, Array]]:
        return zip(self._order, _Views(flat, self._layers).by_parameter, strict=True)

    # ---- the step ------------------------------------------------------------------------------

    def step(self, minibatch: Minibatch) -> StepOutputs:
        """Take one gradient step; call it inside ``borrowed``."""
        rows = _Rows(*(column.numpy() for column in minibatch[:5]))
        n_rows = len(rows.features)
        if n_rows not in self._workspaces:
            self._workspaces[n_rows] = _Workspace(n_rows, self._layers, self._flat.dtype)
        work = self._workspaces[n_rows]
        out_BA, value_B = self._forward(rows.features, work)
        actor = self._categorical if self._layers.log_std is None else self._gaussian
        log_prob_B, d_out_BA, entropy = actor(rows, out_BA)
        d_value_B = (value_B - rows.value_target) * (2.0 * self._value_coef / n_rows)
        self._backward(rows.features, work, d_out_BA, d_value_B)
        norm = math.sqrt(float(np.dot(self._gradient, self._gradient)))
        if not math.isfinite(norm):
            for parameter, gradient in self._paired(self._gradient):
                self._on_non_finite(parameter, torch.from_numpy(gradient))
        if norm > self._max_grad_norm:
            self._gradient *= self._max_grad_norm / (norm + _NORM_EPS)
        self._adam()
        self._project()
        return StepOutputs(torch.from_numpy(log_prob_B), torch.from_numpy(value_B), entropy, norm)

    def _forward(self, features_BD: Array, work: _Workspace) -> tuple[Array, Array]:
        """Fill the hidden activations; return the actor's outputs [B, A] and the values [B]."""
        w, n_features = self._weights, features_BD.shape[1]
        _matmul(features_BD, w.joint_weight[0].reshape(-1, n_features).T, out=work.wide)
        work.wide += w.joint_bias[0].reshape(-1)
        np.tanh(work.wide, out=work.wide)
        for i in range(1, len(work.hidden)):
            pre = _matmul(work.hidden[i - 1], w.joint_weight[i].transpose(0, 2, 1), work.hidden[i])
            pre += w.joint_bias[i][:, None]
            np.tanh(pre, out=pre)
        actor_BH, critic_BH = work.hidden[-1]
        out_BA = np.empty((len(features_BD), len(w.actor_bias)), actor_BH.dtype)
        _matmul(actor_BH, w.actor_weight.T, out_BA)
        out_BA += w.actor_bias
        value_B = _matmul(critic_BH, w.critic_weight, np.empty_like(out_BA, shape=len(out_BA)))
        value_B += w.critic_bias
        return out_BA, value_B

    def _backward(
        self, features_BD: Array, work: _Workspace, d_out_BA: Array, d_value_B: Array
    ) -> None:
        """Fill the gradient of everything but ``log_std`` from those of the two outputs."""
        w, g = self._weights, self._gradients
        actor_BH, critic_BH = work.hidden[-1]
        _matmul(d_out_BA.T, actor_BH, out=g.actor_weight)
        d_out_BA.sum(0, out=g.actor_bias)
        _matmul(critic_BH.T, d_value_B, out=g.critic_weight)
        d_value_B.sum(keepdims=True, out=g.critic_bias)
        _matmul(d_out_BA, w.actor_weight, out=work.d_hidden[-1][0])
        np.multiply(d_value_B[:, None], w.critic_weight, out=work.d_hidden[-1][1])
        for i in reversed(range(len(work.hidden))):
            d_pre, slope = work.d_hidden[i], work.slope[i]
            np.square(work.hidden[i], out=slope)  # d tanh(x) / dx = 1 - tanh(x)^2
            np.subtract(1.0, slope, out=slope)
            d_pre *= slope
            d_pre.sum(1, out=g.joint_bias[i])
            if i:
                _matmul(d_pre.transpose(0, 2, 1), work.hidden[i - 1], out=g.joint_weight[i])
                _matmul(d_pre, w.joint_weight[i], out=work.d_hidden[i - 1])
        for network in range(2):
            _matmul(work.d_hidden[0][network].T, features_BD, out=g.joint_weight[0][network])

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
        log_std, n_actions = self._weights.log_std, mean_BA.shape[1]
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
        d_log_std = _matmul(z_squared_BA.T, d_log_prob_B, out=self._gradients.log_std)
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
        self._flat -= scratch

    def _project(self) -> None:
        if self._layers.log_std is not None:
            log_std = self._weights.log_std
            np.clip(log_std, *self._layers.log_std_bounds, out=log_std)
