"""`ChannelFuture`: an answer that comes over a `Channel`, perhaps in parts."""

from __future__ import annotations

import collections
import time
from typing import TYPE_CHECKING, Any, Protocol, final

from rlightning.errors import WorkerLostError
from rlightning.runtime.base import Future
from rlightning.runtime.host import Failure

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ChannelFuture"]


class Line(Protocol):
    """What takes answers from the channel, in the order of the calls."""

    name: str

    def wait_until(
        self, ready: Callable[[], bool], future: ChannelFuture, timeout_s: float | None
    ) -> bool:
        """Take answers until `ready()`; return whether it is in time.

        Raises:
            WorkerLostError: the worker is dead.
        """


@final
class ChannelFuture(Future):
    """The answer to a call.

    Args:
        line: takes answers from the channel.
        method: what was called, for messages.
        limit_s: longest wait for the answer; after it the worker counts as dead.
    """

    def __init__(self, line: Line, method: str, limit_s: float) -> None:
        self.method = method
        self.outcome: Any = None
        self.answered = False
        self.parts: collections.deque[Any] = collections.deque()
        """What the worker has said before its answer."""
        self._line = line
        self.expect_within(limit_s)

    def expect_within(self, limit_s: float) -> None:
        """Let the wait for the answer begin now."""
        self.limit_s = limit_s
        self._expires_s = time.monotonic() + limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the worker counts as dead; never none at all, which would not wait."""
        return max(0.001, self._expires_s - time.monotonic())

    @property
    def is_late(self) -> bool:
        """Whether the worker counts as dead."""
        return time.monotonic() >= self._expires_s

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait at most `timeout_s`; return whether the answer is there, or an error."""
        try:
            return self._line.wait_until(lambda: self.answered, self, timeout_s)
        except WorkerLostError:
            return True

    def wait_for_part(self, timeout_s: float) -> bool:
        """Return whether there are `parts`, or the answer or an error, within `timeout_s`."""
        try:
            return self._line.wait_until(lambda: self.answered or bool(self.parts), self, timeout_s)
        except WorkerLostError:
            return True

    def result(self) -> Any:
        """Wait for the answer and return it, or raise what came instead."""
        self._line.wait_until(lambda: self.answered, self, None)
        if isinstance(self.outcome, Failure):
            self.outcome.raise_(self._line.name)
        return self.outcome
