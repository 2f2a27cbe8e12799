"""Environments that wait for somebody outside the run, in one worker of a cluster.

Those of training and of evaluation take turns with the same clients, so one worker holds both. A
call may wait for as long as the environment itself allows: the worker answers every now and then
that it still waits, so that the trainer knows that it is alive, logs what it logs, and can ask it
to stop. Knows nothing about what is waited for.
"""

from __future__ import annotations

import concurrent.futures
import sys
from typing import TYPE_CHECKING, Any, final

from rlightning.env.env_proxy import make_env
from rlightning.errors import RLightningError, WorkerLostError
from rlightning.runtime.base import Failed, Future, Standing
from rlightning.runtime.stop_signal import StopSignal, stop_is_requested

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlightning.env.base_env import BaseEnv
    from rlightning.runtime.base import Handle
    from rlightning.runtime.supervision import Supervised

__all__ = ["PatientHandle", "PatientWorker"]

_ANSWER_AFTER_S = 0.5
"""How long a call takes before it is answered that it is not finished."""
_PURPOSE = -1
"""Where the arguments of `make_env` say what the environment is for."""


@final
class PatientWorker:
    """The worker's side: carries out calls one after another, in a thread of its own.

    Args:
        *recipe: arguments of `make_env` for the first environment.
    """

    def __init__(self, *recipe: Any) -> None:
        self._envs: dict[str, BaseEnv] = {}
        self._stop = StopSignal(signals=())
        self._stop.__enter__()  # for as long as the process lives: whoever waits in it looks
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "environments")
        self._jobs: dict[int, concurrent.futures.Future[Any]] = {}
        self._number = 0
        self.add(*recipe)

    def add(self, *recipe: Any) -> None:
        """Make the environment of another purpose, where there is none yet."""
        if recipe[_PURPOSE] not in self._envs:
            self._envs[recipe[_PURPOSE]] = make_env(*recipe)

    def ask(self, purpose: str, method: str, args: Any, kwargs: dict[str, Any]) -> list[Any]:
        """Begin a call of an environment; return as `go_on` does."""
        return self._begin(getattr(self._envs[purpose], method), *args, **kwargs)

    def leave(self, purpose: str, *, failed: bool, stopped: bool) -> list[Any]:
        """Close an environment; return as `go_on` does.

        Args:
            purpose: of the environment.
            failed: whether the run ends with an error.
            stopped: whether the run was asked to stop.
        """
        if stopped or not all(job.done() for job in self._jobs.values()):
            self._stop.request()
        return self._begin(_close_after_an_error if failed else _close, self._envs.pop(purpose))

    def go_on(self, number: int, *, stop: bool = False) -> list[Any]:
        """Wait a moment for a call.

        Args:
            number: of the call.
            stop: whether to ask whoever waits in this process to stop.

        Returns:
            The call's number, whether it is finished, and then its result.

        Raises:
            Exception: what the call raised.
        """
        if stop:
            self._stop.request()
        done, _ = concurrent.futures.wait([self._jobs[number]], _ANSWER_AFTER_S)
        if not done:
            return [number, False, None]
        return [number, True, self._jobs.pop(number).result()]

    def _begin(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        self._number += 1
        self._jobs[self._number] = self._thread.submit(function, *args, **kwargs)
        return self.go_on(self._number)


def _close(env: BaseEnv) -> None:
    env.close()


def _close_after_an_error(env: BaseEnv) -> None:
    """Close an environment as in one process: while the error that ends the run is on its way."""
    try:
        raise RLightningError("the run ends with an error")
    except RLightningError:
        env.close()


@final
class PatientHandle(Standing):
    """The trainer's side: one environment of a `PatientWorker`, as a worker of its own.

    Args:
        worker: holds the environment.
        recipe: arguments of `make_env`.
        owns: whether the worker was started with this environment, and ends with it.
    """

    def __init__(self, worker: Supervised, recipe: tuple[Any, ...], *, owns: bool) -> None:
        self.name = worker.name
        self.node = worker.node
        self._handle = self.worker = worker
        self._recipe = recipe
        self._purpose = recipe[_PURPOSE]
        self._owns = owns
        self._lives = worker.restarts
        if not owns:
            worker.call("add", *recipe).result()

    @property
    def restarts(self) -> int:
        """How many workers have died."""
        return self.worker.restarts

    def call(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future:
        """Begin a call; the deadline is for each answer of the worker that it still waits."""
        if self._lives != self.worker.restarts:
            reason = "it was started again, and this environment with it"
            return Failed(WorkerLostError(self.name, reason=reason))
        if method == "close":
            failed = isinstance(sys.exc_info()[1], Exception)  # Ctrl-C is no failure
            stopped = stop_is_requested()
            return self._begin("leave", self._purpose, failed=failed, stopped=stopped)
        return self._begin("ask", self._purpose, method, args, kwargs, timeout_s=timeout_s)

    def _begin(self, *args: Any, **kwargs: Any) -> Future:
        return _PatientFuture(self.worker, self.worker.call(*args, **kwargs))

    def restore(self, error: WorkerLostError, prepare: Callable[[Handle], Any]) -> Any:
        """Replace a worker that is lost, unless its other environment has; see `Supervised`."""

        def prepare_here(handle: Handle) -> Any:
            self._lives = self.worker.restarts
            handle.call("add", *self._recipe).result()
            return prepare(self)

        if self._lives != self.worker.restarts:
            try:
                return prepare_here(self.worker)
            except WorkerLostError as again:
                error = again
        return self.worker.restore(error, prepare_here)

    def stop(self) -> None:
        """End the worker, where it is this environment's own."""
        if self._owns:
            self.worker.stop()


@final
class _PatientFuture(Future):
    """The answer of a call that may be told first, several times, that it still waits."""

    def __init__(self, worker: Supervised, begun: Future) -> None:
        self._worker = worker
        self._begun = begun
        self._is_finished = False
        self._value: Any = None

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait at most `timeout_s`; return whether the call is finished, or has failed."""
        if not self._is_finished and self._begun.poll(timeout_s):
            try:
                self._take()
            except Exception:  # noqa: BLE001  # raised where the answer is asked for
                return True
        return self._is_finished

    def result(self) -> Any:
        """Wait for the answer, for as long as the environment waits."""
        while not self._is_finished:
            self._take()
        return self._value

    def _take(self) -> None:
        """Take what the worker has answered, and ask again where the call is not finished."""
        number, self._is_finished, self._value = self._begun.result()
        if not self._is_finished:
            self._begun = self._worker.call("go_on", number, stop=stop_is_requested())
