"""Running mean and variance, merged exactly, and scaling by them.

Statistics are kept in float64: after a hundred million samples a float32 count stops counting.
Merging moments (Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for
computing sample variances") is exact for any split of the data, so several workers pool what each
saw *since the last exchange*, merge the pool once, and agree without counting history twice.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn


class Moments(NamedTuple):
    """Mean, population variance and number of samples, float64.

    Attributes:
        mean: [*shape].
        var: [*shape], divided by ``n_samples``.
        n_samples: scalar.
    """

    mean: Tensor
    var: Tensor
    n_samples: Tensor


def batch_moments(batch_BS: Tensor) -> Moments:
    """Compute the moments of a batch over its leading axis.

    Args:
        batch_BS: samples, [B, *shape], any numeric dtype.

    Returns:
        Moments of shape [*shape]; zeros for an empty batch.
    """
    samples = batch_BS.to(torch.float64)
    count = torch.tensor(float(len(samples)), dtype=torch.float64, device=samples.device)
    if len(samples) == 0:
        zero = torch.zeros(samples.shape[1:], dtype=torch.float64, device=samples.device)
        return Moments(zero, zero.clone(), count)
    var, mean = torch.var_mean(samples, dim=0, correction=0)
    return Moments(mean, var, count)


def merge_moments(parts: Sequence[Moments]) -> Moments:
    """Pool moments of disjoint sets of samples into those of their union.

    Args:
        parts: at least one; empty ones change nothing.

    Returns:
        The moments of all samples together, whatever order or split they came in.
    """
    mean, var, n_samples = parts[0]
    for other in parts[1:]:
        total = n_samples + other.n_samples
        weight = other.n_samples / total.clamp(min=1.0)
        delta = other.mean - mean
        # Var of a union = weighted vars + variance between the two means.
        var = var * (1.0 - weight) + other.var * weight + delta.square() * weight * (1.0 - weight)
        mean = mean + delta * weight
        n_samples = total
    return Moments(mean, var, n_samples)


class _Float32(NamedTuple):
    """Statistics in single precision, and which ones they were computed from."""

    source: tuple[Tensor, Tensor]
    versions: tuple[int, int]
    mean: Tensor
    std: Tensor

    def is_of(self, mean: Tensor, var: Tensor) -> bool:
        """Return whether these are the same tensors, not written to since."""
        same = self.source[0] is mean and self.source[1] is var
        return same and self.versions == (mean._version, var._version)


class RunningMeanStd(nn.Module):
    """Normalise by everything seen so far.

    Until the first update it is the identity. In evaluation mode (``module.eval()``) the
    statistics are frozen: ``update`` and ``merge`` change nothing.

    Args:
        shape: shape of one sample.
        eps: added to the variance before the root.
        clip: bound of normalised values; None for none.

    Attributes:
        mean: float64 buffer, [*shape].
        var: float64 buffer, [*shape].
        count: float64 buffer, scalar.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(
        self, shape: Sequence[int] = (), *, eps: float = 1e-8, clip: float | None = 10.0
    ) -> None:
        super().__init__()
        self.eps, self.clip = eps, clip
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("var", torch.ones(tuple(shape), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self._single: _Float32 | None = None

    @property
    def moments(self) -> Moments:
        """The statistics as a value."""
        return Moments(self.mean, self.var, self.count)

    @property
    def std(self) -> Tensor:
        """``sqrt(var + eps)``, float64, [*shape]: what values are divided by."""
        return (self.var + self.eps).sqrt()

    @torch.no_grad()
    def update(self, batch_BS: Tensor) -> None:
        """Learn from samples [B, *shape].

        Raises:
            ValueError: a sample's shape is not the module's.
        """
        if batch_BS.shape[1:] != self.mean.shape:
            raise ValueError(
                f"got a batch of shape {tuple(batch_BS.shape)}, expected [B, *shape] with "
                f"shape {tuple(self.mean.shape)}"
            )
        self.merge(batch_moments(batch_BS))

    @torch.no_grad()
    def merge(self, moments: Moments) -> None:
        """Learn from the moments of samples not seen before (this worker's or a pool's)."""
        if not self.training:
            return
        merged = merge_moments([self.moments, moments])
        # In place: whoever holds the buffers (a checkpoint, a weight publisher) sees the change.
        self.mean.copy_(merged.mean)
        self.var.copy_(merged.var)
        self.count.copy_(merged.n_samples)

    def _float32(self) -> _Float32:
        """Return mean and deviation in float32, computed again only after they changed.

        Acting normalises at every step, and converting would cost more than the arithmetic.
        """
        if self._single is None or not self._single.is_of(self.mean, self.var):
            versions = (self.mean._version, self.var._version)
            mean, std = self.mean.to(torch.float32), self.std.to(torch.float32)
            self._single = _Float32((self.mean, self.var), versions, mean, std)
        return self._single

    def normalize(self, value_BS: Tensor) -> Tensor:
        """Shift and scale to mean 0, std 1, then clip.

        Args:
            value_BS: [..., *shape], any dtype.

        Returns:
            float32 of the same shape.
        """
        single = self._float32()
        normalized = (value_BS.to(torch.float32) - single.mean) / single.std
        return normalized if self.clip is None else normalized.clamp(-self.clip, self.clip)

    def denormalize(self, value_BS: Tensor) -> Tensor:
        """Undo ``normalize``, except for what was clipped; float32, same shape."""
        single = self._float32()
        return value_BS * single.std + single.mean

    def scale(self, value_BS: Tensor) -> Tensor:
        """Divide by the deviation alone; float32, same shape."""
        return value_BS / self._float32().std

    def unscale(self, value_BS: Tensor) -> Tensor:
        """Undo ``scale``; float32, same shape."""
        return value_BS * self._float32().std
