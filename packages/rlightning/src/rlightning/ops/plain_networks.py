"""Two plain tanh MLPs, actor and critic, computed together in numpy from one flat vector.

A batch of a few rows through a small network is bound by dispatch, not arithmetic: the same layers
as torch modules take five times as long. Here actor and critic run as one batched product per
layer, and numpy's tanh takes a fifth of the time of torch's. ``fused_ppo`` adds the way back.

Shape suffixes: ``B`` rows, ``D`` input features, ``H`` a hidden width, ``A`` outputs of the actor.
Where actor and critic run as one there is a leading axis of 2, actor first.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "Array",
    "FlatViews",
    "Noise",
    "PlainLayers",
    "PlainNetworks",
    "Spread",
    "Workspace",
    "draw_gaussian",
    "matmul",
]

Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)

_NUMPY_PRODUCTS = 1 << 18
"""Multiplications in one product up to which numpy's OpenBLAS stays on the calling thread and beats
torch; larger products go to torch, whose threads are the ones a run configures."""

_NUMPY_VECTOR_PRODUCTS = 1 << 13
"""The same for a matrix times a vector, which OpenBLAS shares among threads earlier."""

_MOST_WORKSPACES = 64


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

    def parameters(self) -> list[Tensor]:
        """List the parameters in the flat vector's order: hidden layers interleaved, then heads."""
        order: list[Tensor] = []
        for actor, critic in zip(self.actor[:-1], self.critic[:-1], strict=True):
            order += [actor.weight, critic.weight, actor.bias, critic.bias]
        for head in (self.actor[-1], self.critic[-1]):
            order += [head.weight, head.bias]
        return order if self.log_std is None else [*order, self.log_std]

    def are_supported(self) -> bool:
        """Return whether ``PlainNetworks`` can compute them: same hidden widths, on a CPU."""
        hidden = [(layer.out_features, layer.in_features) for layer in self.actor[:-1]]
        same = hidden == [(layer.out_features, layer.in_features) for layer in self.critic[:-1]]
        if not same or not hidden or self.critic[-1].out_features != 1:
            return False
        parameters = self.parameters()
        dtype = parameters[0].dtype
        return dtype in (torch.float32, torch.float64) and all(
            p.device.type == "cpu" and p.dtype == dtype for p in parameters
        )


class FlatViews:
    """One flat vector, cut the way the arithmetic wants it; used for parameters and gradients."""

    def __init__(self, flat: Array, layers: PlainLayers) -> None:
        self.by_parameter: list[Array] = []
        start = 0
        for parameter in layers.parameters():
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
        # As a forward pass reads them.
        self.joint_weight_T = [weight.transpose(0, 2, 1) for weight in self.joint_weight]
        first = layers.actor[0]
        wide = self.joint_weight[0].reshape(2 * first.out_features, first.in_features)
        self.wide_weight_T = wide.T
        self.wide_bias = self.joint_bias[0].reshape(-1)
        self.row_bias = [bias[:, None] for bias in self.joint_bias]
        heads = self.by_parameter[4 * (len(layers.actor) - 1) :]
        self.actor_weight, self.actor_bias, critic_weight, self.critic_bias = heads[:4]
        self.actor_weight_T = self.actor_weight.T
        self.critic_weight = critic_weight.reshape(-1)
        self.log_std = heads[4] if len(heads) > 4 else flat[:0]


class Workspace:
    """Memory for one size of minibatch: activations and their gradients, [2, B, H] per layer."""

    def __init__(self, n_rows: int, layers: PlainLayers, dtype: Any) -> None:
        widths = [layer.out_features for layer in layers.actor[:-1]]
        # Both networks read the same input: their first layers are one wide layer, [B, 2H].
        self.wide = np.empty((n_rows, 2 * widths[0]), dtype)
        self.hidden = [self.wide.reshape(n_rows, 2, -1).transpose(1, 0, 2)]
        self.hidden += [np.empty((2, n_rows, width), dtype) for width in widths[1:]]
        self.d_hidden = [np.empty((2, n_rows, width), dtype) for width in widths]
        self.slope = [np.empty((2, n_rows, width), dtype) for width in widths]
        self.noise = Noise.like((n_rows, layers.actor[-1].out_features))


def matmul(left: Array, right: Array, out: Array) -> Array:
    """Write a (batched) matrix product, or a matrix-vector product, into `out`."""
    if right.ndim == 1 and left.size <= _NUMPY_VECTOR_PRODUCTS:
        return np.dot(left, right, out=out)
    if right.ndim > 1 and left.shape[-2] * left.shape[-1] * right.shape[-1] <= _NUMPY_PRODUCTS:
        return np.matmul(left, right, out=out)
    product = torch.mv if right.ndim == 1 else torch.bmm if left.ndim == 3 else torch.mm
    product(torch.from_numpy(left), torch.from_numpy(right), out=torch.from_numpy(out))
    return out


