"""What the server measures of itself: rates, sizes, latencies, counts."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from plugrl_server.common.metrics import Recent, flatten_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from plugrl_server.common.metrics import MetricSink

__all__ = ["ClientCounter", "MetricReporter", "RuntimeMetrics"]

_MS = 1e3


class ClientCounter:
    """Counts one client's requests and steps; gives rates since the last look."""

    def __init__(self, slot: int, now_s: float) -> None:
        self.slot = slot
        self.requests = 0
        self.steps = 0
        self._since = (now_s, 0, 0)

    def rates(self, now_s: float) -> dict[str, float]:
        """Requests and environment steps per second since the last call."""
        then_s, requests, steps = self._since
        self._since = (now_s, self.requests, self.steps)
        elapsed_s = max(now_s - then_s, 1e-9)
        return {
            "requests_per_s": (self.requests - requests) / elapsed_s,
            "env_steps_per_s": (self.steps - steps) / elapsed_s,
        }


class RuntimeMetrics:
    """Counters and recent measurements of a server."""

    def __init__(self) -> None:
        self.total_connections = 0
        self.connections = 0
        self.stored_frames = 0
        self.discarded_frames = 0
        self.nonfinite_observations = 0
        self.refused_requests = 0
        self.reused_observations = 0
        self.infer_s = Recent()
        self.queue_s = Recent()
        self.feedback_s = Recent()
        self.batch_rows = Recent()
        self.staleness = Recent()

    def summary(self) -> dict[str, float]:
        """Give everything under ``server/``; latencies in milliseconds."""
        counts = (
            "total_connections",
            "connections",
            "stored_frames",
            "discarded_frames",
            "nonfinite_observations",
            "refused_requests",
            "reused_observations",
        )
        numbers: dict[str, float] = {name: getattr(self, name) for name in counts}
        numbers |= self.infer_s.summary("infer_ms", scale=_MS)
        numbers |= self.queue_s.summary("queue_ms", scale=_MS)
        numbers |= self.feedback_s.summary("feedback_ms", scale=_MS)
        numbers |= self.batch_rows.summary("batch_rows")
        numbers |= self.staleness.summary("staleness")
        return {f"server/{name}": value for name, value in numbers.items()}


class MetricReporter:
    """Collects numbers and passes them on, not more often than is useful. Safe for two threads.

    Args:
        sink: where they go.
        show: a display; takes all numbers of a row.
        clock: monotonic seconds.
        min_interval_s: rows closer together than this are merged, unless `now` is asked for.
    """

    def __init__(
        self,
        sink: MetricSink,
        *,
        show: Callable[[int, Mapping[str, float]], None],
        clock: Callable[[], float],
        min_interval_s: float = 1.0,
    ) -> None:
        self._sink, self._show, self._clock = sink, show, clock
        self._min_interval_s = min_interval_s
        self._pending: dict[str, float] = {}
        self._last_s = clock()
        self._lock = threading.Lock()

    def add(
        self,
        step: int,
        metrics: Mapping[str, Any],
        *,
        runtime: RuntimeMetrics,
        clients: Iterable[ClientCounter],
        now: bool,
    ) -> None:
        """Take numbers; write a row if it is time for one, or if `now`."""
        with self._lock:
            self._pending |= flatten_metrics(metrics)
            now_s = self._clock()
            if not self._pending or not (now or now_s - self._last_s >= self._min_interval_s):
                return
            self._last_s = now_s
            row = {**self._pending, **runtime.summary()}
            for client in clients:
                row |= {f"clients/{client.slot}/{k}": v for k, v in client.rates(now_s).items()}
            self._pending = {}
            self._sink.log_scalars(row, step=step)
            self._show(step, row)
