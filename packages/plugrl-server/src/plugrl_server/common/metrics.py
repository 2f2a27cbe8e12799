"""Numbers on their way out: nested maps flattened, percentiles of the recent past, sinks.

Knows nothing about who measures.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlightning.utils.logger import MetricsLogger

__all__ = [
    "MetricDict",
    "MetricSink",
    "NoOpMetricSink",
    "Recent",
    "RunMetricSink",
    "flatten_metrics",
]

_log = logging.getLogger(__name__)

MetricDict: TypeAlias = "dict[str, Any]"
"""Numbers by name, nested freely."""


def flatten_metrics(metrics: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Join nested names with ``/``; None is left out."""
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        key = f"{prefix}/{name}" if prefix else str(name)
        if value is None:
            continue
        if hasattr(value, "items"):
            flat |= flatten_metrics(value, key)
        else:
            flat[key] = float(value)
    return flat


class MetricSink(Protocol):
    """Where metrics go."""

    def log_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Record numbers at a step."""

    def flush(self) -> None:
        """Write what is pending."""

    def close(self) -> None:
        """Let go of everything."""


@final
class NoOpMetricSink:
    """Goes nowhere."""

    def log_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Record nothing."""

    def flush(self) -> None:
        """Nothing is pending."""

    def close(self) -> None:
        """Nothing is held."""


@final
class RunMetricSink:
    """Into a run's directory and to one tracker. A full disk costs numbers, never the run.

    Args:
        logger: rlightning's metrics logger, which writes ``metrics.jsonl`` and ``metrics.csv``.
    """

    def __init__(self, logger: MetricsLogger) -> None:
        self._logger = logger
        self._fails = False

    def log_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        """Record numbers; the part of a name before its first ``/`` is the stream it belongs to."""
        streams: dict[str, dict[str, float]] = {}
        for name, value in scalars.items():
            stream, _, rest = name.partition("/")
            streams.setdefault(stream if rest else "run", {})[rest or stream] = value
        try:
            for stream, values in streams.items():
                self._logger.log(values, step=step, prefix=stream)
        except OSError as error:
            if not self._fails:
                _log.error("metrics cannot be written: %s; the run goes on without them", error)
            self._fails = True
        else:
            self._fails = False

    def flush(self) -> None:
        """Every row is written when it is logged."""

    def close(self) -> None:
        """Complete the files and close the tracker."""
        try:
            self._logger.close()
        except OSError as error:
            _log.error("the files of metrics are not complete: %s", error)


@final
class Recent:
    """The last few measurements of one quantity.

    Args:
        length: how many are kept.
    """

    def __init__(self, length: int = 1000) -> None:
        self._values: deque[float] = deque(maxlen=length)

    def add(self, value: float) -> None:
        """Take one more."""
        self._values.append(value)

    def __len__(self) -> int:
        return len(self._values)

    def summary(self, name: str, *, scale: float = 1.0) -> dict[str, float]:
        """Give ``<name>_p50`` and ``<name>_p95``, times `scale`; nothing if there are none."""
        if not self._values:
            return {}
        # Copied in one step: another thread may be adding.
        p50, p95 = np.percentile(list(self._values), (50, 95)) * scale
        return {f"{name}_p50": float(p50), f"{name}_p95": float(p95)}
