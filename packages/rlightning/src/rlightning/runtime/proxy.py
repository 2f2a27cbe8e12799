"""`Proxy`: an object of a class that lives in a worker, with the surface of that class."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlightning.runtime.base import Future, Handle

__all__ = ["Proxy"]


class Proxy:
    """Stands where an object of class `kind` would stand and passes calls on to the worker.

    What the class has as a plain attribute is read from the class, what is a method is called in
    the worker, and what is a property is read there.

    Args:
        kind: the class of the worker's object.
        handle: the worker.
    """

    def __init__(self, kind: type[Any], handle: Handle) -> None:
        self._kind = kind
        self._handle = handle

    @property
    def worker(self) -> Handle:
        """The worker, for calls that need not be waited for."""
        return self._handle

    def begin(self, method: str, *args: Any, **kwargs: Any) -> Future:
        """Begin a call; its answer is asked for later."""
        return self._handle.call(method, *args, **kwargs)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self.begin(method, *args, **kwargs).result()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("_kind", "_handle"):
            raise AttributeError(name)
        member = getattr(self._kind, name)
        if isinstance(member, property):
            return self._read(name)
        return functools.partial(self._call, name) if callable(member) else member

    def _read(self, name: str) -> Any:
        """Return a property of the worker's object."""
        return self._call("__getattribute__", name)

    def __repr__(self) -> str:
        return f"<{self._kind.__name__} in worker {self._handle.name}>"
