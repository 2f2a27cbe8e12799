"""`Supervised`: a worker that is started again when it dies, so often and no more."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from rlightning.errors import WorkerLostError
from rlightning.runtime.base import Standing
from rlightning.runtime.worker_thread import WorkerThread
from rlightning.utils.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlightning.runtime.base import Future, Handle, Runtime, WorkerSpec

__all__ = ["Restart", "Supervised"]

_log = get_logger("runtime.supervision")


class Supervised(Standing):
    """A handle whose worker can be replaced by a new one of the same kind.

    Args:
        runtime: starts the workers.
        spec: what they are.
        max_restarts: how many may replace the first one.
    """

    def __init__(self, runtime: Runtime, spec: WorkerSpec, *, max_restarts: int) -> None:
        self.name = spec.name
        self.restarts = 0
        """How many workers have died."""
        self._runtime = runtime
        self._spec = spec
        self._max_restarts = max_restarts
        self._first_error: WorkerLostError | None = None
        self._handle = runtime.spawn(spec)
        self.node = self._handle.node
        self.timeout_s = spec.timeout_s

    def call(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future:
        """Begin a call of the worker that is alive now."""
        return self._handle.call(method, *args, timeout_s=timeout_s, **kwargs)

    def stop(self) -> None:
        """End the worker."""
        self._handle.stop()

    def restore(self, error: WorkerLostError, prepare: Callable[[Handle], Any]) -> Any:
        """Replace a worker that is lost, and return what `prepare` makes of the new one.

        Args:
            error: how it was lost.
            prepare: brings the new worker to where it can go on; where that one dies too, the next
                takes its place.

        Raises:
            WorkerLostError: too many have died; the first death is named too.
        """
        while True:
            self._first_error = self._first_error or error
            if self.restarts >= self._max_restarts:
                raise self._given_up(error) from self._first_error
            self.restarts += 1
            begin_s = time.monotonic()
            _log.warning(
                "%s; starting it again (%d of %d times)", error, self.restarts, self._max_restarts
            )
            self._handle.stop()
            self._handle = self._runtime.spawn(self._spec)
            try:
                result = prepare(self._handle)
            except WorkerLostError as again:
                error = again
                continue
            _log.warning("%s is back after %.1f s", self.name, time.monotonic() - begin_s)
            return result

    def _given_up(self, error: WorkerLostError) -> WorkerLostError:
        if self._max_restarts == 0:
            return error
        first = "" if self._first_error is error else f"; the first time: {self._first_error}"
        return WorkerLostError(
            self.name,
            reason=f"{error.reason}. It was started again {self.restarts} times already, which is "
            f"cluster.max_restarts{first}",
        )


class Restart:
    """Starts a worker again, beside what goes on.

    Args:
        worker: which one.
        restore: starts it, and makes it what it was.
    """

    def __init__(self, worker: Supervised, restore: Callable[[], Any]) -> None:
        self._worker = worker
        self._done = threading.Event()
        self._thread = WorkerThread(
            lambda _: restore(), name=f"restart of {worker.name}", on_end=self._done.set
        )
        self._thread.__enter__()

    @property
    def is_done(self) -> bool:
        """Whether `finish` would return at once."""
        return self._done.is_set()

    def finish(self) -> None:
        """Join the thread; raises what it raised."""
        self._thread.__exit__(None, None, None)

    def abandon(self) -> None:
        """Join the thread, whose worker is ended."""
        self._worker.stop()
        self._thread.__exit__(WorkerLostError, None, None)
