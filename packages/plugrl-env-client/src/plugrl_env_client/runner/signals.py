"""Signals as an exception, so that connections, files and simulators are closed properly."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["Interrupted", "interruptible"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """SIGINT or SIGTERM came.

    Attributes:
        signum: which one.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.signum).name}"

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal ended."""
        return 128 + self.signum


def _take_no_notice(signum: int, frame: FrameType | None) -> None:
    """Unlike ``SIG_IGN``, nothing is said of a signal that came a moment before."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `Interrupted` in the block when a signal comes; a second one is ignored.

    Ignored, because the block is closing what it holds; SIGKILL ends a process that cannot.
    In a thread that is not the main one, signals stay as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        for number in _SIGNALS:
            signal.signal(number, _take_no_notice)
        raise Interrupted(signum)

    before = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
