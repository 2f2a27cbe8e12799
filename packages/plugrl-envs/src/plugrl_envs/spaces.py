"""What spaces are supported, and batches in the layout of a space.

A batch of observations has the layout of its space: one array for a plain space, a dict of batches
for `Dict`, a tuple of batches for `Tuple`, each array with a leading ``[N]`` axis. Knows nothing
about environments.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import create_empty_array

from plugrl_envs.errors import UnsupportedSpaceError

__all__ = [
    "action_rows",
    "check_action_space",
    "check_observation_space",
    "copy_batch",
    "copy_rows",
    "empty_batch",
    "fill_batch",
    "leaves_of",
    "row_of",
    "write_row",
]

_PLAIN = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def check_observation_space(space: gym.Space[Any], *, where: str = "observation_space") -> None:
    """Refuse spaces that cannot be batched into arrays.

    Raises:
        UnsupportedSpaceError: `space`, or a part of it, is not Box, Discrete, MultiDiscrete,
            MultiBinary, Dict or Tuple; the part is named.
    """
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            check_observation_space(part, where=f"{where}[{key!r}]")
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            check_observation_space(part, where=f"{where}[{index}]")
    elif not isinstance(space, _PLAIN):
        raise UnsupportedSpaceError(
            f"{where} is {space}; supported are Box, Discrete, MultiDiscrete, MultiBinary, and "
            "Dict and Tuple of these. Wrap the environment so that it observes one of them."
        )


def check_action_space(space: gym.Space[Any]) -> None:
    """Refuse spaces that no policy can act in.

    Raises:
        UnsupportedSpaceError: `space` is not Box, Discrete, MultiDiscrete or MultiBinary.
    """
    if not isinstance(space, _PLAIN):
        raise UnsupportedSpaceError(
            f"action_space is {space}; supported are Box, Discrete, MultiDiscrete and MultiBinary. "
            "Wrap the environment so that it acts in one of them."
        )


def empty_batch(space: gym.Space[Any], num_envs: int) -> Any:
    """Return a batch of zeros for `num_envs` observations of `space`."""
    if type(space) in _PLAIN:  # what `create_empty_array` does, without its dispatch
        return np.zeros((num_envs, *(space.shape or ())), dtype=space.dtype)
    return create_empty_array(space, n=num_envs, fn=np.zeros)


def copy_rows(target: Any, source: Any, rows: np.ndarray[Any, Any]) -> None:
    """Copy ``source[rows]`` into ``target[rows]``; both are batches, `rows` a mask or indices."""
    if isinstance(target, dict):
        for key, part in target.items():
            copy_rows(part, source[key], rows)
    elif isinstance(target, tuple):
        for part, other in zip(target, source, strict=True):
            copy_rows(part, other, rows)
    else:
        target[rows] = source[rows]


def action_rows(space: gym.Space[Any], actions: Any) -> Any:
    """Return the actions ``[N, *A]`` of a batch, one to be given to each environment.

    A discrete action is Python's own integer, which environments check and compare fastest.
    """
    return np.asarray(actions).tolist() if isinstance(space, spaces.Discrete) else actions


def write_row(target: Any, row: int, observation: Any) -> None:
    """Write one `observation` into row `row` of the batch `target`."""
    if isinstance(target, dict):
        for key, part in target.items():
            write_row(part, row, observation[key])
    elif isinstance(target, tuple):
        for part, other in zip(target, observation, strict=True):
            write_row(part, row, other)
    else:
        target[row] = observation


def row_of(batch: Any, row: int) -> Any:
    """Return row `row` of a batch, without the leading axis; arrays are views."""
    if isinstance(batch, dict):
        return {key: row_of(part, row) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(row_of(part, row) for part in batch)
    return batch[row]


def copy_batch(batch: Any) -> Any:
    """Return a copy of a batch that shares no memory with it."""
    if isinstance(batch, dict):
        return {key: copy_batch(part) for key, part in batch.items()}
    if isinstance(batch, tuple):
        return tuple(copy_batch(part) for part in batch)
    return np.array(batch)


def leaves_of(batch: Any) -> list[Any]:
    """Return the arrays of a batch in the order of its layout."""
    if isinstance(batch, dict):
        return [leaf for part in batch.values() for leaf in leaves_of(part)]
    if isinstance(batch, tuple):
        return [leaf for part in batch for leaf in leaves_of(part)]
    return [batch]


def fill_batch(space: gym.Space[Any], num_envs: int, leaves: list[Any]) -> Any:
    """Return the batch of `space` whose `leaves_of` are copies of `leaves`.

    Raises:
        ValueError: the number or the shapes of the arrays do not fit.
    """
    batch = empty_batch(space, num_envs)
    for target, leaf in zip(leaves_of(batch), leaves, strict=True):
        if target.shape != leaf.shape:
            raise ValueError(f"an array of shape {leaf.shape} cannot stand for {target.shape}")
        target[...] = leaf
    return batch
