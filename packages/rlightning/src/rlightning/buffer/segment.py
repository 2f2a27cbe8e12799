"""A segment: consecutive rows of one environment worker, and the transitions they make.

T transitions need T+1 rows: row t holds what the environment returned at t (the observation to act
on, and the reward and flags of the action before) and what the policy answered to it. The last
row's answer serves only to bootstrap. Knows nothing about where transitions are kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlightning.buffer.columns import Column, Path, as_array, leaves
from rlightning.errors import ContractError

if TYPE_CHECKING:
    from rlightning.types import EnvMeta, EnvRet, PolicyResponse

__all__ = ["Segment"]

_SHIFTED = {"last_reward": "reward", "last_terminated": "terminated", "last_truncated": "truncated"}
_FIRST_LENGTH = 64


class Segment:
    """Rows of one worker in preallocated ``[T+1, N, ...]`` columns, used again after `take`.

    Args:
        meta: the worker's spaces and number of rows N.
        device: where the columns live.
    """

    def __init__(self, meta: EnvMeta, *, device: str) -> None:
        self._meta = meta
        self._device = device
        self._rows = meta.num_envs or 1
        shape = getattr(meta.action_space, "shape", None)
        self._action_ndim = None if shape is None else len(shape)
        self._columns: dict[Path, Column] = {}
        self._finals: list[tuple[int, np.ndarray[Any, Any], dict[Path, Any]]] = []
        self._length = 0
        self._capacity = _FIRST_LENGTH

    def __len__(self) -> int:
        """How many whole transitions the rows make."""
        return max(0, self._length - 1)

    def add(self, env_ret: EnvRet, response: PolicyResponse) -> None:
        """Append one row.

        Raises:
            ContractError: a field is missing, not numeric, or changes its shape.
        """
        fields = env_ret.to_dict()
        info = fields.pop("info")
        clash = fields.keys() & response.extras.keys()
        if clash:
            raise ContractError(
                f"the response fields {sorted(clash)} have the names of environment fields"
            )
        row = self._length
        flat = self._flatten(fields, stripped=False)
        flat |= self._flatten(response.extras, stripped=self._answers_with_row_axis(response))
        if not self._columns:
            self._columns = {
                path: Column(path, self._capacity, array, self._device)
                for path, array in flat.items()
            }
        if flat.keys() != self._columns.keys():
            changed = sorted(".".join(path) for path in flat.keys() ^ self._columns.keys())
            raise ContractError(f"the fields {changed} are not in every row; keep fields stable")
        if row == self._capacity:
            self._capacity *= 2
            for column in self._columns.values():
                column.grow(self._capacity)
        for path, array in flat.items():
            self._columns[path].write(row, array)
        if "_final_obs" in info:
            self._remember_final(row, info)
        self._length = row + 1

    def _answers_with_row_axis(self, response: PolicyResponse) -> bool:
        """Whether a policy answered a worker of one row with a leading axis of one."""
        action = response.extras.get("action")
        ndim = getattr(action, "ndim", None)
        return self._rows == 1 and self._action_ndim is not None and ndim == self._action_ndim + 1

    def _flatten(self, fields: dict[str, Any], *, stripped: bool) -> dict[Path, Any]:
        flat: dict[Path, Any] = {}
        for name, value in fields.items():
            for path, leaf in leaves(name, value):
                array = as_array(path, leaf)
                if self._rows == 1 and not (stripped and array.ndim and array.shape[0] == 1):
                    array = array[None]
                elif not array.ndim or array.shape[0] != self._rows:
                    raise ContractError(
                        f"the field {'.'.join(path)!r} has shape {tuple(array.shape)}; expected a "
                        f"leading axis of {self._rows}, one entry per environment"
                    )
                flat[path] = array
        return flat

    def _remember_final(self, row: int, info: dict[str, Any]) -> None:
        mask = np.atleast_1d(np.asarray(info["_final_obs"], dtype=bool))
        if not mask.any():
            return
        final = self._flatten({"observation": info["final_obs"]}, stripped=False)
        self._finals.append((row, mask, {path: array[mask] for path, array in final.items()}))

    def take(self) -> dict[Path, torch.Tensor]:
        """Return the transitions as time-major ``[T, N, ...]`` views and start a new segment.

        Fields: ``observation``, ``next_observation`` (the observation that really followed: at an
        episode's end its own last one), ``reward``, ``terminated``, ``truncated``, and every field
        of the responses. For the bootstrap, ``_next.<field>`` holds the responses one row later.
        The views are overwritten by later rows: copy what must stay.
        """
        steps = len(self)
        out: dict[Path, torch.Tensor] = {}
        for path, column in self._columns.items():
            now, later = column.tensor[:steps], column.tensor[1 : steps + 1]
            name, *rest = path
            if name == "observation":
                out[path] = now
                out["next_observation", *rest] = self._with_finals(path, later)
            elif name in _SHIFTED:
                out[_SHIFTED[name], *rest] = later
            else:
                out[path] = now
                out["_next", *path] = later
        self.reset()
        return out

    def reset(self) -> None:
        """Forget the rows; the columns stay allocated."""
        self._length = 0
        self._finals = []

    def _with_finals(self, path: Path, later: torch.Tensor) -> torch.Tensor:
        finals = [item for item in self._finals if 1 <= item[0] <= len(later)]
        if not finals:
            return later
        replaced = later.clone()
        for row, mask, final in finals:
            value = torch.as_tensor(final[path]).to(replaced)
            replaced[row - 1, torch.as_tensor(mask)] = value
        return replaced
