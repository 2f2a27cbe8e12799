"""Rows that would ruin learning for everybody: those of a client gone wrong.

A running mean and variance never forget: one row of 1e14 among a million of size 1 hides all others
in a thousandth of the spread for the rest of the run. Nor does Adam: a gradient of 1e20 once, and
the weights stand still for good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugrl_server.common.trees import leaves, take
from rlightning.ops.outliers import find_usual_rows

if TYPE_CHECKING:
    from torch import Tensor

    from rlightning.ops.normalization import RunningMeanStd

__all__ = ["usual_rows", "usual_transitions"]


def usual_rows(rows: Tensor, known: RunningMeanStd) -> Tensor:
    """Return the rows that statistics may learn from, ``[m, *shape]``.

    See `find_usual_rows`.

    Args:
        rows: ``[n, *shape]``, finite.
        known: the statistics so far, of `shape`.
    """
    flat = rows.reshape(len(rows), -1)
    mean, std = known.mean.reshape(-1).to(flat), known.std.reshape(-1).to(flat)
    usual = find_usual_rows(flat, mean, std)
    return rows if usual is None else rows[usual]


def usual_transitions(batch: Any) -> Any:
    """Leave out the transitions whose states are unusual in their batch; see `find_usual_rows`.

    Args:
        batch: tensors ``[n, ...]`` by name, of which ``obs`` and ``next_obs`` are looked at.
    """
    for _, leaf in (*leaves(batch["obs"]), *leaves(batch["next_obs"])):
        if leaf.is_floating_point():
            flat = leaf.reshape(len(leaf), -1)
            usual = find_usual_rows(flat, flat.new_zeros(()), flat.new_zeros(()))
            if usual is not None:
                return usual_transitions(take(batch, usual))
    return batch
