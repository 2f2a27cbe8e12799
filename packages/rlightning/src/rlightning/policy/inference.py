"""Run a coroutine in inference mode, also where several interleave on one event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator

__all__ = ["InferenceModeAwaitable"]


class InferenceModeAwaitable:
    """Await a coroutine with `torch.inference_mode` on while it runs, and only then.

    The mode belongs to the thread, so it must be entered for each step of the coroutine and left
    at each of its suspensions; one `with` around the whole body would leak into others.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Any = self._coroutine.send
        value: Any = None
        while True:
            with torch.inference_mode():
                try:
                    waiting_for = step(value)
                except StopIteration as stop:
                    return stop.value
            try:
                value = yield waiting_for
                step = self._coroutine.send
            except BaseException as error:  # noqa: BLE001  # handed to the coroutine, which decides
                value = error
                step = self._coroutine.throw
