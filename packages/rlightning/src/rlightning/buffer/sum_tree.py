"""`SumTree`: draw indices in proportion to their weights, many at a time, in logarithmic time.

Pure numpy. Knows nothing about replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from rlightning.buffer.columns import Indices

__all__ = ["SumTree"]

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.float64]]"


class SumTree:
    """Non-negative float64 weights of `size` leaves, and the sums of every pair of subtrees.

    Args:
        size: number of leaves; all start at zero.
    """

    def __init__(self, size: int) -> None:
        self._leaves = 1 << max(1, (size - 1).bit_length())
        self._nodes = np.zeros(2 * self._leaves)

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._nodes[1])

    def get(self, indices: Indices) -> Floats:
        """Return the weights of `indices`."""
        weights: Floats = self._nodes[self._leaves + indices]
        return weights

    def set(self, indices: Indices, weights: Any) -> None:
        """Set weights; of an index that stands twice the last one counts."""
        nodes = self._nodes
        node = indices + self._leaves
        nodes[node] = weights
        while node[0] > 1:
            # Parents that stand more than once are computed more than once, to the same sum.
            node = node >> 1
            nodes[node] = nodes[2 * node] + nodes[2 * node + 1]

    def fill(self, start: int, stop: int, weight: float) -> None:
        """Set the leaves from `start` up to `stop` to one weight; faster than `set`."""
        nodes = self._nodes
        low, high = start + self._leaves, stop - 1 + self._leaves
        nodes[low : high + 1] = weight
        while low > 1:
            low, high = low >> 1, high >> 1
            children = slice(2 * low, 2 * high + 2)
            np.add(nodes[children][::2], nodes[children][1::2], out=nodes[low : high + 1])

    def find(self, mass: Floats) -> Indices:
        """Return, for each entry, the first index at which the running sum exceeds it.

        Args:
            mass: numbers in ``[0, total)``. An index of weight zero is never returned as long as
                `total` is positive.
        """
        nodes = self._nodes
        mass = mass.copy()
        node = np.ones(len(mass), dtype=np.int64)
        while node[0] < self._leaves:
            left = nodes[2 * node]
            # Rounding can leave a mass just above a subtree's sum: an empty side is no choice.
            right = ((mass >= left) & (nodes[2 * node + 1] > 0)) | (left == 0)
            mass -= np.where(right, left, 0.0)
            node = 2 * node + right
        return node - self._leaves
