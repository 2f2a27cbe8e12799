"""Keep simulators from flooding the terminal: each distinct warning is logged once per process."""

from __future__ import annotations

import logging

__all__ = ["quiet_mujoco"]

_logger = logging.getLogger("plugrl_envs")
_seen: set[str] = set()


def quiet_mujoco() -> None:
    """Route MuJoCo's warnings to the log, each once; without this every instance prints its own.

    A handler that the program has installed itself is left alone.
    """
    import mujoco  # the caller knows that it is there

    if mujoco.get_mju_user_warning() is None:
        mujoco.set_mju_user_warning(_log_once)


def _log_once(message: str) -> None:
    if message not in _seen:
        _seen.add(message)
        _logger.warning("MuJoCo: %s", message)
