"""Logging and metrics: one project logger, and metrics to files and one backend."""

from rlightning.utils.logger.logger import (
    close_logger,
    get_logger,
    get_metrics_logger,
    log_metric,
    setup_logger,
)
from rlightning.utils.logger.metrics import MetricsLogger

__all__ = [
    "MetricsLogger",
    "close_logger",
    "get_logger",
    "get_metrics_logger",
    "log_metric",
    "setup_logger",
]
