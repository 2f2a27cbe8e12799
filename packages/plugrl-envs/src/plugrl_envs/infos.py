"""Join the info dicts of single environments into one dict of arrays, as Gymnasium lays it out.

Each key holds one ``[N, ...]`` array and has a row mask under ``"_" + key``; dicts nest. Faster
than Gymnasium's own helper on the common case, a few numbers per row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["add_info", "add_infos"]

_DTYPES: dict[type, type] = {float: np.float64, int: np.int64, bool: np.bool_}
"""The dtype of a column of numbers, by the type of every one of them."""
_DTYPES |= {kind: kind for kind in np.sctypeDict.values() if np.dtype(kind).kind in "biuf"}


def add_info(batch: dict[str, Any], info: dict[str, Any], row: int, num_envs: int) -> None:
    """Add the `info` of environment `row` to `batch`, in place.

    Numbers and bools become arrays of their type, arrays are stacked while their shapes agree,
    anything else goes into an object array.
    """
    for key, value in info.items():
        if isinstance(value, dict):
            add_info(batch.setdefault(key, {}), value, row, num_envs)
        else:
            column = batch.get(key)
            if column is None:
                column = batch[key] = _column(value, num_envs)
            elif not _fits(column, value):
                column = batch[key] = column.astype(object) if column.ndim == 1 else _boxed(column)
            column[row] = value
        mask = batch.get("_" + key)
        if mask is None:
            mask = batch["_" + key] = np.zeros(num_envs, dtype=np.bool_)
        mask[row] = True


def add_infos(batch: dict[str, Any], infos: Sequence[dict[str, Any]]) -> bool:
    """Add one info per row to `batch`, if all rows tell the same numbers; return whether they do.

    The result is that of `add_info` for every row, made a column at a time. Where it returns False
    nothing was added, and `add_info` knows what to do.
    """
    keys = infos[0].keys()
    if any(info.keys() != keys for info in infos):
        return False
    joined: dict[str, Any] = {}
    for key in keys:
        values = [info[key] for info in infos]
        dtypes = {_DTYPES.get(type(value)) for value in values}
        dtype = dtypes.pop()
        if dtypes or dtype is None or key in batch or key.startswith("_"):
            return False
        try:
            joined[key] = np.array(values, dtype)
        except OverflowError:  # an integer that no int64 can hold
            return False
        joined["_" + key] = np.array([True] * len(values))
    batch.update(joined)
    return True


def _column(value: Any, num_envs: int) -> np.ndarray[Any, Any]:
    if isinstance(value, bool):
        return np.zeros(num_envs, dtype=np.bool_)
    if isinstance(value, int):
        return np.zeros(num_envs, dtype=np.int64)
    if isinstance(value, float):
        return np.zeros(num_envs, dtype=np.float64)
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return np.zeros(num_envs, dtype=value.dtype)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return np.zeros((num_envs, *value.shape), dtype=value.dtype)
    return np.full(num_envs, None, dtype=object)


def _fits(column: np.ndarray[Any, Any], value: Any) -> bool:
    """Return whether `value` can stand in `column` without losing anything."""
    if column.dtype == object:
        return column.ndim == 1
    if isinstance(value, (bool, int, float)):
        kind = "b" if isinstance(value, bool) else "i" if isinstance(value, int) else "f"
        return column.ndim == 1 and "biuf".index(kind) <= "biuf".index(column.dtype.kind)
    if isinstance(value, (np.ndarray, np.generic)):
        return column.shape[1:] == value.shape and np.can_cast(value.dtype, column.dtype)
    return False


def _boxed(column: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    boxed = np.full(len(column), None, dtype=object)
    for row, value in enumerate(column):
        boxed[row] = value
    return boxed
