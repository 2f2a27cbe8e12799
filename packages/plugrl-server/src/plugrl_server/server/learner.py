"""The learner's thread: learn steps and checkpoint writes, one after the other."""

from __future__ import annotations

import logging
import queue
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Learner"]

_log = logging.getLogger(__name__)


class Learner:
    """Runs jobs in a thread of its own, in order.

    Args:
        on_error: called in that thread with what a job raised; further jobs still run.
    """

    def __init__(self, on_error: Callable[[Exception], None]) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._on_error = on_error
        self._thread = threading.Thread(target=self._run, name="plugrl-learner", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def submit(self, job: Callable[[], Any]) -> None:
        """Do something after all that was submitted before."""
        self._jobs.put(job)

    def stop(self, timeout_s: float) -> bool:
        """Let the thread end after its jobs; False if it has not within `timeout_s`."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:  # noqa: BLE001  # a thread's border: the trainer ends the run
                _log.critical("the learner failed", exc_info=error)
                self._on_error(error)
