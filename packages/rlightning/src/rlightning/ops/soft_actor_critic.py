"""Maximum-entropy actor-critic: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and
Applications", arXiv:1812.05905.

Legend of shape suffixes: ``B`` batch, ``E`` critics of an ensemble. ``alpha`` is the temperature,
the worth of one nat of entropy in units of reward; a scalar tensor. Targets and critic losses are
those of ``q_learning``.
"""  # noqa: D205 - the title does not fit on one line

import torch
from torch import Tensor


def soft_value(q_EB: Tensor, log_prob_B: Tensor, alpha: Tensor) -> Tensor:
    """Estimate the value of states from one action each: equation 3, of the lowest critic.

    Args:
        q_EB: critics' values of the actions, [E, B].
        log_prob_B: log-probabilities of those actions, [B].
        alpha: temperature, scalar.

    Returns:
        [B].
    """
    return q_EB.amin(0) - alpha * log_prob_B


def actor_loss(q_EB: Tensor, log_prob_B: Tensor, alpha: Tensor) -> Tensor:
    """Compute the loss of the policy, equation 7: the negated soft value of its own actions.

    Args:
        q_EB: critics' values of reparameterised actions, [E, B].
        log_prob_B: their log-probabilities, [B].
        alpha: temperature, scalar; no gradient reaches it.

    Returns:
        Scalar.
    """
    return -soft_value(q_EB, log_prob_B, alpha.detach()).mean()


def temperature_loss(log_alpha: Tensor, entropy: Tensor | float, target_entropy: float) -> Tensor:
    """Compute the loss of the temperature, equation 18: entropy above the target lowers it.

    The parameter is the logarithm, so no gradient step can make the temperature negative.

    Args:
        log_alpha: logarithm of the temperature, scalar.
        entropy: the policy's mean entropy, the negated mean log-probability; no gradient reaches
            it.
        target_entropy: what to hold it at, in nats.

    Returns:
        Scalar.
    """
    gap = torch.as_tensor(entropy).detach() - target_entropy
    return log_alpha.exp() * gap
