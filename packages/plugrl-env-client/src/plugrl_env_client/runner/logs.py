"""Log records of a run: to the terminal, and to ``logs/client.log`` in its folder."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pathlib

__all__ = ["configure_logging"]

_LOGGERS = ("plugrl_env_client", "plugrl_envs", "plugrl_protocol")


def configure_logging(level: str, run_dir: pathlib.Path, *, process_id: int | None = None) -> None:
    """Send the records of the client and what it stands on to the terminal and the run's folder.

    Args:
        level: the least severe name shown.
        run_dir: gets ``logs/client.log``; processes append to the same file.
        process_id: named in every line, if not None.
    """
    where = "" if process_id is None else f"process {process_id}: "
    file = run_dir / "logs" / "client.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(file, encoding="utf-8")
    to_file.setFormatter(logging.Formatter(f"%(asctime)s|%(levelname)s|{where}%(message)s"))
    handlers = [_terminal(where), to_file]
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        logger.setLevel(level.upper())
        for old in list(logger.handlers):
            logger.removeHandler(old)
            old.close()
        for handler in handlers:
            logger.addHandler(handler)


def _terminal(where: str) -> logging.Handler:
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler

        rich = RichHandler(console=Console(stderr=True), show_path=False, log_time_format="%X")
        rich.setFormatter(logging.Formatter(f"{where}%(message)s"))
        return rich
    plain = logging.StreamHandler(sys.stderr)
    plain.setFormatter(logging.Formatter(f"%(asctime)s|%(levelname)s|{where}%(message)s", "%X"))
    return plain
