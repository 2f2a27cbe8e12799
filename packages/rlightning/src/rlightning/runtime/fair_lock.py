"""A lock that serves its waiters in the order they came."""

from __future__ import annotations

import threading
from typing import Self

__all__ = ["FairLock"]


class FairLock:
    """A context manager that one thread holds at a time, first come, first served.

    A plain lock may be taken again and again by a thread that releases it for an instant between
    its steps, while another waits for ever. Not re-entrant.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()
        self._next_ticket = 0
        self._serving = 0

    def __enter__(self) -> Self:
        with self._turn:
            ticket = self._next_ticket
            self._next_ticket += 1
            self._turn.wait_for(lambda: self._serving == ticket)
        return self

    def __exit__(self, *_: object) -> None:
        with self._turn:
            self._serving += 1
            self._turn.notify_all()
