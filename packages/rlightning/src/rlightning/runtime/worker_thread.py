"""A thread with an owner: its errors reach the owner, and the owner joins it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from rlightning.errors import RLightningError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["WorkerThread"]

_JOIN_DEADLINE_S = 60.0


class WorkerThread:
    """Runs ``body(stop)`` in a thread for the duration of a ``with`` block.

    Args:
        body: called once with an event that is set when it should return.
        name: of the thread, for messages.
        on_end: called when the body has ended, however it ended.
    """

    def __init__(
        self,
        body: Callable[[threading.Event], None],
        *,
        name: str,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._body = body
        self._on_end = on_end
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        try:
            self._body(self._stop)
        except BaseException as error:  # noqa: BLE001  # a thread's border: raised again in `check`
            self._error = error
        finally:
            self._on_end()

    def check(self) -> None:
        """Raise the error that ended the thread, if one did."""
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(_JOIN_DEADLINE_S)
        if self._thread.is_alive() and kind is None:
            raise RLightningError(
                f"the {self._thread.name} thread did not end within {_JOIN_DEADLINE_S:.0f} s"
            )
        if kind is None:
            self.check()
