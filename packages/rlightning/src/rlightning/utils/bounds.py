"""How large a number that somebody else sends may be, for a policy to learn from it."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["LARGEST", "are_usable"]

LARGEST = 1e15
"""What no state and no reward exceeds: squares of sums of them still fit into float32, so that no
loss, gradient or running variance overflows."""


def are_usable(numbers: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which numbers are neither NaN nor beyond `LARGEST`, bool in the shape of `numbers`."""
    usable: np.ndarray[Any, np.dtype[np.bool_]] = np.abs(numbers) <= LARGEST
    return usable
