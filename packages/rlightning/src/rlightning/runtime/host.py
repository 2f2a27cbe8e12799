"""`Host`: the worker's side. Owns one object and carries out the calls of whoever started it.

Calls reach it in two ways: as frames over a socket, while it serves one, and otherwise one by one
through `call`. Both are carried out by the thread that `Host` was made in, one after another. It
knows nothing about what started its process.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import importlib
import logging
import random
import sys
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.errors import RLightningError
from rlightning.runtime.channel import Channel, ChannelClosedError, Listener, packed
from rlightning.runtime.frames import UnframeableError
from rlightning.runtime.turn_workers import CALLS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Failure", "Host", "WorkerSetup"]

_CONNECT_S = 60.0
_KEPT_LOG_RECORDS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSetup:
    """What every worker's process takes over from the one that started it."""

    sys_path: tuple[str, ...] = ()
    """Where modules are looked for."""
    imports: tuple[str, ...] = ()
    """Modules to import first, so that they register their classes."""
    loggers: tuple[str, ...] = ("rlightning",)
    """Whose log records are passed on, with those of all loggers below."""
    log_level: int = logging.INFO
    """The least severe log record that is passed on."""
    torch_threads: int | None = None
    """CPU threads of torch."""
    seed: int | None = None
    """Seeds the global random generators."""


@dataclasses.dataclass(frozen=True)
class Failure:
    """An error on its way to who called, with where it was raised."""

    error: BaseException
    text: str

    def raise_(self, worker: str) -> None:
        """Raise the error, with the worker's traceback as a note."""
        self.error.add_note(f"in worker {worker}:\n{self.text}")
        raise self.error


class Host:
    """Carries out calls on the object it is given, see `adopt`.

    Args:
        setup: of this process.
        is_portable: whether an error can go to who called as it is, or only its text.
    """

    def __init__(
        self, setup: WorkerSetup, is_portable: Callable[[BaseException], bool] = lambda _: True
    ) -> None:
        self._is_portable = is_portable
        for path in setup.sys_path:
            if path not in sys.path:
                sys.path.append(path)
        for module in setup.imports:
            importlib.import_module(module)
        self._logs = _LogRelay()
        for name in setup.loggers:
            logger = logging.getLogger(name)
            logger.addHandler(self._logs)
            logger.setLevel(setup.log_level)
            logger.propagate = False
        self._setup = setup
        if setup.seed is not None:
            random.seed(setup.seed)
            np.random.seed(setup.seed)
        self._target: Any = None
        self._listener: Listener | None = None
        self._channel: Channel | None = None
        self._kept: dict[int, Any] = {}
        self._number = 0

    def adopt(self, target: Any) -> None:
        """Take the object that calls go to; where making it has loaded torch, set that up."""
        self._target = target
        torch = sys.modules.get("torch")
        if torch is None:
            return
        if self._setup.seed is not None:
            torch.manual_seed(self._setup.seed)
        if self._setup.torch_threads is not None:
            torch.set_num_threads(self._setup.torch_threads)

    def listen(self) -> str:
        """Return where to connect to for `serve`."""
        self._listener = Listener()
        return self._listener.path

    def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the result or `Failure` of a call, and what was logged meanwhile."""
        return self._outcome(method, args, kwargs), self._logs.take()

    def serve(self) -> None:
        """Answer frames until the other end leaves; it may come back later."""
        if self._channel is None:
            if self._listener is None:
                raise RLightningError("serve() before listen()")
            self._channel = self._listener.accept(_CONNECT_S)
        with contextlib.suppress(ChannelClosedError):
            while self._answer(self._channel):
                pass

    def _answer(self, channel: Channel) -> bool:
        request = channel.receive()
        if request is None:
            return False
        self._number += 1
        method, args, kwargs = request
        outcome = self._outcome(method, args, kwargs, channel)
        logs = self._logs.take()
        if not isinstance(outcome, Failure):
            try:
                pieces = packed([True, outcome, logs])
            except UnframeableError:
                pass
            else:
                channel.send(pieces)
                return True
        self._kept[self._number] = outcome
        channel.send(packed([False, self._number, logs]))
        return True

    def fetch(self, number: int) -> Any:
        """Return the outcome of a call over the socket that no frame could carry."""
        return self._kept.pop(number)

    def _outcome(
        self,
        method: str,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        channel: Channel | None = None,
    ) -> Any:
        try:
            if channel is not None and method in CALLS:
                return CALLS[method](self._target, channel, self._say, *args)
            return getattr(self._target, method)(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  # a process's border: raised again by the caller
            return self.failure(error)

    def _say(self, part: Any, *frames: bytes) -> None:
        """Tell who called something before the answer; `frames` follow as they are."""
        if self._channel is not None:
            said = packed([None, [part, len(frames)], self._logs.take()])
            self._channel.send([b"".join([*said, *frames])])

    def failure(self, error: Exception) -> Failure:
        """Return `error` as something that can travel."""
        text = "".join(traceback.format_exception(error))
        bare = error.with_traceback(None)
        bare.__cause__ = bare.__context__ = None  # the text has them
        if not self._is_portable(bare):
            return Failure(RuntimeError(f"{type(error).__name__}: {error}"), text)
        return Failure(bare, text)


class _LogRelay(logging.Handler):
    """Keeps log records until the next answer takes them along; the oldest go first."""

    def __init__(self) -> None:
        super().__init__()
        self._records: collections.deque[Any] = collections.deque(maxlen=_KEPT_LOG_RECORDS)

    def emit(self, record: logging.LogRecord) -> None:
        metrics = getattr(record, "metric_payload", None)
        step = getattr(record, "step", None)
        if metrics is not None:
            self._records.append([record.name, record.levelno, metrics, step])
        else:
            text = self.format(record)
            self._records.append([record.name, record.levelno, text, None])

    def take(self) -> list[Any] | None:
        """Return what was logged, as plain data; None where nothing was."""
        if not self._records:
            return None
        taken = list(self._records)
        self._records.clear()
        return taken
