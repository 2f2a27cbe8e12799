"""`PolicyResponse`: what a policy answers to an `EnvRet`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rlightning.types.convert import to_device, to_numpy

if TYPE_CHECKING:
    import gymnasium as gym
    import torch

__all__ = ["MultiAgentPolicyResponse", "PolicyResponse"]

_OWN = ("env_id", "extras", "ts_policy_sent_ns")


class PolicyResponse:
    """The action for an environment, and whatever the algorithm needs to learn from it.

    Every keyword becomes a field: readable and writable as an attribute, stored in the buffer, and
    available in `update_dataset`. All fields live, in order, in `extras`.

    Args:
        env_id: the `EnvRet.env_id` this answers.
        **data: the fields, usually ``action``, ``log_prob`` and ``value``; a leading ``[N]`` axis
            for an environment with N rows.
    """

    __slots__ = ("env_id", "extras", "ts_policy_sent_ns")

    env_id: str
    extras: dict[str, Any]
    ts_policy_sent_ns: int

    def __init__(self, env_id: str, **data: Any) -> None:
        object.__setattr__(self, "env_id", env_id)
        object.__setattr__(self, "extras", data)
        object.__setattr__(self, "ts_policy_sent_ns", time.monotonic_ns())

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):  # unset while unpickling
            raise AttributeError(name)
        try:
            return self.extras[name]
        except KeyError:
            have = ", ".join(self.extras) or "none"
            raise AttributeError(f"PolicyResponse has no field {name!r}; it has: {have}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            object.__setattr__(self, name, value)
        else:
            self.extras[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self.extras:
            raise AttributeError(name)
        del self.extras[name]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.extras.items())
        return f"{type(self).__name__}(env_id={self.env_id!r}, {fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.env_id, self.extras, self.ts_policy_sent_ns)

    @property
    def _fields(self) -> tuple[str, ...]:
        return tuple(self.extras)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a new dictionary, without `env_id` and the time stamp."""
        return dict(self.extras)

    def to(self, device: str | torch.device) -> PolicyResponse:
        """Turn arrays and tensors into tensors on `device`, in place, and return self."""
        self.extras = to_device(self.extras, device)
        return self

    def cpu(self) -> PolicyResponse:
        """Turn arrays and tensors into CPU tensors, in place, and return self."""
        return self.to("cpu")

    def cuda(self, device: str | torch.device | None = None) -> PolicyResponse:
        """Turn arrays and tensors into CUDA tensors, in place, and return self."""
        return self.to(device or "cuda")

    def numpy(self) -> PolicyResponse:
        """Turn tensors into numpy arrays, in place, and return self."""
        self.extras = to_numpy(self.extras)
        return self

    def mark_policy_sent(self) -> PolicyResponse:
        """Stamp the moment of sending and return self."""
        object.__setattr__(self, "ts_policy_sent_ns", time.monotonic_ns())
        return self

    def compute_sent_latency(self, now_ns: int | None = None) -> float:
        """Return the seconds since `mark_policy_sent`, never negative."""
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        return max(0.0, (now_ns - self.ts_policy_sent_ns) / 1e9)

    @staticmethod
    def make_example(
        action_space: gym.Space[Any], env_id: str | None = None, **data: Any
    ) -> PolicyResponse:
        """Return a response with a random action of `action_space`."""
        return PolicyResponse(env_id or "example-0", action=action_space.sample(), **data)


def _rebuild(
    kind: type[PolicyResponse], env_id: str, data: dict[str, Any], sent_ns: int
) -> PolicyResponse:
    response = kind(env_id, **data)
    response.ts_policy_sent_ns = sent_ns
    return response


class MultiAgentPolicyResponse(PolicyResponse):
    """A `PolicyResponse` whose action is a dictionary by agent name."""

    __slots__ = ()

    @staticmethod
    def make_example(  # type: ignore[override]  # one space per agent, as the reference has it
        action_spaces: dict[str, gym.Space[Any]], env_id: str | None = None, **data: Any
    ) -> MultiAgentPolicyResponse:
        """Return a response with a random action for every agent."""
        action = {agent: space.sample() for agent, space in action_spaces.items()}
        return MultiAgentPolicyResponse(env_id or "example-0", action=action, **data)
