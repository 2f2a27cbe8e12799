"""How a trainer acts and learns, and how its run can end."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

__all__ = ["Ending", "TrainerConfig"]


class Ending(enum.Enum):
    """How a run came to its end."""

    FINISHED = "the run is finished"
    INTERRUPTED = "somebody asked it to stop"
    FAILED = "learning or acting failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """How acting and learning take turns."""

    learn_mode: Literal["sync", "overlap"] = "sync"
    """Whether requests wait while the policy is learned, or are answered by its last version."""
    mini_infer_batch_size: int | None = None
    """Environments with which a batch goes at once; None waits for every client that is due."""
    batch_deadline_ms: float = 5.0
    """Longest wait of a request for others; never longer than a forward pass takes."""
    inline_limit_ms: float = 1.0
    """Forward passes up to this long run on the event loop; 0 never does."""
