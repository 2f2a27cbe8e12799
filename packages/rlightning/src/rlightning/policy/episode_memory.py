"""`EpisodeMemory`: what a policy remembers of every environment between its steps.

Keyed by environment worker, so that workers may act together, alone or in any combination. Knows
nothing about networks: a memory is a vector of numbers per row.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

import torch

from rlightning.policy.joining import ROW_OWNERS

if TYPE_CHECKING:
    from torch import Tensor

    from rlightning.types import EnvRet

__all__ = ["EpisodeMemory", "rows_by_worker"]

_COUNTER_BITS = 31


def rows_by_worker(env_ret: EnvRet) -> tuple[tuple[str, int], ...]:
    """Return which workers an `EnvRet` holds rows of, and how many of each, in order.

    `rlightning.policy.joining.join_rows` says so where it joined several.
    """
    alone = ((env_ret.env_id, len(env_ret.last_terminated)),)
    workers: tuple[tuple[str, int], ...] = env_ret.info.get(ROW_OWNERS, alone)
    return workers


class EpisodeMemory:
    """A vector and a step number per row of every environment worker seen so far.

    Step numbers tell which rows of a batch follow each other: they go up by one with every row
    kept, and no two environments have numbers in common.

    Args:
        size: length of the vectors; 0 where only steps are counted.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: dict[str, tuple[Tensor, Tensor]] = {}

    def recall(self, env_ret: EnvRet) -> tuple[Tensor, Tensor]:
        """Return what is remembered of the rows of `env_ret`; zeros for a worker not seen before.

        Nothing is remembered of an episode that was lost (``info["_lost"]``).

        Returns:
            Vectors ``[rows, size]`` on the rows' device, and step numbers, int64 ``[rows]``.
        """
        device = env_ret.last_terminated.device
        entries = [self._entry(*worker) for worker in rows_by_worker(env_ret)]
        vectors, steps = [vector.to(device) for vector, _ in entries], [step for _, step in entries]
        vector, lost = _joined(vectors), _marked(env_ret, "_lost")
        if lost is not None:
            vector = vector.masked_fill(lost.to(device)[:, None], 0.0)
        return vector, _joined(steps)

    def _entry(self, env_id: str, rows: int) -> tuple[Tensor, Tensor]:
        entry = self._entries.get(env_id)
        if entry is None or len(entry[1]) != rows:
            names = [zlib.crc32(f"{env_id}/{row}".encode()) for row in range(rows)]
            return torch.zeros(rows, self._size), torch.tensor(names) << _COUNTER_BITS
        return entry

    def keep(self, env_ret: EnvRet, vector: Tensor) -> None:
        """Remember `vector` ``[rows, size]`` of the rows of `env_ret`, and count a step.

        Rows with nothing new (``info["_idle"]``) stay as they were.
        """
        start, counts = 0, torch.ones(len(vector), dtype=torch.int64)
        idle = _marked(env_ret, "_idle")
        if idle is not None:
            before, _ = self.recall(env_ret)
            vector = torch.where(idle.to(vector.device)[:, None], before, vector)
            counts = (~idle).to(torch.int64)
        for env_id, rows in rows_by_worker(env_ret):
            step = self._entry(env_id, rows)[1]
            part = slice(start, start + rows)
            self._entries[env_id] = (vector[part], step + counts[part])
            start += rows

    def state_dict(self) -> dict[str, Any]:
        """Return everything remembered, copied, by environment id."""
        return {
            env_id: {"vector": vector.clone(), "step": step.clone()}
            for env_id, (vector, step) in self._entries.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace everything remembered by what `state_dict` returned; ``{}`` forgets all."""
        self._entries = {
            env_id: (entry["vector"], entry["step"]) for env_id, entry in state.items()
        }


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _marked(env_ret: EnvRet, key: str) -> Tensor | None:
    """Return the rows that an environment marks in its info, bool ``[rows]`` on the CPU."""
    if not env_ret.has_info(key):
        return None
    return torch.as_tensor(env_ret.info[key]).cpu().bool().reshape(-1)
