"""`EnvRet` and `PolicyResponse` as they arrived from another process, still closed.

Who passes a value on from one worker to another need not look inside. The first field that is read
or written opens it, and from then on it is an ordinary `EnvRet` or `PolicyResponse`.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

from rlightning.types import EnvRet, PolicyResponse

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SealedEnvRet", "SealedResponse", "content_of", "seal_env_ret", "seal_response"]

_FIELDS = ("observation", "last_reward", "last_terminated", "last_truncated", "info", "_extra")
_OPENING = threading.RLock()
"""Held while something is opened: the threads of a run may share it."""


class Content(Protocol):
    """What is inside."""

    def read(self) -> Sequence[Any]:
        """Return the values of the fields."""


class _Field:
    """A field that is there once the value is open."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, env_ret: Any, owner: type | None = None) -> Any:
        if env_ret is None:
            return self
        _open_env_ret(env_ret)
        return getattr(env_ret, self._name)


class SealedEnvRet(EnvRet):
    """An `EnvRet` whose fields, all but its id and its time stamp, are still closed."""

    _content: Content
    observation = _Field()
    last_reward = _Field()
    last_terminated = _Field()
    last_truncated = _Field()
    info = _Field()
    _extra = _Field()

    def __setattr__(self, name: str, value: Any) -> None:
        _open_env_ret(self)
        setattr(self, name, value)

    def __reduce__(self) -> Any:
        _open_env_ret(self)
        return EnvRet, tuple(vars(self)[name] for name in EnvRet.__dataclass_fields__)


class SealedResponse(PolicyResponse):
    """A `PolicyResponse` whose fields, all but its id and its time stamp, are still closed."""

    __slots__ = ()

    @property
    def extras(self) -> dict[str, Any]:
        """The fields; reading them opens the response."""
        _open_response(self)
        return self.extras

    @extras.setter
    def extras(self, value: dict[str, Any]) -> None:
        _open_response(self)
        self.extras = value

    def __reduce__(self) -> Any:
        _open_response(self)
        return self.__reduce__()


def seal_env_ret(env_id: str, sent_ns: int, content: Content) -> EnvRet:
    """Return an `EnvRet` that holds `content`, which reads as its fields after the id, in order."""
    sealed = SealedEnvRet.__new__(SealedEnvRet)
    vars(sealed).update(env_id=env_id, ts_env_sent_ns=sent_ns, _content=content)
    return sealed


def seal_response(env_id: str, sent_ns: int, content: Content) -> PolicyResponse:
    """Return a `PolicyResponse` that holds `content`, which reads as ``(extras,)``."""
    sealed = SealedResponse.__new__(SealedResponse)
    object.__setattr__(sealed, "env_id", env_id)
    object.__setattr__(sealed, "ts_policy_sent_ns", sent_ns)
    _EXTRAS.__set__(sealed, content)
    return sealed


def content_of(value: EnvRet | PolicyResponse) -> Any:
    """Return what is inside; None where it is open."""
    with _OPENING:
        if type(value) is SealedEnvRet:
            return vars(value)["_content"]
        return _EXTRAS.__get__(value) if type(value) is SealedResponse else None


_EXTRAS: Any = PolicyResponse.__dict__["extras"]
"""Where a response keeps its fields, and a sealed one its content."""


def _open_env_ret(env_ret: EnvRet) -> None:
    with _OPENING:
        if type(env_ret) is not SealedEnvRet:
            return
        inside = vars(env_ret)
        inside.update(zip(_FIELDS, inside["_content"].read(), strict=True))
        del inside["_content"]
        object.__setattr__(env_ret, "__class__", EnvRet)


def _open_response(response: PolicyResponse) -> None:
    with _OPENING:
        if type(response) is not SealedResponse:
            return
        (extras,) = _EXTRAS.__get__(response).read()
        _EXTRAS.__set__(response, extras)
        object.__setattr__(response, "__class__", PolicyResponse)
