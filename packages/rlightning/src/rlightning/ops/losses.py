"""Loss terms of actor-critic learning, each with the figures worth logging.

Every function takes tensors of one minibatch ([B]), returns a differentiable scalar and detached
scalars that say how the update went. Coefficients and sums belong to the algorithm.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class PolicyLoss(NamedTuple):
    """The clipped surrogate and its health.

    Attributes:
        loss: scalar to minimise.
        approx_kl: estimate of KL(old || new), detached.
        clip_fraction: share of samples whose ratio left the trust interval, detached.
    """

    loss: Tensor
    approx_kl: Tensor
    clip_fraction: Tensor


def approx_kl(log_prob_B: Tensor, old_log_prob_B: Tensor) -> Tensor:
    """Estimate KL(old || new) from samples of the old policy.

    ``mean(ratio - 1 - log ratio)``: unbiased, never negative (Schulman 2020, "Approximating KL
    Divergence").

    Args:
        log_prob_B: under the new policy, [B].
        old_log_prob_B: under the policy that sampled, [B].

    Returns:
        Scalar, in nats.
    """
    log_ratio = log_prob_B - old_log_prob_B
    return (log_ratio.exp() - 1.0 - log_ratio).mean()


def ppo_policy_loss(
    log_prob_B: Tensor,
    old_log_prob_B: Tensor,
    advantage_B: Tensor,
    *,
    clip_ratio: float,
    clip_ratio_high: float | None = None,
) -> PolicyLoss:
    """Compute PPO's clipped surrogate, as a loss.

    Schulman et al. 2017, "Proximal Policy Optimization Algorithms", equation 7.

    Args:
        log_prob_B: log-probabilities under the policy being trained, [B].
        old_log_prob_B: those recorded when the actions were taken, [B].
        advantage_B: advantages, [B].
        clip_ratio: the ratio is clipped to ``[1 - clip_ratio, 1 + clip_ratio_high]``.
        clip_ratio_high: upper half of the interval; as wide as the lower one if None.

    Returns:
        The loss, the KL estimate and the clip fraction.
    """
    low, high = 1.0 - clip_ratio, 1.0 + (clip_ratio if clip_ratio_high is None else clip_ratio_high)
    ratio = (log_prob_B - old_log_prob_B).exp()
    clipped = ratio.clamp(low, high)
    loss = -torch.min(ratio * advantage_B, clipped * advantage_B).mean()
    with torch.no_grad():
        clip_fraction = (ratio != clipped).to(ratio.dtype).mean()
        return PolicyLoss(loss, approx_kl(log_prob_B, old_log_prob_B), clip_fraction)


def value_loss(
    value_B: Tensor,
    return_B: Tensor,
    *,
    old_value_B: Tensor | None = None,
    clip_range: float | None = None,
) -> Tensor:
    """Compute the mean squared error of a critic, optionally kept near its old prediction.

    The clipped form is the larger of the plain error and the error of
    ``old + clip(value - old, ±clip_range)``, sample by sample (the PPO2 reference code).

    Args:
        value_B: predictions, [B].
        return_B: targets, [B].
        old_value_B: predictions made when the data was collected, [B]; needed to clip.
        clip_range: how far a prediction may profitably move; None turns clipping off.

    Returns:
        The mean over the minibatch; no factor one half.

    Raises:
        ValueError: ``clip_range`` without ``old_value_B``.
    """
    error = (value_B - return_B).square()
    if clip_range is None:
        return error.mean()
    if old_value_B is None:
        raise ValueError("clip_range needs old_value_B, the predictions recorded with the data")
    clipped = old_value_B + (value_B - old_value_B).clamp(-clip_range, clip_range)
    return torch.max(error, (clipped - return_B).square()).mean()


def entropy_loss(entropy_B: Tensor) -> Tensor:
    """Compute the negated mean entropy: adding it, weighted, to a loss keeps a policy exploring."""
    return -entropy_B.mean()


def standardize(advantage_B: Tensor, *, eps: float = 1e-8) -> Tensor:
    """Shift and scale advantages to mean 0 and (sample) standard deviation 1.

    One sample has no spread: it is returned unchanged instead of becoming NaN.

    Args:
        advantage_B: advantages, [B].
        eps: added to the standard deviation.

    Returns:
        The standardised advantages, [B].
    """
    if advantage_B.numel() < 2:
        return advantage_B
    std, mean = torch.std_mean(advantage_B)
    return (advantage_B - mean) / (std + eps)


def explained_variance(value_B: Tensor, return_B: Tensor) -> Tensor:
    """Measure how much of the returns' variance a critic predicts.

    Args:
        value_B: predictions, any shape.
        return_B: what came, same shape.

    Returns:
        ``1 - Var(return - value) / Var(return)``: 1 is perfect, 0 no better than the mean, below
        that worse. Returns that do not vary at all give 0.
    """
    variance = return_B.var(correction=0)
    residual = (return_B - value_B).var(correction=0)
    return torch.where(variance > 0, 1.0 - residual / variance, torch.zeros_like(variance))