class PlainNetworks:
    """Actor and critic in one flat vector that is copied from their modules.

    Args:
        layers: the networks; ``layers.are_supported()`` must hold.

    Attributes:
        layers: the networks.
        parameters: their parameters, in the order of the vector.
        flat: the vector.
        weights: ``flat``, cut into matrices.
        spread: of a Gaussian actor, within its bounds, as of the last ``pull``.
    """

    def __init__(self, layers: PlainLayers) -> None:
        self.layers = layers
        self.parameters = layers.parameters()
        self.flat = self.zeros()
        self.weights = FlatViews(self.flat, layers)
        self.spread = Spread.of(self.weights.log_std)
        self._workspaces: dict[int, Workspace] = {}
        self._versions: list[int] = []

    def zeros(self) -> Array:
        """Return a new flat vector of zeros."""
        dtype = self.parameters[0].detach().numpy().dtype
        return np.zeros(sum(parameter.numel() for parameter in self.parameters), dtype)

    def paired(self, flat: Array) -> Iterator[tuple[Tensor, Array]]:
        """Yield each parameter with its part of a flat vector."""
        return zip(self.parameters, FlatViews(flat, self.layers).by_parameter, strict=True)

    def pull(self) -> None:
        """Copy the modules' parameters into the vector."""
        for parameter, view in self.paired(self.flat):
            view[...] = parameter.detach().numpy()
        low, high = self.layers.log_std_bounds
        self.spread = Spread.of(np.minimum(np.maximum(self.weights.log_std, low), high))
        self._versions = [parameter._version for parameter in self.parameters]

    def refresh(self) -> None:
        """Pull if a parameter has been written to since the last time."""
        if [parameter._version for parameter in self.parameters] != self._versions:
            self.pull()

    def workspace(self, n_rows: int) -> Workspace:
        """Return the memory for a batch of that size, holding the last such batch's activations."""
        work = self._workspaces.get(n_rows)
        if work is None:
            if len(self._workspaces) >= _MOST_WORKSPACES:
                self._workspaces.clear()
            work = self._workspaces[n_rows] = Workspace(n_rows, self.layers, self.flat.dtype)
        return work

    def forward(self, features_BD: Array) -> tuple[Array, Array]:
        """Compute a batch; its activations stay in its workspace until the next of that size.

        Args:
            features_BD: inputs, of the parameters' dtype.

        Returns:
            The actor's outputs [B, A] and the values [B], in memory of their own.
        """
        w, work = self.weights, self.workspace(len(features_BD))
        wide = matmul(features_BD, w.wide_weight_T, work.wide)
        wide += w.wide_bias
        np.tanh(wide, out=wide)
        for i in range(1, len(work.hidden)):
            pre = matmul(work.hidden[i - 1], w.joint_weight_T[i], work.hidden[i])
            pre += w.row_bias[i]
            np.tanh(pre, out=pre)
        actor_BH, critic_BH = work.hidden[-1]
        out_BA = np.empty((len(features_BD), len(w.actor_bias)), actor_BH.dtype)
        matmul(actor_BH, w.actor_weight_T, out_BA)
        out_BA += w.actor_bias
        value_B = matmul(critic_BH, w.critic_weight, np.empty(len(out_BA), out_BA.dtype))
        value_B += w.critic_bias
        return out_BA, value_B


class Spread(NamedTuple):
    """What the spread of a Gaussian contributes to samples and to their log-densities.

    Attributes:
        std: standard deviations, [A].
        log_scale: the logarithm of what the densities are divided by.
    """

    std: Array
    log_scale: Any

    @staticmethod
    def of(log_std_A: Array) -> Spread:
        """Compute it from logarithms of standard deviations, float32 [A]."""
        log_scale = np.add.reduce(log_std_A) + np.float32(_HALF_LOG_2PI * len(log_std_A))
        return Spread(np.exp(log_std_A), log_scale)


class Noise(NamedTuple):
    """Memory for standard normal noise, as a tensor and as an array of the same memory.

    To draw into a tensor that is there takes half the time of making one.
    """

    tensor: Tensor
    array: Array

    @staticmethod
    def like(shape: tuple[int, ...]) -> Noise:
        """Make it, float32 [B, A]."""
        with torch.inference_mode(mode=False):  # else nothing could be drawn outside of that mode
            tensor = torch.zeros(shape)
        return Noise(tensor, tensor.numpy())


def draw_gaussian(
    mean_BA: Array, spread: Spread, noise: Noise, *, generator: torch.Generator | None = None
) -> tuple[Array, Array]:
    """Do what ``distributions.gaussian_sample_with_log_prob`` does, in numpy, for a few rows.

    The noise is torch's, so that both draw the same actions from the same generator.

    Args:
        mean_BA: means, float32 [B, A].
        spread: of all rows.
        noise: overwritten; float32 [B, A].
        generator: source of randomness; torch's global one if None.

    Returns:
        Samples [B, A] and their log-densities [B].
    """
    noise.tensor.normal_(generator=generator)
    noise_BA = noise.array
    log_prob_B = np.add.reduce(noise_BA * noise_BA, 1)
    log_prob_B *= -0.5
    log_prob_B -= spread.log_scale
    sample_BA = noise_BA * spread.std
    sample_BA += mean_BA
    return sample_BA, log_prob_B
