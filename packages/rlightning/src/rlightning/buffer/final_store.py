"""`FinalStore`: the last observations of episodes, which no row of a ring holds.

A pool that grows with the number of episodes in the ring and reuses what was released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlightning.buffer.columns import Column, Indices, Path, dotted

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Mapping

    from rlightning.buffer.segment import Finals

__all__ = ["FinalStore"]

_FIRST_LENGTH = 64


class FinalStore:
    """Observations by number.

    Args:
        device: where the columns live.
        folder: where given, columns are memory maps of files in it.
    """

    def __init__(self, *, device: str, folder: pathlib.Path | None = None) -> None:
        self._device = device
        self._folder = folder
        self._columns: dict[Path, Column] = {}
        self._free: list[int] = []
        self._length = 0

    def put(self, finals: Finals, like: Mapping[Path, Column]) -> Indices:
        """Keep the observations of `finals`; return their numbers.

        Args:
            finals: the observations.
            like: the ring's columns of the observation, for shapes and dtypes.
        """
        count = len(finals.envs)
        if len(self._free) < count:
            self._grow(max(_FIRST_LENGTH, self._length, count), like)
        numbers = np.array([self._free.pop() for _ in range(count)], dtype=np.int64)
        for path, column in self._columns.items():
            column[numbers] = finals.of(path)
        return numbers

    def release(self, numbers: Indices) -> None:
        """Allow `numbers` to be used again."""
        self._free.extend(numbers.tolist())

    def put_into(self, rows: torch.Tensor, at: Indices, path: Path, numbers: Indices) -> None:
        """Write the observations `numbers` into `rows` at `at`, in place."""
        values = self._columns[path].take(numbers)
        if rows.device.type == "cpu" and rows.dtype != torch.bfloat16:
            rows.numpy()[at] = values.numpy()
        else:
            rows[torch.as_tensor(at, device=rows.device)] = values

    def _grow(self, more: int, like: Mapping[Path, Column]) -> None:
        length = self._length + more
        for path, column in like.items():
            file = self._file(path, length)
            if path in self._columns:
                self._columns[path].grow(length, file=file)
            else:
                shape, dtype = tuple(column.tensor.shape[1:]), column.tensor.dtype
                self._columns[path] = Column(length, shape, dtype, device=self._device, file=file)
        if self._folder is not None and self._length:
            for path in like:
                old = self._file(path, self._length)
                if old is not None:
                    old.unlink()
        self._free.extend(range(length - 1, self._length - 1, -1))
        self._length = length

    def _file(self, path: Path, length: int) -> pathlib.Path | None:
        return None if self._folder is None else self._folder / f"{dotted(path)}.final{length}"

    def state_dict(self) -> dict[str, Any]:
        """Return all contents, as plain data and tensors."""
        return {
            "paths": [list(path) for path in self._columns],
            "columns": [column.tensor.clone() for column in self._columns.values()],
            "free": list(self._free),
            "length": self._length,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents by what `state_dict` returned."""
        length = state["length"]
        self._columns = {}
        for path, saved in zip(state["paths"], state["columns"], strict=True):
            name = tuple(path)
            file = self._file(name, length)
            column = Column(
                length, tuple(saved.shape[1:]), saved.dtype, device=self._device, file=file
            )
            column.tensor[:] = saved
            self._columns[name] = column
        self._free, self._length = list(state["free"]), length
