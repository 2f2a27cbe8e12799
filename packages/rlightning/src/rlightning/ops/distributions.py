"""Probability of actions: sampling, log-probabilities and entropies, written for speed.

Plain functions on parameter tensors. They skip what ``torch.distributions`` spends most of a small
policy's time on: argument validation, broadcasting and object set-up.

Legend of shape suffixes: ``B`` batch, ``A`` action dimensions, ``K`` categories, ``L`` all logits
of a multi-categorical side by side. Log-probabilities and entropies are summed over an action's
dimensions and have shape [B]. A ``log_std`` may be [A] (one for all states) or [B, A].
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_LOG_2 = math.log(2.0)


def gaussian_sample(
    mean_BA: Tensor, log_std: Tensor, *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw from a diagonal Gaussian; differentiable in both parameters.

    Args:
        mean_BA: means, [B, A].
        log_std: logarithms of the standard deviations, [A] or [B, A].
        generator: source of randomness; torch's global one if None.

    Returns:
        Samples, [B, A].
    """
    noise = torch.empty_like(mean_BA).normal_(generator=generator)
    return torch.addcmul(mean_BA, noise, log_std.exp())


def gaussian_sample_with_log_prob(
    mean_BA: Tensor, log_std: Tensor, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw from a diagonal Gaussian and return the densities too, at the price of drawing.

    Args:
        mean_BA: means, [B, A].
        log_std: logarithms of the standard deviations, [A] or [B, A].
        generator: source of randomness; torch's global one if None.

    Returns:
        Samples [B, A] and their log-densities [B].
    """
    noise = torch.empty_like(mean_BA).normal_(generator=generator)
    constant = log_std.sum(-1) + _HALF_LOG_2PI * mean_BA.shape[-1]
    log_prob = noise.square().sum(-1) * -0.5 - constant
    return torch.addcmul(mean_BA, noise, log_std.exp()), log_prob


def gaussian_log_prob(sample_BA: Tensor, mean_BA: Tensor, log_std: Tensor) -> Tensor:
    """Compute log-densities of a diagonal Gaussian.

    Args:
        sample_BA: where to evaluate, [B, A].
        mean_BA: means, [B, A].
        log_std: [A] or [B, A].

    Returns:
        [B].
    """
    z = (sample_BA - mean_BA) * (-log_std).exp()
    constant = _HALF_LOG_2PI * mean_BA.shape[-1]
    return z.square().sum(-1) * -0.5 - log_std.sum(-1) - constant


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Compute the entropy of a diagonal Gaussian, in nats: [B], or a scalar for ``log_std`` [A]."""
    return log_std.sum(-1) + (0.5 + _HALF_LOG_2PI) * log_std.shape[-1]


def masked_gaussian_log_prob(
    sample_BA: Tensor, mean_BA: Tensor, log_std: Tensor, mask_BA: Tensor
) -> Tensor:
    """Compute log-densities of the dimensions that a mask keeps: of their marginal.

    Args:
        sample_BA: where to evaluate, [B, A].
        mean_BA: means, [B, A].
        log_std: [A] or [B, A].
        mask_BA: 1 for the dimensions that count, 0 for others, [B, A] in the dtype of the means.

    Returns:
        [B]; no gradient reaches the parameters of the other dimensions.
    """
    z = (sample_BA - mean_BA) * (-log_std).exp()
    return ((z.square() * -0.5 - log_std - _HALF_LOG_2PI) * mask_BA).sum(-1)


def masked_gaussian_entropy(log_std: Tensor, mask_BA: Tensor) -> Tensor:
    """Compute the entropy of the dimensions that a mask keeps, in nats; [B]."""
    return ((log_std + (0.5 + _HALF_LOG_2PI)) * mask_BA).sum(-1)


def squashed_gaussian_sample(
    mean_BA: Tensor, log_std: Tensor, *, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """Draw ``tanh(u)`` with Gaussian ``u``.

    Args:
        mean_BA: means of ``u``, [B, A].
        log_std: [A] or [B, A].
        generator: source of randomness; torch's global one if None.

    Returns:
        ``(action_BA, pre_tanh_BA)``. Keep the second: once tanh saturates the first cannot be
        inverted, and the log-probability is computed from ``u``.
    """
    pre_tanh = gaussian_sample(mean_BA, log_std, generator=generator)
    return pre_tanh.tanh(), pre_tanh


def squashed_gaussian_log_prob(pre_tanh_BA: Tensor, mean_BA: Tensor, log_std: Tensor) -> Tensor:
    """Compute log-densities of ``tanh(u)`` in action space.

    The volume correction ``sum log(1 - tanh(u)^2)`` is computed as
    ``2 (log 2 - u - softplus(-2u))``: the same number, finite wherever ``u`` is.

    Args:
        pre_tanh_BA: the sample before tanh, [B, A].
        mean_BA: means of ``u``, [B, A].
        log_std: [A] or [B, A].

    Returns:
        [B].
    """
    correction = 2.0 * (_LOG_2 - pre_tanh_BA - functional.softplus(-2.0 * pre_tanh_BA))
    return gaussian_log_prob(pre_tanh_BA, mean_BA, log_std) - correction.sum(-1)


def masked_squashed_gaussian_log_prob(
    pre_tanh_BA: Tensor, mean_BA: Tensor, log_std: Tensor, mask_BA: Tensor
) -> Tensor:
    """Compute log-densities of ``tanh(u)`` over the dimensions that a mask keeps; [B].

    Arguments as in `squashed_gaussian_log_prob` and `masked_gaussian_log_prob`.
    """
    correction = 2.0 * (_LOG_2 - pre_tanh_BA - functional.softplus(-2.0 * pre_tanh_BA))
    log_prob = masked_gaussian_log_prob(pre_tanh_BA, mean_BA, log_std, mask_BA)
    return log_prob - (correction * mask_BA).sum(-1)


def masked_log_softmax(log_p_BK: Tensor, mask_BK: Tensor) -> Tensor:
    """Normalise over the categories that a mask keeps; the others get ``-inf`` and no gradient.

    Args:
        log_p_BK: logits, or log-probabilities of all categories, [B, K].
        mask_BK: bool, at least one True per row, [B, K].

    Returns:
        [B, K].
    """
    return log_p_BK.masked_fill(~mask_BK, -torch.inf).log_softmax(-1)


def categorical_sample(logits_BK: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Draw categories by the Gumbel-max trick.

    Args:
        logits_BK: unnormalised log-probabilities, [B, K].
        generator: source of randomness; torch's global one if None.

    Returns:
        Indices, int64, [B].
    """
    # argmax(logits + Gumbel) = argmax(logits - log Exponential(1)).
    noise = torch.empty_like(logits_BK).exponential_(generator=generator)
    return (logits_BK - noise.log_()).argmax(-1)


def categorical_log_prob(log_p_BK: Tensor, index_B: Tensor) -> Tensor:
    """Pick log-probabilities of categories.

    Args:
        log_p_BK: *normalised* log-probabilities (``log_softmax`` of the logits), [B, K].
        index_B: categories, integer, [B].

    Returns:
        [B].
    """
    return log_p_BK.gather(-1, index_B.long().unsqueeze(-1)).squeeze(-1)


def categorical_entropy(log_p_BK: Tensor) -> Tensor:
    """Compute entropies of categorical distributions, in nats.

    Args:
        log_p_BK: *normalised* log-probabilities, [B, K]; ``-inf`` (a masked action) adds nothing.

    Returns:
        [B].
    """
    probability = log_p_BK.exp()
    # Clamped at the smallest float: 0 * -inf is NaN, 0 * min is 0.
    return -(probability * log_p_BK.clamp(min=torch.finfo(log_p_BK.dtype).min)).sum(-1)


def multi_categorical_sample(
    logits_BL: Tensor, sizes: Sequence[int], *, generator: torch.Generator | None = None
) -> Tensor:
    """Draw one category per group of logits.

    Args:
        logits_BL: logits of all groups side by side, [B, sum(sizes)]; normalised or not.
        sizes: categories per group, A of them.
        generator: source of randomness; torch's global one if None.

    Returns:
        Indices, int64, [B, A].
    """
    noise = torch.empty_like(logits_BL).exponential_(generator=generator)
    return multi_categorical_mode(logits_BL - noise.log_(), sizes)


def multi_categorical_mode(logits_BL: Tensor, sizes: Sequence[int]) -> Tensor:
    """Pick the likeliest category of each group; int64, [B, A]."""
    return torch.stack([group.argmax(-1) for group in torch.split(logits_BL, list(sizes), -1)], -1)


def multi_log_softmax(logits_BL: Tensor, sizes: Sequence[int]) -> Tensor:
    """Normalise each group of logits on its own; [B, sum(sizes)] in and out."""
    return torch.cat(
        [group.log_softmax(-1) for group in torch.split(logits_BL, list(sizes), -1)], -1
    )


def multi_categorical_log_prob(log_p_BL: Tensor, index_BA: Tensor, sizes: Sequence[int]) -> Tensor:
    """Add up the log-probabilities of one category per group.

    Args:
        log_p_BL: output of ``multi_log_softmax``, [B, sum(sizes)].
        index_BA: categories, integer, [B, A].
        sizes: categories per group.

    Returns:
        [B].
    """
    starts = [0]
    for size in sizes[:-1]:
        starts.append(starts[-1] + int(size))
    offset_A = torch.tensor(starts, device=index_BA.device)
    return log_p_BL.gather(-1, index_BA.long() + offset_A).sum(-1)


def bernoulli_sample(logits_BA: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
    """Draw independent bits with ``P(1) = sigmoid(logit)``; int64 zeros and ones, [B, A]."""
    uniform = torch.empty_like(logits_BA).uniform_(generator=generator)
    return (uniform < logits_BA.sigmoid()).long()


def bernoulli_log_prob(logits_BA: Tensor, bit_BA: Tensor) -> Tensor:
    """Add up the log-probabilities of independent bits ([B, A], 0 or 1, any dtype); [B]."""
    bits = bit_BA.to(logits_BA.dtype)
    return -functional.binary_cross_entropy_with_logits(logits_BA, bits, reduction="none").sum(-1)


def bernoulli_entropy(logits_BA: Tensor) -> Tensor:
    """Compute the entropy of independent bits, in nats; [B]."""
    probability = logits_BA.sigmoid()
    return functional.binary_cross_entropy_with_logits(
        logits_BA, probability, reduction="none"
    ).sum(-1)
