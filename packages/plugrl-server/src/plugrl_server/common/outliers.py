"""Rows that would ruin learning for everybody: those of a client gone wrong.

A running mean and variance never forget: one row of 1e14 among a million of size 1 hides all others
in a thousandth of the spread for the rest of the run. Nor does Adam: a gradient of 1e20 once, and
the weights stand still for good.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from plugrl_server.common.trees import leaves, take

if TYPE_CHECKING:
    from torch import Tensor

    from rlightning.ops.normalization import RunningMeanStd

__all__ = ["usual_rows", "usual_transitions"]

_TOO_FAR: Final = 1e4


def usual_rows(rows: Tensor, known: RunningMeanStd) -> Tensor:
    """Return the rows that statistics may learn from, ``[m, *shape]``.

    A number is unusual if its distance from the batch's median exceeds 10,000 times all of: 1, the
    median, the median distance, and the spread so far. So most rows of a batch are usual whatever
    its scale is, and a sensor that was silent may begin to speak.

    Args:
        rows: ``[n, *shape]``, finite.
        known: the statistics so far, of `shape`.
    """
    flat = rows.reshape(len(rows), -1)
    mean, std = known.mean.reshape(-1).to(flat), known.std.reshape(-1).to(flat)
    usual = _usual(flat, mean, std)
    return rows if usual is None else rows[usual]


def usual_transitions(batch: Any) -> Any:
    """Leave out the transitions whose states are unusual in their batch; see `usual_rows`.

    Args:
        batch: tensors ``[n, ...]`` by name, of which ``obs`` and ``next_obs`` are looked at.
    """
    for _, leaf in (*leaves(batch["obs"]), *leaves(batch["next_obs"])):
        if leaf.is_floating_point():
            flat = leaf.reshape(len(leaf), -1)
            usual = _usual(flat, flat.new_zeros(()), flat.new_zeros(()))
            if usual is not None:
                return usual_transitions(take(batch, usual))
    return batch


def _usual(flat: Tensor, mean: Tensor, std: Tensor) -> Tensor | None:
    """Tell which rows of ``[n, d]`` are usual, bool ``[n]``; None: all of them, or none."""
    if bool(((flat - mean).abs() <= _TOO_FAR * std.clamp(min=1.0)).all()):
        return None  # as nearly always, and known in a tenth of the time
    middle = flat.median(dim=0).values
    distance = (flat - middle).abs()
    scale = middle.abs().maximum(distance.median(dim=0).values).maximum(std).clamp(min=1.0)
    usual = (distance <= _TOO_FAR * scale).all(dim=1)
    return usual if bool(usual.any()) and not bool(usual.all()) else None
