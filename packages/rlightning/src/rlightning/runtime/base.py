"""The seams of a runtime: workers, handles to call them by, and futures of their answers.

The same three types serve workers in this process and workers of a cluster. Nothing here knows what
a worker does.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Done", "Failed", "Future", "Handle", "Runtime", "Standing", "WorkerSpec"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker is, and what it takes."""

    name: str
    """What logs and errors call it, for example ``env-0``."""
    make: Callable[..., Any]
    """Called in the worker; returns the object that calls go to."""
    args: tuple[Any, ...] = ()
    """Arguments of `make`."""
    timeout_s: float = 120.0
    """Longest wait for one call; after it the worker counts as dead."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Resources and place, as the runtime understands them."""


class Future(ABC):
    """The answer to a call, which may still be on its way."""

    @abstractmethod
    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait at most `timeout_s`; return whether `result` is there, or an error."""

    @abstractmethod
    def result(self) -> Any:
        """Wait for the answer and return it, however often it is asked for.

        Raises:
            WorkerLostError: the worker died, or missed its deadline and counts as dead.
            Exception: what the call raised.
        """


@final
class Done(Future):
    """An answer that is there already."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Return True."""
        del timeout_s
        return True

    def result(self) -> Any:
        """Return the value."""
        return self._value


@final
class Failed(Future):
    """A call that has failed already; the error is raised where the answer is asked for."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Return True."""
        del timeout_s
        return True

    def result(self) -> Any:
        """Raise the error."""
        raise self._error


class Handle(ABC):
    """A worker, seen from outside. Calls are carried out one after another, in order."""

    name: str
    """What logs and errors call it."""
    node: str | None = None
    """The machine that it is pinned to; None where it may be anywhere."""
    pid: int = -1
    """Its process; -1 before its first call."""
    address: str = ""
    """Where other machines reach the one that it is on; empty before its first call."""
    is_near: bool = False
    """Whether it is on this machine and can take turns with another one; see `Turns`."""
    timeout_s: float = math.inf
    """Longest wait for one call that does not say another."""

    @abstractmethod
    def call(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future:
        """Begin a call of a method of the worker's object.

        Args:
            method: its name.
            *args: handed over.
            timeout_s: longest wait for the answer; the worker's own by default.
            **kwargs: handed over.
        """

    @abstractmethod
    def stop(self) -> None:
        """End the worker, whatever it is doing."""


class Standing(Handle):
    """A handle that stands before that of the worker that is alive now, `_handle`."""

    _handle: Handle

    @property
    def pid(self) -> int:  # type: ignore[override]  # of the worker that is alive now
        """The process of the worker that is alive now."""
        return self._handle.pid

    @property
    def address(self) -> str:  # type: ignore[override]  # of the worker that is alive now
        """Where other machines reach the one that the worker is on."""
        return self._handle.address

    @property
    def is_near(self) -> bool:  # type: ignore[override]  # of the worker that is alive now
        """Whether the worker that is alive now can take turns with another one."""
        return self._handle.is_near


class Runtime(ABC):
    """Starts workers, and ends all it started."""

    @abstractmethod
    def spawn(self, spec: WorkerSpec) -> Handle:
        """Start a worker; returns before it is ready, and its first call waits for that."""

    @abstractmethod
    def close(self) -> None:
        """End all workers."""
