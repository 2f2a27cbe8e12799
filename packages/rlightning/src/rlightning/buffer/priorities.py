"""Prioritised replay: Schaul et al. 2016, "Prioritized Experience Replay", arXiv:1511.05952.

Priorities of slots, in a sum tree. Knows nothing about what the slots hold.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlightning.buffer.sum_tree import Floats, SumTree

if TYPE_CHECKING:
    from rlightning.buffer.columns import Indices
    from rlightning.buffer.ring import Span

__all__ = ["Priorities"]


class Priorities:
    """How likely each slot is drawn.

    Args:
        slots: how many there are; none can be drawn before it is added.
        exponent: alpha, section 3.3 of the paper.
        epsilon: added to every priority.
    """

    def __init__(self, slots: int, *, exponent: float, epsilon: float) -> None:
        self._tree = SumTree(slots)
        self._exponent = exponent
        self._epsilon = epsilon
        self._highest = 1.0

    def add(self, span: Span) -> None:
        """Give new slots the highest priority seen, so that each is drawn soon."""
        self._fill(span, self._highest**self._exponent)

    def remove(self, span: Span) -> None:
        """Make slots impossible to draw."""
        self._fill(span, 0.0)

    def _fill(self, span: Span, weight: float) -> None:
        if isinstance(span, slice):
            self._tree.fill(span.start, span.stop, weight)
        else:
            self._tree.set(span, weight)

    def update(self, slots: Indices, priorities: Floats) -> None:
        """Set the priorities of slots, non-negative; the exponent is applied here."""
        if not len(slots):
            return
        priorities = priorities + self._epsilon
        self._highest = max(self._highest, float(priorities.max()))
        self._tree.set(slots, priorities**self._exponent)

    def draw(self, count: int, generator: np.random.Generator) -> Indices:
        """Return `count` slots, one from each of as many equal shares of the total priority."""
        total = self._tree.total
        mass = (np.arange(count) + generator.random(count)) * (total / count)
        drawn = self._tree.find(np.minimum(mass, np.nextafter(total, 0.0)))
        generator.shuffle(drawn)  # shares follow the slots' order, and batches may be cut in parts
        return drawn

    def weights(self, slots: Indices, *, count: int, exponent: float) -> torch.Tensor:
        """Return importance-sampling weights ``[B]`` float32, the highest of the batch 1.

        Args:
            slots: what was drawn.
            count: how many slots could have been drawn.
            exponent: beta, section 3.4 of the paper.
        """
        probability = self._tree.get(slots) / self._tree.total
        weight = (count * probability) ** -exponent
        return torch.from_numpy((weight / weight.max()).astype(np.float32))

    def state_dict(self, slots: int) -> dict[str, Any]:
        """Return the first `slots` priorities and the highest, as plain data and tensors."""
        leaves = self._tree.get(np.arange(slots))
        return {"leaves": torch.from_numpy(leaves), "highest": self._highest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        leaves = state["leaves"].numpy()
        if len(leaves):
            self._tree.set(np.arange(len(leaves)), leaves)
        self._highest = state["highest"]
