"""`WeightAddress`: where weights are in shared memory, for processes that may be elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["WeightAddress"]


@dataclass(frozen=True)
class WeightAddress:
    """Travels to another process, on any machine, and is opened there."""

    kind: type[Any]
    """`CPUWeightBuffer` or `ShardedWeightBuffer`."""
    name: str | list[str]
    """What `kind` attaches to."""
    shards: int | None = None
    """Parts that are published each by its own process; None where one publishes all."""

    def open(self) -> Any | None:
        """Return the buffer; None where it is on another machine, or has ended."""
        try:
            return self.kind.attach(self.name)
        except RuntimeError:
            return None
