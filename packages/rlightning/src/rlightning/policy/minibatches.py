"""Cut a batch into minibatches; for algorithms that make several passes over their data."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from rlightning.errors import ContractError
from rlightning.types import map_leaves

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

__all__ = ["even_slices", "require_columns", "take_rows"]


def require_columns(batch: Any, names: Iterable[str], *, hint: str) -> dict[str, Any]:
    """Return the named columns of a batch.

    Args:
        batch: a TensorDict, or any mapping.
        names: the columns wanted.
        hint: what to do where one is missing, a sentence.

    Raises:
        ContractError: a column is missing, or the batch holds sequences.
    """
    have = [str(name) for name in batch.keys()]  # noqa: SIM118  # iterating a TensorDict gives rows
    names = list(names)
    missing = [name for name in names if name not in have]
    if missing:
        raise ContractError(
            f"the batch lacks {', '.join(missing)}; it has {', '.join(have)}. {hint}"
        )
    if "reward" in have and batch["reward"].ndim > 1:
        raise ContractError(
            "the batch holds sequences of transitions; this policy learns from single ones. Leave "
            "buffer.sequence_length out"
        )
    return {name: batch[name] for name in names}


def take_rows(column: Any, rows: Tensor | slice) -> Any:
    """Return rows of a column: a tensor, a TensorDict, or nested dicts and tuples of tensors."""
    if isinstance(column, (dict, tuple)):
        return map_leaves(lambda leaf: leaf[rows], column)
    return column[rows]


def even_slices(n_rows: int, n_parts: int) -> list[slice]:
    """Cut `n_rows` rows into `n_parts` consecutive slices whose lengths differ by at most one."""
    borders = [n_rows * i // n_parts for i in range(n_parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(borders)]
