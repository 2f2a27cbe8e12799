"""Log records of a run: to the terminal, and to ``logs/client.log`` in its folder."""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

__all__ = ["logging_to"]

_LOGGERS = ("plugrl_env_client", "plugrl_envs", "plugrl_protocol")


@contextmanager
def logging_to(
    run_dir: pathlib.Path, *, level: str, process_id: int | None = None
) -> Iterator[None]:
    """Send records of the client, and of what it stands on, to the terminal and the run's folder.

    Args:
        run_dir: gets ``logs/client.log``; processes append to the same file.
        level: the least severe name shown.
        process_id: named in every line, if not None.
    """
    where = "" if process_id is None else f"process {process_id}: "
    file = run_dir / "logs" / "client.log"
    file.parent.mkdir(parents=True, exist_ok=True)
    to_file = logging.FileHandler(file, encoding="utf-8")
    to_file.setFormatter(logging.Formatter(f"%(asctime)s|%(levelname)s|{where}%(message)s"))
    handlers = (_terminal(where), to_file)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(level.upper())
            for handler in handlers:
                logger.addHandler(handler)
        yield
    finally:
        for logger, old_level in zip(loggers, before, strict=True):
            logger.setLevel(old_level)
            for handler in handlers:
                logger.removeHandler(handler)
        to_file.close()


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
