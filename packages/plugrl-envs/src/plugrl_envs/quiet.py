"""Keep simulators from flooding the terminal: each distinct warning is logged once.

Once per process; what the processes of a vector environment's rows say while they start, its
owner logs, once for all of them.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["held_back", "log_once", "quiet_mujoco"]

_logger = logging.getLogger("plugrl_envs")
_seen: set[str] = set()
_held: list[list[str]] = []
"""Where warnings go instead of the log, innermost last."""


def quiet_mujoco() -> None:
    """Route MuJoCo's warnings to the log, each once; without this every instance prints its own.

    A handler that the program has installed itself is left alone.
    """
    import mujoco  # the caller knows that it is there

    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(log_once)


@contextlib.contextmanager
def held_back() -> Iterator[list[str]]:
    """Collect new warnings in the list that it gives, for another process to log."""
    _held.append([])
    try:
        yield _held[-1]
    finally:
        _held.pop()


def log_once(message: str) -> None:
    """Log a simulator's warning, unless this process has seen it before."""
    if message in _seen:
        return
    _seen.add(message)
    if _held:
        _held[-1].append(message)
    else:
        _logger.warning("MuJoCo: %s", message)
