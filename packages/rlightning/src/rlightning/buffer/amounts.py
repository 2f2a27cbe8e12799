"""How much there is for a batch: what is refused, and how it is divided over learners. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rlightning.errors import ConfigError

if TYPE_CHECKING:
    from rlightning.buffer.columns import Indices

__all__ = ["divide", "refuse_never_enough", "refuse_nothing", "refuse_too_few"]


def divide(indices: Indices, workers: int, *, drop_last: bool) -> list[Indices]:
    """Return equal shares, what stands together staying together.

    Args:
        indices: what was picked.
        workers: how many shares.
        drop_last: drop what does not divide evenly, or else repeat the first.

    Raises:
        ValueError: there are fewer than one each.
    """
    surplus = len(indices) % workers
    if surplus and drop_last:
        indices = indices[:-surplus]
    elif surplus:
        indices = np.concatenate([indices, np.resize(indices, workers - surplus)])
    if len(indices) < workers:
        raise ValueError(f"{len(indices)} rows cannot be divided over {workers} train workers")
    return np.split(indices, workers)


def refuse_nothing(waiting: int) -> None:
    """Say that a buffer is empty, of which `waiting` transitions are in unfinished segments."""
    hint = (
        f"; {waiting} transitions wait in unfinished segments: end them with truncate_episodes, or "
        "pass truncations with the last rows"
        if waiting
        else "; add transitions first"
    )
    raise ValueError(f"the buffer is empty{hint}")


def refuse_too_few(wanted: int | None, size: int, unit: str) -> None:
    """Refuse a batch of more than there is."""
    if wanted is not None and wanted > size:
        raise ValueError(
            f"a batch of {wanted} was asked for, but the buffer holds {size} {unit}; collect more "
            "before sampling, or lower the batch size"
        )


def refuse_never_enough(wanted: int, size: int, unit: str, *, capacity: int) -> None:
    """Refuse to wait for more episodes than a full buffer holds, which counts transitions."""
    if size < wanted:
        raise ConfigError(
            f"the learner waits for {wanted} {unit}, and the buffer is full with {size} of them: "
            f"buffer.capacity is {capacity} transitions. Raise it, or lower train.batch_size or "
            "buffer.min_size"
        )
