"""`Ranks`: the learners of one algorithm, which take every gradient step together.

Each holds the same weights and sees the same batches, judges its own part of every batch, and adds
its gradient to the others': the sum is the gradient of the whole batch, however many they are. So
all take the same number of steps, and none can wait for another that has none left.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor

__all__ = ["Ranks"]


@final
class Ranks:
    """This learner among the others; one alone by default, which does nothing.

    Args:
        group: of `rlightning.runtime.process_group`.
        rank: this learner's number, from 0.
        count: how many there are.
    """

    def __init__(self, group: Any = None, rank: int = 0, count: int = 1) -> None:
        self.group, self.rank, self.count = group, rank, count

    def part(self, rows: int) -> tuple[slice, float]:
        """Give this learner's rows of a batch, and their share of it; the shares sum to one.

        Where there are fewer rows than learners, those that are left over look at the first row,
        with a share of zero: all must have gradients of the same parameters.
        """
        start, stop = (rows * number // self.count for number in (self.rank, self.rank + 1))
        if start == stop:
            return slice(0, 1), 0.0
        return slice(start, stop), (stop - start) / rows

    def join(
        self, parameters: Iterable[Tensor], numbers: Sequence[Tensor], *, share: float
    ) -> list[Tensor]:
        """Replace gradients by those of the whole batch; give the means over it, detached.

        Args:
            parameters: with the gradients of a mean over this learner's part.
            numbers: scalars, means over this learner's part.
            share: of the part, see `part`.
        """
        own = [number.detach() for number in numbers]
        if self.count == 1:
            return own
        import torch
        import torch.distributed as dist

        gradients = [p.grad for p in parameters if p.grad is not None]
        device = gradients[0].device
        numbers_flat = [number.to(device).float().reshape(1) for number in own]
        flat = torch.cat([*(g.reshape(-1).float() for g in gradients), *numbers_flat]) * share
        dist.all_reduce(flat, group=self.group)
        for gradient in gradients:
            gradient.copy_(flat[: gradient.numel()].view_as(gradient))
            flat = flat[gradient.numel() :]
        return list(flat)
