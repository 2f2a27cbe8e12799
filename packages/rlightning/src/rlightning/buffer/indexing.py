"""Which transitions an index means, and which rows are truncated, for every kind of buffer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from rlightning.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlightning.buffer.columns import Indices

__all__ = ["Index", "is_single", "one_per_row", "positions"]

Index: TypeAlias = "int | slice | Sequence[int] | np.ndarray[Any, Any] | torch.Tensor"
"""What may stand in ``buffer[...]``."""


def is_single(index: Index) -> bool:
    """Return whether `index` means one transition, rather than a batch of them."""
    if isinstance(index, (np.ndarray, torch.Tensor)):
        return index.ndim == 0
    return isinstance(index, (int, np.integer))


def positions(index: Index, size: int, *, unit: str) -> Indices:
    """Return the positions that `index` means, ``[rows]``, each from 0 to ``size - 1``.

    Args:
        index: a number; a slice; a list or one-dimensional array of numbers; or one of truth
            values, one for each transition. Negative numbers count from the newest.
        size: how many transitions there are.
        unit: what they are called in errors.

    Raises:
        IndexError: there is no such transition, or not one truth value for each.
        TypeError: it is none of these.
    """
    if isinstance(index, slice):
        return np.arange(size)[index]
    wanted = _as_array(index)
    if wanted.dtype.kind == "b" and wanted.ndim == 1:
        if len(wanted) != size:
            raise IndexError(f"a mask of {len(wanted)} truth values for {size} {unit}")
        return np.flatnonzero(wanted)
    if wanted.dtype.kind not in "iu" or wanted.ndim > 1:
        raise TypeError(
            f"found {index!r} as an index; expected a whole number, a slice, or a one-dimensional "
            "list or array of whole numbers or truth values"
        )
    wanted = np.atleast_1d(wanted).astype(np.int64)
    if ((wanted < -size) | (wanted >= size)).any():
        raise IndexError(f"index {index} is out of range for {size} {unit}")
    return np.where(wanted < 0, wanted + size, wanted)


def _as_array(index: Any) -> np.ndarray[Any, Any]:
    if isinstance(index, torch.Tensor):
        return index.cpu().numpy()
    if isinstance(index, (list, tuple)) and not len(index):
        return np.empty(0, dtype=np.int64)
    try:
        return np.asarray(index)
    except ValueError:  # a list of lists of different lengths
        return np.empty(0, dtype=object)


def one_per_row(truncations: Any, count: int) -> Sequence[bool]:
    """Return `truncations`, one for each of `count` rows; none means that no row is truncated."""
    if truncations is None:
        return [False] * count
    if not isinstance(truncations, (list, tuple)):
        raise TypeError(f"truncations is a {type(truncations).__name__}; expected a list")
    if len(truncations) != count:
        raise ContractError(f"{len(truncations)} truncations for {count} rows")
    return truncations
