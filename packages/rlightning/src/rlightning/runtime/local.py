"""`LocalRuntime`: workers that are objects of this process; calls are carried out at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from rlightning.errors import WorkerLostError
from rlightning.runtime.base import Done, Failed, Future, Handle, Runtime

if TYPE_CHECKING:
    from rlightning.runtime.base import WorkerSpec

__all__ = ["LocalRuntime"]


@final
class LocalRuntime(Runtime):
    """Makes workers where it is called; deadlines are not kept, for nothing could keep them."""

    def __init__(self) -> None:
        self._handles: list[_LocalHandle] = []

    def spawn(self, spec: WorkerSpec) -> Handle:
        """Make the worker's object here."""
        handle = _LocalHandle(spec.name, spec.make(*spec.args))
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        """Forget all workers."""
        for handle in self._handles:
            handle.stop()
        self._handles.clear()


@final
class _LocalHandle(Handle):
    def __init__(self, name: str, target: Any) -> None:
        self.name = name
        self._target = target

    def call(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future:
        del timeout_s
        if self._target is None:
            return Failed(WorkerLostError(self.name, reason="it was stopped"))
        try:
            return Done(getattr(self._target, method)(*args, **kwargs))
        except Exception as error:  # noqa: BLE001  # raised where the answer is asked for
            return Failed(error)

    def stop(self) -> None:
        self._target = None
