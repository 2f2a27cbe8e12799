"""A segment: consecutive rows of one environment worker, and the transitions they make.

T transitions need T+1 rows: row t holds what the environment returned at t (the observation to act
on, and the reward and flags of the action before) and what the policy answered to it. The last
row's answer serves only to bootstrap. Knows nothing about where transitions are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlightning.buffer.columns import Column, Indices, Path, as_array, as_numpy, dotted, leaves
from rlightning.buffer.gaps import Gaps
from rlightning.buffer.schema import RowSchema
from rlightning.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rlightning.types import EnvMeta

__all__ = ["SHIFTED", "Finals", "Segment", "align", "with_finals"]

SHIFTED = {
    "last_reward": "reward",
    "last_terminated": "terminated",
    "last_truncated": "truncated",
    "last_steps": "steps",
}
"""What the fields of the action before are called in the transition they belong to."""
_FIRST_LENGTH = 64


def align(rows: Mapping[Path, torch.Tensor]) -> dict[Path, torch.Tensor]:
    """Return the T transitions of T+1 time-major rows, as views ``[T, ...]``.

    Fields, in this order: ``next_observation``, ``observation``, ``reward``, ``terminated``,
    ``truncated``, then every further field of the rows. For a bootstrap, ``_next.<field>`` holds
    the further fields one row later.
    """
    observation = {path: tensor for path, tensor in rows.items() if path[0] == "observation"}
    out = {("next_observation", *path[1:]): tensor[1:] for path, tensor in observation.items()}
    out |= {path: tensor[:-1] for path, tensor in observation.items()}
    for name, shifted in SHIFTED.items():
        out |= {
            (shifted, *path[1:]): tensor[1:] for path, tensor in rows.items() if path[0] == name
        }
    for path, tensor in rows.items():
        if path[0] != "observation" and path[0] not in SHIFTED:
            out[path] = tensor[:-1]
            out["_next", *path] = tensor[1:]
    return out


class Finals:
    """The last observations of episodes that ended in one row of a worker.

    Args:
        rows: the worker's number of environments N.
        envs: which of them ended, ascending.
        values: their last observations by path, one entry per ended environment.
    """

    __slots__ = ("envs", "rows", "values")

    def __init__(self, rows: int, envs: Indices, values: dict[Path, np.ndarray[Any, Any]]) -> None:
        self.rows = rows
        self.envs = envs
        self.values = values

    @classmethod
    def from_info(cls, rows: int, info: Mapping[str, Any]) -> Finals:
        """Return what an environment reported.

        Args:
            rows: the worker's number of environments N.
            info: with ``_final_obs``, the mask ``[N]``, and ``final_obs``, like an observation.
        """
        mask = as_numpy(as_array(("_final_obs",), info["_final_obs"])).reshape(rows).astype(bool)
        envs = np.flatnonzero(mask)
        values: dict[Path, np.ndarray[Any, Any]] = {}
        if len(envs):
            for path, leaf in leaves("observation", info["final_obs"]):
                array = as_numpy(as_array(path, leaf))
                values[path] = array[None] if rows == 1 else array[mask]
        return cls(rows, envs, values)

    def of(self, path: Path) -> np.ndarray[Any, Any]:
        """Return the entries of one leaf of the observation.

        Raises:
            ContractError: ``final_obs`` lacks it.
        """
        if path not in self.values:
            raise ContractError(
                f"info['final_obs'] lacks {dotted(path)!r}; it has the observation's own layout"
            )
        return self.values[path]


class Segment:
    """Rows of one worker in preallocated ``[T+1, N, ...]`` columns, used again after `take`.

    Args:
        meta: the worker's spaces and number of rows N.
        device: where the columns live.
    """

    def __init__(self, meta: EnvMeta, *, device: str) -> None:
        self._schema = RowSchema(meta)
        self._device = device
        self._columns: dict[Path, Column] = {}
        self._writers: list[Column] = []
        self._finals: list[tuple[int, Finals]] = []
        self._starts = np.zeros(self._schema.rows, dtype=np.int64)
        self._gaps = Gaps(self._schema.rows)
        self._length = 0
        self._capacity = _FIRST_LENGTH

    def __len__(self) -> int:
        """How many time steps with whole transitions the rows make."""
        return max(0, self._length - 1)

    @property
    def pending(self) -> int:
        """How many transitions the rows make and `take` or `take_env` has not returned yet."""
        return int((len(self) - self._starts).sum()) if self._length else 0

    @property
    def has_gaps(self) -> bool:
        """Whether rows are missing: then only `take_env` gives the transitions."""
        return bool(self._gaps)

    def add(
        self, fields: Mapping[str, Any], info: Mapping[str, Any], answered: Collection[str]
    ) -> None:
        """Append one row.

        Args:
            fields: the row's values by name: what the environment returned and the policy answered.
            info: what the environment reported beside, for the last observations of episodes.
            answered: which of `fields` the policy answered.

        Raises:
            ContractError: a field is missing, not numeric, or changes its shape or dtype.
        """
        arrays = self._schema.arrays(fields, answered)
        row = self._length
        if not self._columns:
            self._allocate()
        if row == self._capacity:
            self._make_room()
            row = self._length
        for column, array in zip(self._writers, arrays, strict=True):
            view = column.view
            if view is not None and type(array) is np.ndarray:
                view[row] = array
            else:
                column[row] = array
        if info:
            self._gaps.note(row, info)
            if "_final_obs" in info:
                finals = Finals.from_info(self._schema.rows, info)
                if len(finals.envs):
                    self._finals.append((row, finals))
        self._length = row + 1

    def _allocate(self) -> None:
        rows = self._schema.rows
        self._columns = {
            leaf.path: Column(
                self._capacity, (rows, *leaf.row_shape), leaf.dtype, device=self._device
            )
            for leaf in self._schema.leaves
        }
        self._writers = list(self._columns.values())

    def _make_room(self) -> None:
        """Move what is still needed to the front where that frees half, else double the columns."""
        taken = int(self._starts.min())
        if taken * 2 < self._capacity:
            self._capacity *= 2
            for column in self._writers:
                column.grow(self._capacity)
            return
        kept = self._length - taken
        for column in self._writers:
            column.tensor[:kept] = column.tensor[taken : self._length].clone()
        self._finals = [(row - taken, item) for row, item in self._finals if row > taken]
        self._gaps.shift(taken)
        self._starts -= taken
        self._length = kept

    def take(self) -> dict[Path, torch.Tensor]:
        """Return the transitions of all environments as time-major ``[T, N, ...]`` views.

        `align` names the fields; ``next_observation`` is what really followed: at an episode's end
        its own last observation. A new segment starts; later rows overwrite the views.
        """
        rows, envs = slice(0, self._length), slice(0, self._schema.rows)
        steps = {row: row - 1 for row, _ in self._finals if row > 0}
        out = self._transitions(rows, envs, steps)
        self.reset()
        return out

    def take_env(self, env: int) -> list[dict[Path, torch.Tensor]]:
        """Return one environment's transitions since it was last taken, ``[T, 1, ...]`` each.

        One piece, and several where rows are missing in between. Its next segment starts at the
        last row. Empty where there is no transition.
        """
        start = int(self._starts[env])
        if start >= len(self):
            return []
        self._starts[env] = len(self)
        envs = slice(env, env + 1)
        if not self._gaps:
            steps = {row: row - 1 - start for row, _ in self._finals if row > start}
            return [self._transitions(slice(start, self._length), envs, steps)]
        pieces = self._gaps.pieces(env, range(start, self._length), self._over(env))
        return [
            self._transitions(rows, envs, {int(row): at for at, row in enumerate(rows[1:])})
            for rows in pieces
        ]

    def _over(self, env: int) -> list[bool]:
        """Return by row whether one environment's episode ended with the step before."""
        over = np.zeros(self._length, dtype=bool)
        for path, column in self._columns.items():
            if path[0] in ("last_terminated", "last_truncated"):
                over |= as_numpy(column.tensor[: self._length, env]).astype(bool)
        return list(map(bool, over))

    def ended(self) -> list[int]:
        """Return which environments' episodes ended in the last row."""
        if self._length < 2:
            return []
        over = torch.zeros(self._schema.rows, dtype=torch.bool)
        for path, column in self._columns.items():
            if path[0] in ("last_terminated", "last_truncated"):
                over |= column.tensor[self._length - 1].cpu().bool()
        return [int(env) for env in torch.nonzero(over).flatten()]

    def reset(self) -> None:
        """Forget the rows; the columns stay allocated."""
        self._length = 0
        self._finals = []
        self._gaps.clear()
        self._starts[:] = 0

    def _transitions(
        self, rows: slice | Indices, envs: slice, steps: Mapping[int, int]
    ) -> dict[Path, torch.Tensor]:
        """Return the transitions of consecutive rows.

        Args:
            rows: of the columns: a slice gives views, numbers give copies.
            envs: which environments.
            steps: row to the transition that it completes.
        """
        index: Any = rows if isinstance(rows, slice) else torch.from_numpy(rows)
        columns = {path: column.tensor[index][:, envs] for path, column in self._columns.items()}
        out = align(columns)
        finals = [(steps[row], item) for row, item in self._finals if row in steps]
        if finals:
            for path in list(out):
                if path[0] == "next_observation":
                    out[path] = with_finals(out[path], ("observation", *path[1:]), finals, envs)
        return out


def with_finals(
    later: torch.Tensor, path: Path, finals: list[tuple[int, Finals]], envs: slice
) -> torch.Tensor:
    """Return `later` ``[T, N, ...]`` with the last observations of ended episodes put in."""
    column = Column(later.shape[0], tuple(later.shape[1:]), later.dtype, device=str(later.device))
    column.tensor.copy_(later)
    finals = [(step, item) for step, item in finals if len(item.envs)]
    ended = np.concatenate([item.envs for _, item in finals])
    steps = np.repeat([step for step, _ in finals], [len(item.envs) for _, item in finals])
    values = np.concatenate([item.of(path) for _, item in finals])
    mine = (ended >= envs.start) & (ended < envs.stop)
    steps, ended, values = steps[mine], ended[mine] - envs.start, values[mine]
    if column.tensor.is_cpu and column.tensor.dtype != torch.bfloat16:
        column[steps, ended] = values
        return column.tensor
    for step, env, value in zip(steps.tolist(), ended.tolist(), values, strict=True):
        column[step, env] = value
    return column.tensor
