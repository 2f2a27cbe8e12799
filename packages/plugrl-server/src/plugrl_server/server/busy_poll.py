"""An event loop that looks for messages a moment longer before it sleeps.

To fall asleep and be woken takes a tenth of a millisecond, much of it because what runs next runs
with cold caches. A client whose environment is quick is back sooner than that. Knows nothing of
connections, policies or learning.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BusySelector", "make_event_loop"]


class BusySelector(selectors.DefaultSelector):
    """Asks again and again for a while before it waits, as long as that has paid.

    It pays if the last wait was shorter than `limit_s`. Once nothing comes within that time it
    waits as others do, until a wait is short again; so an idle loop takes no processor time.
    Between two looks the processor is offered to whoever wants it.

    Args:
        limit_s: how long to ask at most, in seconds.
        may_ask: whether there is nothing else for this process to do; asked before each wait.
    """

    def __init__(self, limit_s: float, may_ask: Callable[[], bool]) -> None:
        super().__init__()
        self._limit_s, self._may_ask = limit_s, may_ask
        self._pays = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors.BaseSelector.select`."""
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        began_s = now_s = time.perf_counter()
        if self._pays and self._may_ask():
            until_s = began_s + (self._limit_s if timeout is None else min(timeout, self._limit_s))
            while now_s < until_s:
                ready = super().select(0)
                if ready:
                    return ready
                os.sched_yield()
                now_s = time.perf_counter()
            if timeout is not None:
                timeout = max(0.0, timeout - (now_s - began_s))
        ready = super().select(timeout)
        self._pays = bool(ready) and time.perf_counter() - began_s < self._limit_s
        return ready


def make_event_loop(limit_s: float, may_ask: Callable[[], bool]) -> asyncio.AbstractEventLoop:
    """Make an event loop with a `BusySelector`; a plain one where asking cannot pay.

    That is where `limit_s` is 0, on one processor, which the client needs meanwhile, and on
    Windows.
    """
    if sys.platform == "win32" or limit_s <= 0 or _processors() == 1:
        return asyncio.new_event_loop()
    return asyncio.SelectorEventLoop(BusySelector(limit_s, may_ask))


def _processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
