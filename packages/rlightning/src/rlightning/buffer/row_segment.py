"""A segment kept row by row, for a `postprocess_fn` of the user's.

The slow twin of `rlightning.buffer.segment.Segment`: one dictionary per row, and a dictionary of
lists per finished segment. Knows nothing about what the function does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.buffer.columns import as_array, as_numpy
from rlightning.buffer.gaps import Gaps
from rlightning.buffer.schema import ENV_FLAGS
from rlightning.errors import ContractError
from rlightning.types import map_leaves, to_device

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rlightning.types import EnvMeta

__all__ = ["RowSegment"]

Row = dict[str, Any]


class RowSegment:
    """Rows of one worker as dictionaries.

    Args:
        meta: the worker's spaces and number of rows N.
        device: where arrays are when the `postprocess_fn` sees them.
    """

    def __init__(self, meta: EnvMeta, *, device: str) -> None:
        self._device = device
        self._envs = meta.num_envs or 1
        shape = getattr(meta.action_space, "shape", None)
        self._action_ndim = None if shape is None else len(shape)
        self._rows: list[Row] = []
        self._gaps = Gaps(self._envs)
        self._starts = np.zeros(self._envs, dtype=np.int64)

    def __len__(self) -> int:
        """How many time steps with whole transitions the rows make."""
        return max(0, len(self._rows) - 1)

    @property
    def pending(self) -> int:
        """How many transitions the rows make that were not taken yet."""
        return int((len(self) - self._starts).sum()) if self._rows else 0

    @property
    def has_gaps(self) -> bool:
        """Whether rows are missing: then only `take_env` gives the transitions."""
        return bool(self._gaps)

    def add(
        self, fields: Mapping[str, Any], info: Mapping[str, Any], answered: Collection[str]
    ) -> None:
        """Append one row; its arrays are copied, because environments may use theirs again."""
        row = {name: map_leaves(_copied, value) for name, value in fields.items()}
        for name in ENV_FLAGS.keys() & row.keys():
            if self._envs > 1 and not isinstance(row[name], dict) and np.ndim(row[name]) == 0:
                row[name] = np.full(self._envs, row[name])  # one for all, as a default is
        action = fields.get("action") if "action" in answered else None
        ndim = getattr(action, "ndim", None)
        if self._envs == 1 and self._action_ndim is not None and ndim == self._action_ndim + 1:
            row |= {name: map_leaves(_first, row[name]) for name in answered if name in row}
        self._gaps.note(len(self._rows), info)
        row["info"] = {name: map_leaves(_copied, value) for name, value in info.items()}
        self._rows.append(row)

    def take(self) -> dict[str, list[Any]]:
        """Return all rows as a dictionary of lists and start a new segment."""
        rows = self._rows
        self.reset()
        return self._listed(rows)

    def take_env(self, env: int) -> list[dict[str, list[Any]]]:
        """Return one environment's rows since it was last taken, without a row axis.

        One piece, and several where rows are missing in between. Its next segment starts with the
        last row. Empty where the rows make no transition.
        """
        start = int(self._starts[env])
        if start >= len(self):
            return []
        self._starts[env] = len(self)
        pieces: list[Any] = [range(start, len(self._rows))]
        if self._gaps:
            over = [self._is_over(row, env) for row in self._rows]
            pieces = self._gaps.pieces(env, pieces[0], over)
        listed = [self._listed([self._of_env(int(row), env) for row in rows]) for rows in pieces]
        taken = int(self._starts.min())
        self._rows = self._rows[taken:]
        self._gaps.shift(taken)
        self._starts -= taken
        return listed

    def _of_env(self, row: int, env: int) -> Row:
        return _of_env(self._rows[row], env, self._envs) if self._envs > 1 else self._rows[row]

    def _is_over(self, row: Row, env: int) -> bool:
        """Whether one environment's episode ended with the step before a row."""
        names = [name for name in ("last_terminated", "last_truncated") if name in row]
        flags = [np.ravel(as_numpy(as_array((name,), row[name]))) for name in names]
        return any(bool(flag[env if len(flag) > 1 else 0]) for flag in flags)

    def ended(self) -> list[int]:
        """Return which environments' episodes ended in the last row."""
        if len(self._rows) < 2:
            return []
        over = np.zeros(self._envs, dtype=bool)
        for name in ("last_terminated", "last_truncated"):
            if name in self._rows[-1]:
                over |= as_numpy(as_array((name,), self._rows[-1][name])).astype(bool)
        return [int(env) for env in np.flatnonzero(over)]

    def reset(self) -> None:
        """Forget the rows."""
        self._rows = []
        self._gaps.clear()
        self._starts[:] = 0

    def _listed(self, rows: list[Row]) -> dict[str, list[Any]]:
        names = rows[0].keys()
        for row in rows:
            if row.keys() != names:
                raise ContractError(
                    f"the fields {sorted(row.keys() ^ names)} are not in every row: keep the "
                    "fields of every row the same"
                )
        listed = {name: [row[name] for row in rows] for name in names}
        moved: dict[str, list[Any]] = to_device(listed, self._device)
        return moved


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def _first(leaf: Any) -> Any:
    return leaf[0] if getattr(leaf, "ndim", 0) and leaf.shape[0] == 1 else leaf


def _of_env(row: Row, env: int, envs: int) -> Row:
    """Return one environment's entries of a row; of its info, only the last observation."""

    def pick(leaf: Any) -> Any:
        return leaf[env] if getattr(leaf, "ndim", 0) and leaf.shape[0] == envs else leaf

    info = {name: row["info"][name] for name in ("final_obs", "_final_obs") if name in row["info"]}
    return map_leaves(pick, {**row, "info": info})  # type: ignore[no-any-return]  # containers stay
