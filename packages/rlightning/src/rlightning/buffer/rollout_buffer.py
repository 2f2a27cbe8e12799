"""`RolloutBuffer`: the on-policy buffer. Sampling empties it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rlightning.buffer.data_buffer import DataBuffer
from rlightning.config import Config
from rlightning.ops.returns import gae

if TYPE_CHECKING:
    import numpy as np
    from tensordict import TensorDict

    from rlightning.buffer.columns import Path

__all__ = ["RolloutBuffer"]


class RolloutBuffer(DataBuffer):
    """Keeps the transitions of one rollout and hands them out once.

    Where a policy answers ``value`` and ``final_value``, transitions get ``advantage`` and
    ``return`` by generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438). A
    truncated row bootstraps from ``final_value`` of the row after it (the value of the episode's
    own last observation), a terminated row from zero, and the end of the rollout from ``value`` of
    the last row.
    """

    default_sampler = "all"

    class Extras(Config):
        """Keys of the ``buffer`` section that only this class reads."""

        gamma: float = 0.99
        """Discount per environment step."""
        gae_lambda: float = 0.95
        """Trade-off of generalised advantage estimation between bias and variance."""

    def __init__(self, config: Any, *, seed: int | None = None) -> None:
        super().__init__(config, seed=seed)
        self._chunks: list[dict[Path, torch.Tensor]] = []
        self._size = 0

    def size(self) -> int:
        """Return how many transitions the buffer holds."""
        return self._size

    def clear(self) -> None:
        """Drop all transitions and unfinished segments."""
        self._chunks = []
        self._size = 0
        for segment in self._segments.values():
            segment.reset()

    def sample(
        self,
        batch_size: int | None = None,
        shuffle: bool = True,  # noqa: FBT001, FBT002  # the documented signature
        drop_last: bool = True,  # noqa: FBT001, FBT002  # the documented signature
    ) -> list[TensorDict]:
        """Return a batch as `DataBuffer.sample` does, and empty the buffer."""
        batches = super().sample(batch_size, shuffle, drop_last)
        self._chunks = []  # unfinished segments stay: another thread may be filling them
        self._size = 0
        return batches

    def can_insert(self, rows: int) -> bool:
        """Return whether `rows` more transitions fit without dropping any."""
        return self._size + rows <= self.config.capacity

    def _derive(self, transitions: dict[Path, torch.Tensor]) -> dict[Path, torch.Tensor]:
        value, later = transitions.get(("value",)), transitions.get(("_next", "value"))
        final = transitions.get(("_next", "final_value"))
        if value is None or later is None or final is None:
            return {}
        terminated, truncated = transitions["terminated",], transitions["truncated",]
        shape = terminated.shape
        next_value = torch.where(
            (terminated | truncated), final.reshape(shape), later.reshape(shape)
        )
        advantage, returns = gae(
            transitions["reward",],
            value.reshape(shape),
            next_value,
            terminated,
            truncated,
            gamma=self.config.get("gamma"),
            gae_lambda=self.config.get("gae_lambda"),
        )
        return {("advantage",): advantage, ("return",): returns}

    def _store(self, rows: dict[Path, torch.Tensor]) -> None:
        count = next(iter(rows.values())).shape[0]
        self._chunks.append({path: rows[path] for path in rows if path != ("final_value",)})
        self._size += count
        while self._size > self.config.capacity:
            self._drop_oldest(self._size - self.config.capacity)

    def _drop_oldest(self, surplus: int) -> None:
        first = self._chunks[0]
        count = next(iter(first.values())).shape[0]
        if count <= surplus:
            self._chunks.pop(0)
            self._size -= count
        else:
            self._chunks[0] = {path: tensor[surplus:] for path, tensor in first.items()}
            self._size -= surplus

    def _gather(self, indices: np.ndarray[Any, Any] | None) -> dict[Path, torch.Tensor]:
        if len(self._chunks) == 1:
            rows = self._chunks[0]
        else:
            rows = {
                path: torch.cat([chunk[path] for chunk in self._chunks]) for path in self._chunks[0]
            }
        if indices is None:
            return rows
        return {path: tensor[torch.as_tensor(indices)] for path, tensor in rows.items()}
