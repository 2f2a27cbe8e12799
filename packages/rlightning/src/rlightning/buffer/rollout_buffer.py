"""`RolloutBuffer`: the on-policy buffer. Sampling empties it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from pydantic import Field

from rlightning.buffer.data_buffer import DataBuffer
from rlightning.buffer.pipeline import refuse_taken
from rlightning.ops.returns import gae
from rlightning.utils.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tensordict import TensorDict

    from rlightning.buffer.columns import Path

__all__ = ["RolloutBuffer"]

_log = get_logger("buffer")


class RolloutBuffer(DataBuffer):
    """Keeps the transitions of one rollout and hands them out once.

    Where a policy answers ``value`` and ``final_value``, transitions get ``advantage`` and
    ``return`` by generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438). A
    truncated row bootstraps from ``final_value`` of the row after it (the value of the episode's
    own last observation), a terminated row from zero, and the end of the rollout from ``value`` of
    the last row. A transition of several environment steps (``steps``) discounts by each of them.
    """

    default_sampler = "all"
    keeps_sampled = False

    class Extras(DataBuffer.Extras):
        """Keys of the ``buffer`` section that only this class reads."""

        gamma: float = Field(default=0.99, ge=0, le=1)
        """Discount per environment step."""
        gae_lambda: float = Field(default=0.95, ge=0, le=1)
        """Trade-off of generalised advantage estimation between bias and variance."""

    def _sample(
        self, batch_size: int | None, *, shuffle: bool, drop_last: bool
    ) -> list[TensorDict]:
        """Drop every finished transition with it.

        Rows of unfinished segments stay: they belong to the next batch.
        """
        batches = super()._sample(batch_size, shuffle=shuffle, drop_last=drop_last)
        taken = sum(len(batch) for batch in batches)
        if taken < self.storage.rows:
            _log.warning(
                "%d of %d transitions were not sampled and are dropped; the sampler `all` uses "
                "every one",
                self.storage.rows - taken,
                self.storage.rows,
            )
        self.storage.clear()
        return batches

    def can_insert(self, rows: int) -> bool:
        """Return whether `rows` more transitions fit without dropping any."""
        return self.storage.rows + rows <= self.config.capacity

    def _derive(self, transitions: Mapping[Path, torch.Tensor]) -> dict[Path, torch.Tensor]:
        value, later = transitions.get(("value",)), transitions.get(("_next", "value"))
        final = transitions.get(("_next", "final_value"))
        if value is None or later is None or final is None:
            return {}
        refuse_taken(("advantage", "return"), [path[0] for path in transitions])
        terminated, truncated = transitions["terminated",], transitions["truncated",]
        shape = terminated.shape
        next_value = torch.where(
            (terminated | truncated), final.reshape(shape), later.reshape(shape)
        )
        gamma: float | torch.Tensor = self.options.gamma
        if ("steps",) in transitions:  # of a chunk of actions
            gamma = gamma ** transitions["steps",].reshape(shape).float()
        advantage, returns = gae(
            transitions["reward",],
            value.reshape(shape).float(),
            next_value.float(),
            terminated,
            truncated,
            gamma=gamma,
            gae_lambda=self.options.gae_lambda,
        )
        return {("advantage",): advantage, ("return",): returns}

    def _store(self, rows: dict[Path, torch.Tensor]) -> None:
        rows.pop(("final_value",), None)  # it has served its purpose in `_derive`
        super()._store(rows)
