"""Small agreements between the ranks of a data-parallel learner; the identity where there is one.

Whatever decides how many gradient steps a rank takes must be the same everywhere, or the next
collective call waits for ever; and after each step all ranks hold the same weights, or they learn
apart from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rlightning.errors import ContractError
from rlightning.ops.normalization import Moments, merge_moments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

__all__ = ["check_same_weights", "least_over_ranks", "mean_over_ranks", "pooled_over_ranks"]


def _gathered(values: torch.Tensor, group: Any) -> list[torch.Tensor]:
    """Return the float64 vectors of all ranks, in rank order."""
    device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
    own = values.to(device)
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own, group=group)
    return [part.to(values.device) for part in parts]


def least_over_ranks(number: int, group: Any) -> int:
    """Return the smallest of the ranks' numbers."""
    if group is None:
        return number
    own = torch.tensor([float(number)], dtype=torch.float64)
    return int(min(float(part) for part in _gathered(own, group)))


def mean_over_ranks(number: float, group: Any) -> float:
    """Return the mean of the ranks' numbers."""
    if group is None:
        return number
    parts = _gathered(torch.tensor([number], dtype=torch.float64), group)
    return float(torch.stack(parts).mean())


def check_same_weights(policy: nn.Module, group: Any) -> None:
    """See that the trainable parameters of all ranks are equal, bit for bit.

    Raises:
        ContractError: one differs; its gradients were not exchanged.
    """
    if group is None:
        return
    named = [(name, each) for name, each in policy.named_parameters() if each.requires_grad]
    if not named:
        return
    sums = [each.detach().double() for _, each in named]
    own = torch.stack([torch.stack([each.sum(), each.square().sum()]) for each in sums])
    ranks = torch.stack(_gathered(own.nan_to_num(), group))
    differs = (ranks != ranks[0]).any(dim=(0, 2))
    if not differs.any():
        return
    first = int(differs.nonzero()[0])
    raise ContractError(
        f"{int(differs.sum())} of {len(named)} parameters differ between the "
        f"{len(ranks)} train workers, first {named[first][0].replace('module.', '')!r} (sums "
        f"{', '.join(f'{float(rank[first, 0]):.9g}' for rank in ranks)}): their gradients were not "
        "exchanged. Compute the loss through the policy's own attributes (self.actor(...)), which "
        "are wrapped for data parallelism, not through a reference taken before or .module, and "
        "keep trainable parameters inside a module of model_list"
    )


def pooled_over_ranks(moments: Sequence[Moments], group: Any) -> list[Moments]:
    """Pool each rank's moments of *new* samples, so that all ranks learn the same, once.

    Args:
        moments: of this rank; as many and of the same shapes on every rank.
        group: the process group, or None.

    Returns:
        The moments of all ranks' samples together.
    """
    if group is None:
        return list(moments)
    flat = torch.cat([torch.cat([part.reshape(-1) for part in item]) for item in moments])
    ranks = [_split_like(moments, vector) for vector in _gathered(flat, group)]
    return [merge_moments(items) for items in zip(*ranks, strict=True)]


def _split_like(moments: Sequence[Moments], flat: torch.Tensor) -> list[Moments]:
    out: list[Moments] = []
    start = 0
    for item in moments:
        parts: list[torch.Tensor] = []
        for part in item:
            parts.append(flat[start : start + part.numel()].reshape(part.shape))
            start += part.numel()
        out.append(Moments(*parts))
    return out
