"""Learning action values: targets, losses and target networks, shared by DQN, TD3 and SAC.

Legend of shape suffixes: ``B`` batch, ``K`` discrete actions, ``E`` critics of an ensemble.

The discount of a transition is the factor of the value that its target bootstraps from:
``gamma ** steps``, zero after a termination. A truncated transition keeps its discount: the time
limit ended the episode, not the task.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


def bootstrap_discount(terminated_B: Tensor, *, gamma: float) -> Tensor:
    """Return the discounts of one-step transitions.

    Args:
        terminated_B: whether the task ended, bool, [B]; truncations do not belong here.
        gamma: discount factor of one environment step.

    Returns:
        float32, [B].
    """
    return gamma * (~terminated_B.bool()).to(torch.float32)


def td_target(reward_B: Tensor, discount_B: Tensor, next_value_B: Tensor) -> Tensor:
    """Compute what a critic should predict: reward plus discounted value of what followed.

    What followed a termination may be anything, NaN included: it is selected away, not multiplied.

    Args:
        reward_B: rewards, or discounted sums of n of them, [B].
        discount_B: see the module docstring, [B].
        next_value_B: values of the last observations, [B].

    Returns:
        [B].
    """
    bootstrap = discount_B * next_value_B
    return reward_B + torch.where(discount_B > 0, bootstrap, torch.zeros_like(bootstrap))


def ensemble_loss(q_EB: Tensor, target_B: Tensor, weight_B: Tensor | None = None) -> Tensor:
    """Sum the mean squared errors of all critics against one target; no factor one half.

    Args:
        q_EB: predictions, [E, B].
        target_B: detached, [B].
        weight_B: importance-sampling weights, [B]; ones if None.

    Returns:
        Scalar.
    """
    error = (q_EB - target_B).square()
    if weight_B is not None:
        error = error * weight_B
    return error.mean(-1).sum()


def huber_loss(q_B: Tensor, target_B: Tensor, weight_B: Tensor | None = None) -> Tensor:
    """Compute the mean Huber loss with threshold 1: squared error near zero, absolute beyond.

    The error clipping of Mnih et al. 2015, "Human-level control through deep reinforcement
    learning".

    Args:
        q_B: predictions, [B].
        target_B: detached, [B].
        weight_B: importance-sampling weights, [B]; ones if None.

    Returns:
        Scalar.
    """
    loss = torch.nn.functional.smooth_l1_loss(q_B, target_B, reduction="none")
    return loss.mean() if weight_B is None else (loss * weight_B).mean()


def greedy_value(next_q_BK: Tensor, chooser_q_BK: Tensor | None = None) -> Tensor:
    """Return the value of the best next action, [B].

    Args:
        next_q_BK: values of the slow network, which judges, [B, K].
        chooser_q_BK: values of the network that chooses the action; the slow one's own if None.
            With the learning network's this is double Q-learning (van Hasselt et al. 2016,
            arXiv:1509.06461): what chooses an action by mistake does not also overrate it.
    """
    if chooser_q_BK is None:
        return next_q_BK.amax(-1)
    return next_q_BK.gather(-1, chooser_q_BK.argmax(-1, keepdim=True)).squeeze(-1)


def dueling_values(value_B1: Tensor, advantage_BK: Tensor) -> Tensor:
    """Join a state's value and its actions' advantages, [B, K].

    Wang et al. 2016, "Dueling Network Architectures", arXiv:1511.06581, equation 9: advantages are
    taken relative to their mean.
    """
    return value_B1 + advantage_BK - advantage_BK.mean(-1, keepdim=True)


def linear_schedule(step: int, *, start: float, end: float, duration: int) -> float:
    """Return a number that moves from `start` to `end` in `duration` steps, and stays there."""
    done = min(1.0, max(0, step) / duration)
    return start + done * (end - start)


def epsilon_greedy(
    q_BK: Tensor, epsilon: float, *, generator: torch.Generator | None = None
) -> Tensor:
    """Choose the best action of each row, or with probability `epsilon` any, all equally likely.

    Actions that a row has not got, of value minus infinity, are never chosen.

    Args:
        q_BK: action values, [B, K].
        epsilon: in [0, 1].
        generator: source of randomness; torch's global one if None.

    Returns:
        Indices, int64, [B].
    """
    n_rows, n_actions = q_BK.shape
    device = q_BK.device
    explore = torch.rand(n_rows, generator=generator, device=device) < epsilon
    anything = torch.randint(n_actions, (n_rows,), generator=generator, device=device)
    missing = q_BK.isneginf()
    if missing.any():
        chance = torch.rand(q_BK.shape, generator=generator, device=device)
        anything = chance.masked_fill(missing, -1.0).argmax(-1)
    return torch.where(explore, anything, q_BK.argmax(-1))


@torch.no_grad()
def polyak_update(slow: Iterable[Tensor], fast: Iterable[Tensor], *, tau: float) -> None:
    """Move parameters a share `tau` of the way towards others, in place; 1 copies them.

    Args:
        slow: parameters of the target network.
        fast: those of the learning network, in the same order.
        tau: in (0, 1].
    """
    torch._foreach_lerp_(list(slow), list(fast), tau)
