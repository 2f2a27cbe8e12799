"""What a Gymnasium environment returns, looked at: names what was found and what was expected."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from plugrl_envs.errors import EnvResultError

__all__ = ["QuickLook", "check_reset", "check_step", "describe"]

_ARRAYS = (gym.spaces.Box, gym.spaces.MultiBinary, gym.spaces.MultiDiscrete)
_WHOLE = frozenset({int, np.int64, np.int32})
_FLAGS = frozenset({bool, np.bool_, int})
_NUMBERS = frozenset({float, np.float64, np.float32, bool, np.bool_}) | _WHOLE


class QuickLook:
    """Whether what a step returned is plainly right; `check_step` looks at what is not.

    Takes a few tenths of a microsecond, so that every step can be looked at.

    Args:
        space: what the environment observes.
    """

    __slots__ = ("_is_whole", "_parts", "_shape")

    def __init__(self, space: gym.Space[Any]) -> None:
        self._parts: list[tuple[str, QuickLook]] | None = None
        if isinstance(space, gym.spaces.Dict):
            self._parts = [(key, QuickLook(part)) for key, part in space.spaces.items()]
        self._shape = space.shape if isinstance(space, (*_ARRAYS, gym.spaces.Discrete)) else None
        self._is_whole = space.dtype is not None and np.dtype(space.dtype).kind in "biu"

    def __call__(self, found: Any) -> bool:
        """Return whether `found` is right at a glance."""
        if type(found) is not tuple or len(found) != 5:
            return False
        observation, reward, terminated, truncated, info = found
        return (
            type(reward) in _NUMBERS
            and type(terminated) in _FLAGS
            and type(truncated) in _FLAGS
            and type(info) is dict
            and self.sees(observation)
        )

    def sees(self, observation: Any) -> bool:
        """Return whether `observation` is of the space's shape, as far as a glance tells."""
        if type(observation) is np.ndarray:
            fits: bool = observation.shape == self._shape
            return fits and not (self._is_whole and observation.dtype.kind == "f")
        if self._parts is None:
            return self._shape == () and type(observation) in _WHOLE
        if type(observation) is not dict:
            return False
        for key, part in self._parts:
            if key not in observation or not part.sees(observation[key]):
                return False
        return True


def check_reset(env: gym.Env[Any, Any], found: Any, name: str = "") -> None:
    """Refuse what `env.reset` returned, unless it is ``(observation, info)``.

    Args:
        env: whose reset it was.
        found: what it returned.
        name: of the environment in messages; by default its class's.

    Raises:
        EnvResultError: it is not, or the observation is not of the environment's space.
    """
    where = f"{name or type(env).__name__}.reset()"
    if not isinstance(found, tuple) or len(found) != 2:
        raise EnvResultError(
            f"{where} returned {describe(found)}; expected the two values (observation, info)"
        )
    _check_observation(env.observation_space, found[0], f"the observation of {where}")
    _check_info(found[1], where)


def check_step(env: gym.Env[Any, Any], found: Any, name: str = "") -> None:
    """Refuse what `env.step` returned, unless it is Gymnasium's five values.

    Args:
        env: whose step it was.
        found: what it returned.
        name: of the environment in messages; by default its class's.

    Raises:
        EnvResultError: it is not, or one of the values cannot be used.
    """
    where = f"{name or type(env).__name__}.step()"
    if not isinstance(found, tuple) or len(found) != 5:
        raise EnvResultError(
            f"{where} returned {describe(found)}; expected the five values (observation, reward, "
            "terminated, truncated, info). A single `done` is told apart: terminated where the "
            "task is over, truncated where only the time is"
        )
    observation, reward, terminated, truncated, info = found
    _check_observation(env.observation_space, observation, f"the observation of {where}")
    if np.prod(_shape(reward)) != 1 or np.asarray(reward).dtype.kind not in "fiub":
        raise EnvResultError(f"the reward of {where} is {describe(reward)}; expected a number")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if _shape(flag) != () or np.asarray(flag).dtype.kind not in "biu":
            raise EnvResultError(f"{name} of {where} is {describe(flag)}; expected a bool")
    _check_info(info, where)


def _check_observation(space: gym.Space[Any], observation: Any, what: str) -> None:
    if isinstance(space, gym.spaces.Dict):
        keys = set(observation) if isinstance(observation, dict) else None
        if keys is None or not keys.issuperset(space.spaces):
            raise EnvResultError(
                f"{what} is {describe(observation)}; its space has the keys {list(space.spaces)}"
            )
        for key, part in space.spaces.items():
            _check_observation(part, observation[key], f"{key!r} in {what}")
    elif isinstance(space, gym.spaces.Tuple):
        if not isinstance(observation, (tuple, list)) or len(observation) != len(space.spaces):
            raise EnvResultError(
                f"{what} is {describe(observation)}; its space has {len(space.spaces)} parts"
            )
        for index, (part, value) in enumerate(zip(space.spaces, observation, strict=True)):
            _check_observation(part, value, f"part {index} of {what}")
    elif isinstance(space, _ARRAYS) and _shape(observation) != space.shape:
        raise EnvResultError(
            f"{what} is {describe(observation)}; its space has the shape {space.shape}"
        )
    elif _would_change(observation, space.dtype):
        raise EnvResultError(
            f"{what} is {describe(observation)}; its space holds {space.dtype}, where its values "
            "would be others. Give the space the dtype that the environment returns"
        )


def _would_change(observation: Any, dtype: Any) -> bool:
    """Whether whole numbers would be made of fractions, or of numbers that are too large."""
    if dtype is None or np.dtype(dtype).kind not in "biu":
        return False
    array = np.asarray(observation)
    with np.errstate(invalid="ignore"):  # of NaN, which is no whole number either
        return not np.array_equal(array.astype(dtype), array)


def _check_info(info: Any, where: str) -> None:
    if not isinstance(info, dict):
        raise EnvResultError(f"the info of {where} is {describe(info)}; expected a map")


def _shape(value: Any) -> tuple[int, ...]:
    try:
        shape: tuple[int, ...] = np.shape(value)
    except ValueError:  # lists of several lengths
        return (-1,)
    return shape


def describe(value: Any) -> str:
    """Name what was found, short: its type with its shape, its parts or its beginning."""
    if isinstance(value, tuple):
        return f"{len(value)} values ({', '.join(type(item).__name__ for item in value)})"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of shape {value.shape}"
    text = repr(value)
    return f"{type(value).__name__} {text[:60]}{'...' if len(text) > 60 else ''}"
