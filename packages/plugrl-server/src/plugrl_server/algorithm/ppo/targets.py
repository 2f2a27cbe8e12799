"""From a buffer of frames to what the gradient steps of PPO regress on and weigh by.

The maths is rlightning's `ops.returns`; this file lines frames up for it. A frame that lasted k
environment steps discounts by ``gamma ** k``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from plugrl_server.common.trees import take
from rlightning.ops import returns

if TYPE_CHECKING:
    from torch import Tensor

    from plugrl_server.buffer.rollout_buffer import RolloutBuffer, Segments

__all__ = ["Targets", "discounted_returns", "frame_targets"]

_CHUNK_ROWS = 4096


class Targets(NamedTuple):
    """Per frame, ``[n]`` each.

    Attributes:
        advantage: of the action.
        value_target: what the critic regresses on.
    """

    advantage: Tensor
    value_target: Tensor


def frame_targets(  # the columns of a rollout and the constants of the method
    buffer: RolloutBuffer,
    segments: Segments,
    policy: Any,
    *,
    reward: Tensor,
    value: Tensor,
    log_ratio: Tensor | None,
    gamma: float,
    gae_lambda: float,
) -> Targets:
    """Estimate advantages and value targets.

    Args:
        buffer: the frames.
        segments: how they follow each other.
        policy: its ``get_value`` bootstraps.
        reward: as learned from, ``[n]``.
        value: of what was seen, ``[n]``.
        log_ratio: log-probability now minus when the action was drawn, ``[n]``, for V-trace; None
            for generalised advantage estimation.
        gamma: per environment step.
        gae_lambda: per frame.
    """
    frames = buffer.read()
    next_value = segments.shift(value)
    for wanted, observation in buffer.bootstrap():
        next_value[torch.from_numpy(wanted)] = _values(policy, observation, len(wanted))
    block = segments.block
    gammas: Tensor = gamma ** block(frames["steps"]).float()
    reward, value, next_value = (block(x) for x in (reward, value, next_value))
    ends = (block(frames["terminated"]), block(frames["truncated"]))
    if log_ratio is None:
        advantage, target = returns.gae(
            reward, value, next_value, *ends, gamma=gammas, gae_lambda=gae_lambda
        )
    else:
        rows = (reward, value, next_value)
        target = returns.vtrace(
            *rows, *ends, block(log_ratio), gamma=gammas, trace_lambda=gae_lambda
        ).value_target_TN
        # Without the action's own ratio, by which PPO's surrogate multiplies.
        advantage = returns.advantage_of_targets(
            *rows, target, *ends, gamma=gammas, trace_lambda=gae_lambda
        )
    return Targets(segments.flat(advantage), segments.flat(target))


def _values(policy: Any, observation: dict[str, Any], rows: int) -> Tensor:
    """Evaluate a batch of any size in pieces."""
    parts = [
        torch.as_tensor(policy.get_value(take(observation, slice(at, at + _CHUNK_ROWS))))
        for at in range(0, rows, _CHUNK_ROWS)
    ]
    return torch.cat(parts).reshape(rows).float().cpu()


def discounted_returns(frames: dict[str, Any], segments: Segments, *, gamma: float) -> Tensor:
    """Sum rewards forwards: each frame's is its reward plus gamma times the one before, ``[n]``.

    The sum restarts with an episode and with a chain. Its spread is what rewards are divided by
    (Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", reward scaling).
    """
    reward = segments.block(frames["reward"])
    ended = segments.block(frames["terminated"] | frames["truncated"])
    # Forwards in time is backwards in the reversed block; the cut stands before the new episode.
    restarts = torch.zeros_like(ended)
    restarts[1:] = ended[:-1]
    restarts[0] = True
    none = torch.zeros_like(restarts)
    backwards = returns.discounted_sum(reward.flip(0), restarts.flip(0), none, gamma=gamma)
    return segments.flat(backwards.flip(0))
