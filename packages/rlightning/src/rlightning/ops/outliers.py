"""Which rows of a batch are so far from the others that statistics should not learn from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["find_usual_rows"]

_TOO_FAR: Final = 1e4


def find_usual_rows(rows_BD: Tensor, mean: Tensor, std: Tensor) -> Tensor | None:
    """Tell which rows are usual.

    A number is unusual if its distance from the batch's median exceeds 10,000 times all of: 1, the
    median, the median distance, and the spread so far. So most rows of a batch are usual whatever
    its scale is, and a sensor that was silent may begin to speak. Median and median distance are
    the robust location and scale of Huber, *Robust Statistics* (1981).

    Args:
        rows_BD: finite floats [B, D].
        mean: what is known of the numbers so far, [D] or a scalar.
        std: their spread so far, likewise; zero where nothing is known.

    Returns:
        bool [B]; None where all rows are usual, and where none is.
    """
    if bool(((rows_BD - mean).abs() <= _TOO_FAR * std.clamp(min=1.0)).all()):
        return None  # as nearly always, and known in a tenth of the time
    middle_D = rows_BD.median(dim=0).values
    distance_BD = (rows_BD - middle_D).abs()
    scale_D = middle_D.abs().maximum(distance_BD.median(dim=0).values).maximum(std).clamp(min=1.0)
    usual_B = (distance_BD <= _TOO_FAR * scale_D).all(dim=1)
    return usual_B if bool(usual_B.any()) and not bool(usual_B.all()) else None
