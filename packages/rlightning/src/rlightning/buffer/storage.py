"""`Storage`: finished transitions in order of arrival, the oldest dropped first.

Keeps whole pieces (a rollout's block, an episode) as they came and joins them when they are read.
Knows nothing about environments, policies or sampling.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlightning.buffer.columns import Indices, Path, dotted, take_rows
from rlightning.errors import ContractError
from rlightning.utils.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Storage"]

_log = get_logger("buffer")


class Storage:
    """Pieces of flat ``[rows, ...]`` columns, at most `capacity` rows in all.

    Args:
        capacity: rows held at most.
        mode: ``circular`` drops the oldest rows when full, ``fixed`` refuses new ones.
        unit: what an index and the length count: ``transition`` or ``episode``. Episodes are
            dropped and refused whole; one that is longer than `capacity` keeps its last rows.
    """

    def __init__(self, capacity: int, *, mode: str = "circular", unit: str = "transition") -> None:
        self.capacity = capacity
        self._fixed = mode == "fixed"
        self._by_episode = unit == "episode"
        self._pieces: deque[dict[Path, torch.Tensor]] = deque()
        self._rows = 0
        self.refused = 0
        """Rows that a full ``fixed`` storage did not take."""
        self.dropped = 0
        """Rows that a full ``circular`` storage overwrote."""
        self.is_full = False
        """Whether something was refused or overwritten since the storage was last empty."""

    def __len__(self) -> int:
        return len(self._pieces) if self._by_episode else self._rows

    @property
    def rows(self) -> int:
        """How many transitions are held."""
        return self._rows

    def append(self, columns: Mapping[Path, torch.Tensor]) -> None:
        """Add a piece; its tensors are kept, not copied.

        Raises:
            ContractError: its fields are not those of the pieces before.
        """
        piece = dict(columns)
        if self._pieces:
            self._check(piece)
        count = _length(piece)
        if self._fixed:
            count = self._accepted(piece, count)
            if count == 0:
                return
        elif count > self.capacity:
            self.dropped += count - self.capacity
            self.is_full = True
            piece = {path: tensor[count - self.capacity :] for path, tensor in piece.items()}
            count = self.capacity
        self._pieces.append(piece)
        self._rows += count
        while self._rows > self.capacity:
            self._drop_oldest(self._rows - self.capacity)

    def _check(self, piece: dict[Path, torch.Tensor]) -> None:
        first = self._pieces[0]
        if piece.keys() != first.keys():
            changed = sorted(dotted(path) for path in piece.keys() ^ first.keys())
            raise ContractError(
                f"the fields {changed} are in some transitions and not in others; the buffer keeps "
                "one set of fields for all environments"
            )
        for path, tensor in piece.items():
            if tensor.shape[1:] != first[path].shape[1:]:
                raise ContractError(
                    f"the field {dotted(path)!r} has shape {tuple(tensor.shape[1:])} here and "
                    f"{tuple(first[path].shape[1:])} before; all environments of one buffer have "
                    "the same shapes"
                )

    def _accepted(self, piece: dict[Path, torch.Tensor], count: int) -> int:
        room = self.capacity - self._rows
        take = count if count <= room else (0 if self._by_episode else room)
        if take < count:
            self.is_full = True
            if not self.refused:
                _log.warning(
                    "the buffer is full at %d transitions and its storage.mode is fixed: further "
                    "transitions are not stored",
                    self._rows,
                )
            self.refused += count - take
            for path, tensor in piece.items():
                piece[path] = tensor[:take]
        return take

    def _drop_oldest(self, surplus: int) -> None:
        first = self._pieces[0]
        count = _length(first)
        if self._by_episode or count <= surplus:
            self._pieces.popleft()
        else:
            count = surplus
            self._pieces[0] = {path: tensor[surplus:] for path, tensor in first.items()}
        self._rows -= count
        self.dropped += count
        self.is_full = True

    def gather(self, indices: Indices | None = None) -> dict[Path, torch.Tensor]:
        """Return rows, or the rows of episodes one after the other, oldest first.

        Args:
            indices: which, copied; None means all, which may share memory with the storage.
        """
        if self._by_episode and indices is not None:
            return _joined([self._pieces[index] for index in indices])
        if len(self._pieces) > 1 and not self._by_episode:
            self._pieces = deque([_joined(self._pieces)])
        rows = self._pieces[0] if len(self._pieces) == 1 else _joined(self._pieces)
        if indices is None:
            return dict(rows)
        return {path: take_rows(tensor, indices) for path, tensor in rows.items()}

    def clear(self) -> None:
        """Drop everything; the counters stay."""
        self._pieces.clear()
        self._rows, self.is_full = 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return contents and counters, as plain data and tensors."""
        paths = list(self._pieces[0]) if self._pieces else []
        return {
            "paths": [list(path) for path in paths],
            "pieces": [[piece[path] for path in paths] for piece in self._pieces],
            "refused": self.refused,
            "dropped": self.dropped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace contents and counters by what `state_dict` returned."""
        self.clear()
        paths = [tuple(path) for path in state["paths"]]
        for tensors in state["pieces"]:
            self.append(dict(zip(paths, tensors, strict=True)))
        self.refused, self.dropped = state["refused"], state["dropped"]


def _length(piece: Mapping[Path, torch.Tensor]) -> int:
    return int(next(iter(piece.values())).shape[0])


def _joined(pieces: Any) -> dict[Path, torch.Tensor]:
    pieces = list(pieces)
    return {path: _concatenate([piece[path] for piece in pieces]) for path in pieces[0]}


def _concatenate(tensors: list[torch.Tensor]) -> torch.Tensor:
    first = tensors[0]
    if first.device.type == "cpu" and first.dtype != torch.bfloat16:
        return torch.from_numpy(np.concatenate([tensor.numpy() for tensor in tensors]))
    return torch.cat(tensors)
