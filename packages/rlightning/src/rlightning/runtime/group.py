"""Several workers addressed as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlightning.runtime.base import Future

__all__ = ["gather"]

_LOOK_EVERY_S = 0.05


def gather(futures: Sequence[Future]) -> list[Any]:
    """Return the answers of several workers that wait for one another, in order.

    They are watched in turn, so that the first one to fail is reported while the others still wait
    for it.

    Raises:
        Exception: what the first one that failed raised.
    """
    if len(futures) > 1:
        waiting = list(futures)
        while waiting:
            for future in list(waiting):
                if future.poll(_LOOK_EVERY_S):
                    future.result()
                    waiting.remove(future)
    return [future.result() for future in futures]
