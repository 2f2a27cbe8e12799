"""Deterministic actor-critic: Fujimoto et al. 2018, "Addressing Function Approximation Error in
Actor-Critic Methods" (TD3), arXiv:1802.09477.

Legend of shape suffixes: ``B`` batch, ``A`` action dimensions, ``E`` critics of an ensemble.
Actions are in [-1, 1]. Targets and critic losses are those of ``q_learning``.
"""  # noqa: D205 - the title does not fit on one line

import torch
from torch import Tensor


def noisy_action(
    action_BA: Tensor,
    *,
    std: float,
    noise_clip: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Add Gaussian noise to actions and keep them in [-1, 1].

    Args:
        action_BA: in [-1, 1], [B, A].
        std: standard deviation of the noise.
        noise_clip: most that the noise may move an action; as far as it falls if None. With it this
            is the target policy smoothing of section 5.3.
        generator: source of randomness; torch's global one if None.

    Returns:
        [B, A].
    """
    noise = torch.empty_like(action_BA).normal_(std=std, generator=generator)
    if noise_clip is not None:
        noise = noise.clamp(-noise_clip, noise_clip)
    return (action_BA + noise).clamp(-1.0, 1.0)


def clipped_double_value(q_EB: Tensor) -> Tensor:
    """Return the lowest critic's value of each row, [B]: section 4.2."""
    return q_EB.amin(0)


def actor_loss(q_EB: Tensor) -> Tensor:
    """Compute the loss of the policy: the first critic's negated mean value of its actions.

    Args:
        q_EB: critics' values of the policy's actions, [E, B].

    Returns:
        Scalar.
    """
    return -q_EB[0].mean()
