"""The border between what a policy outputs and what an environment accepts.

Here, and nowhere else: Box actions are clipped to the bounds, the values of Discrete and
MultiDiscrete actions are shifted by the space's ``start`` (a policy always acts in ``0..n-1``),
floats that hold whole numbers become integers, and NaN is refused. The array that came in is never
changed, so what a buffer stores is what the policy sampled.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from plugrl_envs.errors import InvalidActionError
from plugrl_envs.spaces import check_action_space

__all__ = ["ActionBorder"]

Array = np.ndarray[Any, Any]

_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


class ActionBorder:
    """Checks and converts batches of actions.

    Args:
        space: the action space of one environment, as the environment has it.
        num_envs: rows in a batch.

    Attributes:
        policy_space: the action space of one environment as a policy sees it: `space`, with
            every ``start`` moved to 0.
    """

    def __init__(self, space: gym.Space[Any], num_envs: int) -> None:
        check_action_space(space)
        self._space = space
        self._shape: tuple[int, ...] = (num_envs, *(space.shape or ()))
        self.policy_space = _without_start(space)
        self._start: Any = getattr(space, "start", 0)
        self._shifted = bool(np.any(self._start))
        self._low: Any = getattr(space, "low", -np.inf)
        self._high: Any = getattr(space, "high", np.inf)
        self._count = _upper_bounds(space)
        self._continuous = isinstance(space, spaces.Box) and np.dtype(space.dtype).kind == "f"
        self._bounded = isinstance(space, spaces.Box) and bool(
            np.any(np.isfinite(self._low)) or np.any(np.isfinite(self._high))
        )

    def convert(self, actions: Any) -> Array:
        """Return `actions` as the environments accept them.

        Args:
            actions: ``[N, *A]`` array, tensor or nested list; for one environment also ``[*A]``.

        Returns:
            A new ``[N, *A]`` array of the space's dtype.

        Raises:
            InvalidActionError: the shape or dtype is wrong, a value is not finite, or a discrete
                value is out of range.
        """
        if hasattr(actions, "detach"):  # a torch tensor; torch itself is not needed here
            actions = actions.detach().cpu()
            if str(actions.dtype) == "torch.bfloat16":  # which numpy lacks; float32 holds them all
                actions = actions.float()
            actions = actions.numpy()
        array = np.asarray(actions)
        if array.shape != self._shape:
            if self._shape[0] != 1 or array.shape != self._shape[1:]:
                raise InvalidActionError(
                    f"the policy's action has shape {array.shape}; expected "
                    f"{self._expected_shapes()}, because the action space of one environment is "
                    f"{self.policy_space}"
                )
            array = array[None]
        return self._to_box(array) if self._count is None else self._to_integers(array)

    def _expected_shapes(self) -> str:
        if self._shape[0] == 1:
            return f"{self._shape} or {self._shape[1:]}"
        return str(self._shape)

    def _to_box(self, array: Array) -> Array:
        dtype = np.dtype(self._space.dtype)
        if array.dtype.kind not in "fiub":
            raise self._wrong_dtype(array, "numbers")
        if array.dtype.kind == "f" and np.count_nonzero(np.isfinite(array)) < array.size:
            row = int(np.flatnonzero(~np.isfinite(array).reshape(len(array), -1).all(1))[0])
            raise InvalidActionError(
                f"the policy's action for environment {row} is not finite: {array[row]}; "
                "look for NaN in the policy's weights or observations"
            )
        if self._bounded:
            # Clipping in the wider type keeps a float64 action from rounding past a bound.
            # Two ufuncs take a third of the time of np.clip.
            array = np.minimum(np.maximum(array, self._low), self._high)
        if not self._continuous and array.dtype.kind == "f":
            array = np.rint(array)
        return array.astype(dtype)

    def _to_integers(self, array: Array) -> Array:
        if array.dtype.kind == "f":
            whole = array.astype(np.int64, casting="unsafe") if np.isfinite(array).all() else None
            if whole is None or not np.array_equal(whole, array):
                raise self._wrong_dtype(array, "whole numbers")
            array = whole
        elif array.dtype.kind not in "iub":
            raise self._wrong_dtype(array, "integers")
        # Seen as unsigned, a negative number is a very large one: one comparison finds both.
        if np.count_nonzero(array.view(_UNSIGNED[array.dtype.itemsize]) >= self._count):
            raise InvalidActionError(
                f"the policy's action {array.tolist()} is out of range for {self.policy_space}; "
                "values start at 0 whatever the environment's own numbering"
            )
        array = array.astype(np.dtype(self._space.dtype))
        return array + self._start if self._shifted else array

    def _wrong_dtype(self, array: Array, expected: str) -> InvalidActionError:
        return InvalidActionError(
            f"the policy's action has dtype {array.dtype} and shape {array.shape} with values like "
            f"{array.reshape(-1)[:4].tolist()}; expected {expected} for {self.policy_space}"
        )


def _without_start(space: gym.Space[Any]) -> gym.Space[Any]:
    if isinstance(space, spaces.Discrete) and space.start != 0:
        return spaces.Discrete(int(space.n))
    if isinstance(space, spaces.MultiDiscrete) and np.any(space.start):
        return spaces.MultiDiscrete(space.nvec, dtype=space.dtype)
    return space


def _upper_bounds(space: gym.Space[Any]) -> Any:
    """Return the exclusive upper bound of integer actions, or None for Box."""
    if isinstance(space, spaces.Discrete):
        return int(space.n)
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec
    if isinstance(space, spaces.MultiBinary):
        return 2
    return None
