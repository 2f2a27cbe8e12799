"""Ctrl-C and SIGTERM as a request that the training loop reads between steps."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, Self

from rlightning.errors import StopRequested
from rlightning.utils.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

__all__ = ["StopSignal", "stop_is_requested"]

_listening: list[StopSignal] = []
_EXIT_CODE_OF_A_SECOND_SIGNAL = 130
_log = get_logger("runtime.stop")


class StopSignal:
    """A stop request; as a context manager it listens for SIGINT and SIGTERM.

    The first signal asks the run to save and end; a second one ends the process at once, or, at a
    prompt and in a notebook, the call with `KeyboardInterrupt`.

    Args:
        signals: what to listen for; nothing where another process passes the request on.
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGINT, signal.SIGTERM)) -> None:
        self._signals = signals
        self._requested = threading.Event()
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether somebody asked the run to stop."""
        return self._requested.is_set()

    def request(self) -> None:
        """Ask the run to save and end."""
        self._requested.set()

    def raise_if_requested(self) -> None:
        """Raise `StopRequested` if somebody asked the run to stop."""
        if self.requested:
            raise StopRequested("the run was asked to stop")

    def __enter__(self) -> Self:
        _listening.append(self)
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        _listening.remove(self)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            if hasattr(sys, "ps1"):  # a prompt or a notebook, whose variables are the user's
                raise KeyboardInterrupt
            os._exit(_EXIT_CODE_OF_A_SECOND_SIGNAL)
        self.request()  # before logging, so that a second signal meanwhile counts as one
        name, call = signal.Signals(number).name, _call_of_an_environment(frame)
        when = f" as soon as {call}" if call else ""
        _log.warning("%s: saving and stopping%s; a second one stops at once", name, when)


def _call_of_an_environment(frame: FrameType | None) -> str | None:
    """Return which environment's step or reset must return before the loop sees the request.

    What runs in it is the user's, and may hang. Read off the stack, so that steps cost nothing.
    """
    while frame is not None:
        name = frame.f_code.co_name.removeprefix("_")
        if name in ("step", "reset"):
            # No `getattr`: it could run the user's code, here between any two of its instructions.
            held = getattr(frame.f_locals.get("self"), "__dict__", {})
            if "env_id" in held and "label" in held:
                return f"{held['label']} returns from {name}"
        frame = frame.f_back
    return None


def stop_is_requested() -> bool:
    """Return whether somebody asked a run of this process to stop.

    For whoever waits inside a step, where the training loop cannot look.
    """
    return any(signal.requested for signal in _listening)
