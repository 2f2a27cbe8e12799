"""The project logger and the process's metrics logger.

Importing this changes nothing: handlers appear with `setup_logger` and go with `close_logger`, on
the logger named ``rlightning`` only; the root logger is never touched.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, Protocol

from rlightning.utils.logger.backends import BackendOptions
from rlightning.utils.logger.metrics import MetricsLogger

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "LogSettings",
    "MetricsLogger",
    "close_logger",
    "get_logger",
    "get_metrics_logger",
    "log_metric",
    "setup_logger",
]

PROJECT = "rlightning"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"

_handlers: list[logging.Handler] = []
_metrics = MetricsLogger(logging.getLogger(f"{PROJECT}.metrics"))


class LogSettings(Protocol):
    """The part of the configuration's ``log`` section that is read here."""

    @property
    def level(self) -> str:
        """The least severe level shown on the terminal."""

    @property
    def backend(self) -> str:
        """A name in `BACKENDS`."""

    @property
    def project(self) -> str:
        """The group of runs."""

    @property
    def name(self) -> str:
        """The run's name in its group."""

    @property
    def mode(self) -> str | None:
        """The backend's own word for online, offline or disabled."""


def get_logger(name: str | None = None) -> logging.Logger:
    """Return the logger `name` below the project's; None is the project's own."""
    if not name or name == PROJECT:
        return logging.getLogger(PROJECT)
    return logging.getLogger(name if name.startswith(f"{PROJECT}.") else f"{PROJECT}.{name}")


def setup_logger(log_cfg: LogSettings, *, run_dir: Path) -> MetricsLogger:
    """Log to the terminal at the configured level, to ``<run_dir>/run.log``, and open the metrics.

    A second call replaces what the first set up. ``run.log`` takes INFO and above, or everything
    if the level is DEBUG.

    Raises:
        ValueError: the level is unknown.
        ConfigError: the metrics backend is unknown.
    """
    global _metrics
    level = _level_number(log_cfg.level)
    options = BackendOptions(
        project=log_cfg.project, name=log_cfg.name, run_dir=run_dir, mode=log_cfg.mode
    )
    close_logger()
    run_dir.mkdir(parents=True, exist_ok=True)
    file_handler = logging.FileHandler(run_dir / "run.log", encoding="utf-8")
    file_handler.setFormatter(logging.Formatter(_FORMAT))
    file_handler.setLevel(min(level, logging.INFO))
    console = _console_handler()
    console.setLevel(level)
    console.addFilter(
        lambda record: not hasattr(record, "metric_payload")
    )  # the display shows them
    project = logging.getLogger(PROJECT)
    for handler in (file_handler, console):
        project.addHandler(handler)
        _handlers.append(handler)
    project.setLevel(min(level, logging.INFO))
    project.propagate = False
    _metrics = MetricsLogger(get_logger("metrics"), options, backend=log_cfg.backend)
    return _metrics


def close_logger() -> None:
    """Close the metrics and remove every handler that `setup_logger` added."""
    global _metrics
    project = logging.getLogger(PROJECT)
    _metrics.close()
    _metrics = MetricsLogger(get_logger("metrics"))
    for handler in _handlers:
        project.removeHandler(handler)
        handler.close()
    _handlers.clear()
    project.setLevel(logging.NOTSET)
    project.propagate = True


def get_metrics_logger() -> MetricsLogger:
    """Return the process's metrics logger; before `setup_logger` one that writes nowhere."""
    return _metrics


def log_metric(
    payload: Mapping[str, Any] | None,
    level: int = logging.INFO,
    step: int | None = None,
    prefix: str | None = None,
) -> None:
    """Record numbers in the run's metrics, and as one log record at `level`.

    Args:
        payload: numbers by name; None values are left out.
        level: the level of the log record, which carries ``metric_payload`` and ``step``.
        step: environment steps so far; by default the run's current count.
        prefix: put before the names, as in ``train/loss``; by default the project's name.

    Raises:
        TypeError: a value is not a number.
    """
    values = _metrics.log(payload, step=step, prefix=prefix)
    if values:
        extra = {"metric_payload": values, "step": step}
        text = " ".join(f"{key}={value:.6g}" for key, value in values.items())
        get_logger("metrics").log(level, "%s", text, extra=extra)


def _level_number(name: str) -> int:
    upper = "WARNING" if name.upper() == "WARINING" else name.upper()  # the spelling of old configs
    if upper not in _LEVELS:
        raise ValueError(f"log level {name!r} is unknown; use one of {', '.join(_LEVELS)}")
    return int(logging.getLevelNamesMapping()[upper])


def _console_handler() -> logging.Handler:
    if not sys.stderr.isatty():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))
        return handler
    from rich.logging import RichHandler  # a tenth of a second to import, only for terminals

    from rlightning.utils.progress import get_console

    return RichHandler(console=get_console(), show_path=False, log_time_format="[%H:%M:%S]")
