"""`EnvRet`: what an environment hands to a policy after a reset or a step."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.types.convert import device_mover, to_numpy

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["EnvRet", "MultiAgentEnvRet", "Processed_EnvRet_fields"]

Processed_EnvRet_fields = ("next_observation", "reward", "terminated", "truncated", "info")
"""The names that post-processing gives to the fields of an `EnvRet`, shifted by one step."""

_FIELDS = ("observation", "last_reward", "last_terminated", "last_truncated", "info")


@dataclasses.dataclass(eq=False)
class EnvRet:
    """The result of the previous action, and the observation to act on now.

    A vectorised environment of N rows puts a leading ``[N]`` axis on every field; an environment
    with one row has no leading axis. Rows whose episode ended carry the next episode's first
    observation; the finished episode's own last observation stands in ``info["final_obs"]``
    (same layout as `observation`) with the row mask ``info["_final_obs"]``.

    Instances compare and hash by identity of the environment they came from, so that they can be
    dictionary keys whatever their arrays hold.
    """

    env_id: str
    """Which environment worker this came from; ends in ``-<worker index>``."""
    observation: Any
    """The observation to act on, as the environment's space says."""
    last_reward: Any = 0.0
    """Reward of the action before this observation; ``[N]`` float."""
    last_terminated: Any = False
    """Whether that action ended the episode inside the task; ``[N]`` bool."""
    last_truncated: Any = False
    """Whether the episode was cut from outside (a time limit); ``[N]`` bool."""
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What the environment reports beside; ``final_obs``, ``_final_obs``, ``episode_info``."""
    _extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields that travel into the buffer; merged by `to_dict`."""
    ts_env_sent_ns: int = dataclasses.field(default_factory=time.monotonic_ns)
    """Monotonic time in nanoseconds at which the environment sent this."""

    def __hash__(self) -> int:
        return hash(self.env_id)

    def __eq__(self, other: object) -> bool:
        return self is other

    @classmethod
    def fields(cls) -> tuple[str, ...]:
        """Return the names of the data fields, without id, time stamp and extras."""
        return _FIELDS

    @classmethod
    def get_defaults(cls) -> dict[str, Any]:
        """Return the default of each data field that has a plain one."""
        return {"last_reward": 0.0, "last_terminated": False, "last_truncated": False}

    def to_dict(self) -> dict[str, Any]:
        """Return the data fields and the extras as one dictionary.

        Raises:
            KeyError: an extra has the name of a field.
        """
        data = {name: getattr(self, name) for name in _FIELDS}
        clash = data.keys() & self._extra.keys()
        if clash:
            raise KeyError(f"extra fields {sorted(clash)} have the names of EnvRet's own fields")
        return data | self._extra

    def to(self, device: str | torch.device) -> EnvRet:
        """Return a copy whose arrays and tensors are tensors on `device`."""
        move = device_mover(device)
        if device == "cpu" and type(self) is EnvRet and self._is_all_arrays():
            return _SharedEnvRet.of(self, move)
        return self._map(move)

    def cpu(self) -> EnvRet:
        """Return a copy whose arrays and tensors are CPU tensors."""
        return self.to("cpu")

    def cuda(self, device: str | torch.device | None = None) -> EnvRet:
        """Return a copy whose arrays and tensors are tensors on a CUDA device."""
        return self.to(device or "cuda")

    def numpy(self) -> EnvRet:
        """Return a copy whose tensors are numpy arrays."""
        return self._map(to_numpy)

    def _map(self, convert: Any) -> EnvRet:
        return type(self)(
            self.env_id,
            convert(self.observation),
            convert(self.last_reward),
            convert(self.last_terminated),
            convert(self.last_truncated),
            convert(self.info) if self.info else {},
            convert(self._extra) if self._extra else {},
            self.ts_env_sent_ns,
        )

    def has_info(self, key: str) -> bool:
        """Return whether `info` has a key; what it holds stays where it is."""
        return key in self.info

    def _is_all_arrays(self) -> bool:
        """Return whether everything beside the observation is a plain array."""
        array, info = np.ndarray, self.info
        return (
            type(self.last_reward) is array
            and type(self.last_terminated) is array
            and type(self.last_truncated) is array
            and not self._extra
            and (not info or {array}.issuperset(map(type, info.values())))
        )

    def mark_env_sent(self) -> EnvRet:
        """Stamp the moment of sending and return self."""
        self.ts_env_sent_ns = time.monotonic_ns()
        return self

    def compute_sent_latency(self, now_ns: int | None = None) -> float:
        """Return the seconds since `mark_env_sent`, never negative."""
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        return max(0.0, (now_ns - self.ts_env_sent_ns) / 1e9)


class _Shared:
    """A field that becomes tensors when it is first read."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, env_ret: Any, owner: type | None = None) -> Any:
        if env_ret is None:
            return self
        value = env_ret._move(env_ret._source[self._name])
        env_ret.__dict__[self._name] = value
        return value


class _SharedEnvRet(EnvRet):
    """An `EnvRet` of CPU tensors that share their memory with arrays.

    Most policies read nothing but the observation, at every step, so the rest waits until it is
    read. A copy or a pickle of it is a plain `EnvRet`.
    """

    _source: dict[str, Any]
    _move: Callable[[Any], Any]
    last_reward = _Shared()
    last_terminated = _Shared()
    last_truncated = _Shared()
    info = _Shared()

    @classmethod
    def of(cls, env_ret: EnvRet, move: Callable[[Any], Any]) -> EnvRet:
        """Return `env_ret`, to be moved by `move`."""
        shared = cls.__new__(cls)
        shared.env_id = env_ret.env_id
        shared.observation = move(env_ret.observation)
        shared._extra = {}
        shared.ts_env_sent_ns = env_ret.ts_env_sent_ns
        shared._source = {**env_ret.__dict__, "info": dict(env_ret.info)}
        shared._move = move
        return shared

    def has_info(self, key: str) -> bool:
        """Return whether `info` has a key; what it holds stays where it is."""
        return key in self.__dict__.get("info", self._source["info"])

    def __reduce__(self) -> tuple[Any, ...]:
        values = tuple(getattr(self, field.name) for field in dataclasses.fields(self))
        return EnvRet, values


class MultiAgentEnvRet(EnvRet):
    """An `EnvRet` whose reward and flags are dictionaries by agent name."""
