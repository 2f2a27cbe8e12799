"""Turn rewards and value estimates into targets: GAE, n-step returns, discounted sums, V-trace.

Everything here is time-major: the leading axis is time (``T`` steps of one rollout), whatever
follows is a batch of environments (``N``). One convention holds throughout:

* ``reward[t]``, ``terminated[t]`` and ``truncated[t]`` belong to step ``t`` (the action taken
  in ``observation[t]``).
* ``next_value[t]`` is the value of the observation that really followed step ``t``: the value of
  the finished episode's own last observation where ``truncated[t]``, of ``observation[t + 1]``
  elsewhere, and of the last observation at the rollout's end. Where ``terminated[t]`` it may be
  anything, NaN included: no value is read there.
* A *cut* (``terminated | truncated``) ends the recursion; only ``terminated`` removes the
  bootstrap. The rollout's end is a border of the buffer, not an end of an episode: the recursion
  starts there and bootstraps from ``next_value[-1]``.

Knows nothing about buffers, policies or how the values came about.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class NStep(NamedTuple):
    """What an n-step window yields before anybody bootstraps.

    Attributes:
        reward_B: discounted sum of the rewards in the window.
        length_B: number of steps summed, int64, at least 1; the bootstrap observation is the one
            that followed step ``length - 1`` of the window.
        discount_B: factor of the bootstrap value: ``gamma ** length``, zero after a termination.
    """

    reward_B: Tensor
    length_B: Tensor
    discount_B: Tensor


class VTrace(NamedTuple):
    """V-trace targets.

    Attributes:
        value_target_TN: regression targets of the critic, ``vs``.
        advantage_TN: policy-gradient advantages, already weighted by the clipped ratio.
    """

    value_target_TN: Tensor
    advantage_TN: Tensor


def _same_shape(reference: Tensor, **others: Tensor) -> None:
    for name, tensor in others.items():
        if tensor.shape != reference.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but reward has {tuple(reference.shape)}; "
                "all inputs are time-major and of one shape [T, N]"
            )


def _ends(
    reward_TN: Tensor, terminated_TN: Tensor, truncated_TN: Tensor, **others: Tensor
) -> tuple[Tensor, Tensor]:
    """Return where episodes were terminated, and where they were cut at all, as bool [T, N].

    Raises:
        ValueError: shapes differ.
    """
    _same_shape(reward_TN, terminated=terminated_TN, truncated=truncated_TN, **others)
    terminated = terminated_TN.bool()
    return terminated, terminated | truncated_TN.bool()


def _next_value_or_zero(next_value: Tensor, terminated: Tensor) -> Tensor:
    """Remove the bootstrap of terminated steps; selection, so that a NaN there cannot leak."""
    return next_value.masked_fill(terminated, 0.0)


def _scan_backwards(start: Tensor, decay: Tensor) -> Tensor:
    """Solve ``x[t] = start[t] + decay[t] * x[t + 1]`` with ``x[T] = 0``; all tensors [T, ...]."""
    out = torch.empty_like(start)
    carry = torch.zeros_like(start[0])
    for start_t, decay_t, out_t in zip(
        reversed(start.unbind()), reversed(decay.unbind()), reversed(out.unbind()), strict=True
    ):
        carry = torch.addcmul(start_t, decay_t, carry, out=out_t)
    return out


@torch.no_grad()
def gae(
    reward_TN: Tensor,
    value_TN: Tensor,
    next_value_TN: Tensor,
    terminated_TN: Tensor,
    truncated_TN: Tensor,
    *,
    gamma: float | Tensor,
    gae_lambda: float,
) -> tuple[Tensor, Tensor]:
    """Estimate advantages by generalised advantage estimation.

    Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
    Estimation", equation 16, with time limits bootstrapped (Pardo et al. 2018).

    Args:
        reward_TN: rewards, floating, [T, N] (any trailing shape works).
        value_TN: value of the observation each action was taken in, [T, N].
        next_value_TN: value of what followed each step, see the module docstring, [T, N].
        terminated_TN: bool (or 0/1 of any dtype), [T, N].
        truncated_TN: likewise.
        gamma: discount factor; a tensor [T, N] gives each step its own, as chunks of steps need.
        gae_lambda: 0 gives one-step TD errors, 1 Monte Carlo returns minus values.

    Returns:
        ``(advantage_TN, return_TN)``; the return is advantage plus value, the critic's target.

    Raises:
        ValueError: shapes differ.
    """
    values = {"value": value_TN, "next_value": next_value_TN}
    terminated, cut = _ends(reward_TN, terminated_TN, truncated_TN, **values)
    delta = reward_TN + gamma * _next_value_or_zero(next_value_TN, terminated) - value_TN
    decay = (~cut).to(delta.dtype) * (gamma * gae_lambda)
    advantage = _scan_backwards(delta, decay)
    return advantage, advantage + value_TN


@torch.no_grad()
def discounted_sum(
    reward_TN: Tensor, terminated_TN: Tensor, truncated_TN: Tensor, *, gamma: float
) -> Tensor:
    """Sum discounted rewards from each step to its episode's end (or the rollout's), no bootstrap.

    Args:
        reward_TN: rewards, floating, [T, N].
        terminated_TN: bool, [T, N].
        truncated_TN: bool, [T, N].
        gamma: discount factor.

    Returns:
        ``sum_k gamma^k reward[t + k]`` over the rest of the same episode, [T, N].

    Raises:
        ValueError: shapes differ.
    """
    _, cut = _ends(reward_TN, terminated_TN, truncated_TN)
    return _scan_backwards(reward_TN, (~cut).to(reward_TN.dtype) * gamma)


@torch.no_grad()
def n_step_window(
    reward_KB: Tensor, terminated_KB: Tensor, cut_KB: Tensor, *, gamma: float
) -> NStep:
    """Reduce windows of K consecutive steps to n-step rewards.

    A replay buffer gathers, for each of B sampled steps, that step and the K - 1 after it, and
    asks here how far the window may be used. Nothing after a window's first cut is read.

    Args:
        reward_KB: rewards, floating, [K, B]; rows after a cut may hold anything.
        terminated_KB: bool, [K, B].
        cut_KB: bool, [K, B]: where the window must stop, i.e. terminated, truncated, or the
            newest step in the buffer.
        gamma: discount factor.

    Returns:
        An ``NStep``. The target of a sampled step is ``reward + discount * V(bootstrap)``.

    Raises:
        ValueError: shapes differ.
    """
    _same_shape(reward_KB, terminated=terminated_KB, cut=cut_KB)
    cut = cut_KB.bool() | terminated_KB.bool()
    # A step counts while no earlier step of its window was a cut.
    counts = torch.ones_like(cut)
    counts[1:] = cut[:-1].cumsum(0) == 0
    steps = torch.arange(len(reward_KB), device=reward_KB.device, dtype=reward_KB.dtype)
    powers = (gamma**steps).reshape(-1, *[1] * (reward_KB.dim() - 1))
    reward = (reward_KB.masked_fill(~counts, 0.0) * powers).sum(0)
    length = counts.sum(0)
    ended = (terminated_KB.bool() & counts).any(0)
    discount = (gamma ** length.to(reward.dtype)).masked_fill(ended, 0.0)
    return NStep(reward, length, discount)


@torch.no_grad()
def n_step_returns(
    reward_TN: Tensor,
    next_value_TN: Tensor,
    terminated_TN: Tensor,
    truncated_TN: Tensor,
    *,
    gamma: float,
    n_steps: int,
) -> Tensor:
    """Bootstrapped n-step returns of every step of a rollout.

    A window stops early at a cut and at the rollout's end, and then bootstraps from the step it
    stopped at, with the power of gamma that belongs to it (Sutton & Barto 2018, section 7.1).

    Args:
        reward_TN: rewards, floating, [T, N].
        next_value_TN: value of what followed each step, see the module docstring, [T, N].
        terminated_TN: bool, [T, N].
        truncated_TN: bool, [T, N].
        gamma: discount factor.
        n_steps: window length, at least 1.

    Returns:
        The returns, [T, N].

    Raises:
        ValueError: shapes differ, or ``n_steps`` is below 1.
    """
    terminated, cut = _ends(reward_TN, terminated_TN, truncated_TN, next_value=next_value_TN)
    if n_steps < 1:
        raise ValueError(f"n_steps is {n_steps}, expected at least 1")
    n_total = len(reward_TN)
    starts = torch.arange(n_total, device=reward_TN.device)
    offsets = torch.arange(min(n_steps, n_total), device=reward_TN.device)
    # [K, T]: the k-th step of the window that starts at t; the last step closes every window.
    index = (starts + offsets.unsqueeze(1)).clamp(max=n_total - 1)
    cut[-1] = True
    window = n_step_window(reward_TN[index], terminated[index], cut[index], gamma=gamma)
    last = starts.reshape(-1, *[1] * (reward_TN.dim() - 1)) + window.length_B - 1
    bootstrap = _next_value_or_zero(next_value_TN, terminated).gather(0, last)
    return window.reward_B + window.discount_B * bootstrap


@torch.no_grad()
def vtrace(  # noqa: PLR0913 - six columns of one rollout and the method's four constants
    reward_TN: Tensor,
    value_TN: Tensor,
    next_value_TN: Tensor,
    terminated_TN: Tensor,
    truncated_TN: Tensor,
    log_ratio_TN: Tensor,
    *,
    gamma: float | Tensor,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
    trace_lambda: float = 1.0,
) -> VTrace:
    """Correct value targets and advantages for data from an older policy.

    Espeholt et al. 2018, "IMPALA", equation 1 and remark 2 (lambda). With ``log_ratio`` zero the
    targets are the lambda-returns of GAE.

    Args:
        reward_TN: rewards, floating, [T, N].
        value_TN: the learner's value of each observation, [T, N].
        next_value_TN: the learner's value of what followed, see the module docstring, [T, N].
        terminated_TN: bool, [T, N].
        truncated_TN: bool, [T, N].
        log_ratio_TN: log-probability under the learner minus under the policy that acted, [T, N].
        gamma: discount factor; a tensor [T, N] gives each step its own, as chunks of steps need.
        rho_bar: cap of the ratio in the TD error and in the advantage.
        c_bar: cap of the ratio that carries corrections back in time.
        trace_lambda: further decay of those corrections.

    Returns:
        Value targets and advantages, [T, N] each.

    Raises:
        ValueError: shapes differ.
    """
    values = {"value": value_TN, "next_value": next_value_TN, "log_ratio": log_ratio_TN}
    terminated, cut = _ends(reward_TN, terminated_TN, truncated_TN, **values)
    next_value = _next_value_or_zero(next_value_TN, terminated)
    ratio = log_ratio_TN.exp()
    rho, trace = ratio.clamp(max=rho_bar), ratio.clamp(max=c_bar) * trace_lambda
    delta = rho * (reward_TN + gamma * next_value - value_TN)
    target = value_TN + _scan_backwards(delta, trace * (~cut).to(delta.dtype) * gamma)
    # Inside an episode the corrected target of the next step is the better bootstrap.
    next_target = torch.where(cut, next_value, torch.roll(target, -1, dims=0))
    next_target[-1] = next_value[-1]
    advantage = rho * (reward_TN + gamma * next_target - value_TN)
    return VTrace(target, advantage)


@torch.no_grad()
def advantage_of_targets(
    reward_TN: Tensor,
    value_TN: Tensor,
    next_value_TN: Tensor,
    target_TN: Tensor,
    terminated_TN: Tensor,
    truncated_TN: Tensor,
    *,
    gamma: float | Tensor,
    trace_lambda: float,
) -> Tensor:
    """Estimate the advantages of actions, given corrected targets of what followed them.

    ``reward + gamma * (V' + trace_lambda * (target' - V')) - V``, where a prime marks the next
    step of the same episode; at a cut nothing corrects ``V'``. The action's own ratio is left out:
    this is for surrogates that multiply by it, as PPO's does. With the targets of `vtrace` at a
    ``log_ratio`` of zero, these are the advantages of `gae`.

    Args:
        reward_TN: rewards, floating, [T, N].
        value_TN: the learner's value of each observation, [T, N].
        next_value_TN: the learner's value of what followed, see the module docstring, [T, N].
        target_TN: value targets, from `vtrace` with the same arguments, [T, N].
        terminated_TN: bool, [T, N].
        truncated_TN: bool, [T, N].
        gamma: discount factor; a tensor [T, N] gives each step its own.
        trace_lambda: how far the corrections of later steps count.

    Returns:
        Advantages, [T, N].

    Raises:
        ValueError: shapes differ.
    """
    values = {"value": value_TN, "next_value": next_value_TN, "target": target_TN}
    terminated, cut = _ends(reward_TN, terminated_TN, truncated_TN, **values)
    correction = torch.zeros_like(value_TN)
    correction[:-1] = (target_TN - value_TN)[1:].masked_fill(cut[:-1], 0.0)
    bootstrap = _next_value_or_zero(next_value_TN, terminated) + trace_lambda * correction
    return reward_TN + gamma * bootstrap - value_TN
