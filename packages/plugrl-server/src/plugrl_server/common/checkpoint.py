"""What an algorithm gives to be saved, and takes back."""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Checkpoint"]


@dataclasses.dataclass
class Checkpoint:
    """One moment of a run, as plain data, numpy arrays and tensors."""

    step: int
    """Environment steps, or whatever the algorithm counts."""
    model: dict[str, Any] | None = None
    """The policy's ``state_dict``; None for a policy without one."""
    optimizer: dict[str, Any] | None = None
    """States of the optimizers by name."""
    meta: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Counters, normalisers, generators, buffers."""
