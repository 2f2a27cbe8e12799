"""What the program prints: ``HH:MM:SS|LEVEL|message`` on standard error."""

from __future__ import annotations

import logging
import sys
from typing import Final

__all__ = ["configure_logging", "get_logger"]

_OURS: Final = ("plugrl_server", "plugrl_protocol", "rlightning")
_FORMAT: Final = "%(asctime)s|%(levelname)s|%(message)s"


def configure_logging(level: str) -> None:
    """Show messages of ours at `level` and above; a second call replaces the first."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))
    for name in _OURS:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level.upper())
        logger.propagate = False


def get_logger(name: str) -> logging.Logger:
    """Return a logger below ours."""
    return logging.getLogger(name if name.startswith(_OURS) else f"plugrl_server.{name}")
