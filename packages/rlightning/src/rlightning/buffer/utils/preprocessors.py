"""Preprocessors: what turns an observation into the array that the buffer keeps.

A preprocessor is any callable from an observation to an array; the classes here are made from a
space and do the usual ones. Knows nothing about buffers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rlightning.errors import ContractError

__all__ = [
    "BoxFlattenPreprocessor",
    "DiscretePreprocessor",
    "NonPreprocessor",
    "Preprocessor",
    "default_obs_preprocessor",
    "default_reward_preprocessor",
    "get_preprocessor_cls",
]


def default_obs_preprocessor(observation: Any) -> Any:
    """Return `observation` as it is."""
    return observation


def default_reward_preprocessor(reward: Any) -> Any:
    """Return `reward` as it is."""
    return reward


class Preprocessor(ABC):
    """Turns observations of one space into arrays.

    Calling it tells one observation from a batch by the number of axes.

    Args:
        space: the space of ONE environment's observation.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self.space = space

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...] | None:
        """Shape of one transformed observation; None where it has none (a Dict)."""

    @abstractmethod
    def transform(self, observation: Any) -> Any:
        """Return one transformed observation."""

    @abstractmethod
    def batch_transform(self, observations: Any) -> Any:
        """Return a transformed batch; `observations` have a leading row axis."""

    def __call__(self, observation: Any) -> Any:
        """Return `observation`, one or a batch, transformed.

        Raises:
            ContractError: it is not an array, tensor, number, tuple or dictionary.
        """
        if isinstance(observation, (int, np.integer)):
            observation = np.asarray(observation)
        if not isinstance(observation, (np.ndarray, torch.Tensor, dict, tuple)):
            raise ContractError(
                f"{type(self).__name__} got a {type(observation).__name__}; expected an array, a "
                "tensor or a dictionary of them"
            )
        single = getattr(self.space, "shape", None)
        ndim = getattr(observation, "ndim", None)
        if single is not None and ndim is not None and ndim > len(single):
            return self.batch_transform(observation)
        return self.transform(observation)


class NonPreprocessor(Preprocessor):
    """Leaves observations as they are."""

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The space's own shape."""
        return self.space.shape

    def transform(self, observation: Any) -> Any:
        """Return `observation`."""
        return observation

    def batch_transform(self, observations: Any) -> Any:
        """Return `observations`."""
        return observations


class BoxFlattenPreprocessor(Preprocessor):
    """Flattens a Box to one axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        """One axis with all entries."""
        return (int(np.prod(self.space.shape or ())),)

    def transform(self, observation: Any) -> Any:
        """Return ``[size]``."""
        return observation.reshape(-1)

    def batch_transform(self, observations: Any) -> Any:
        """Return ``[rows, size]``."""
        return observations.reshape(len(observations), -1)


class DiscretePreprocessor(Preprocessor):
    """Turns a Discrete observation into a one-hot float32 vector; the space's start is index 0."""

    space: gym.spaces.Discrete

    @property
    def shape(self) -> tuple[int, ...]:
        """One entry per value."""
        return (int(self.space.n),)

    def transform(self, observation: Any) -> Any:
        """Return ``[n]``."""
        return self._one_hot(observation)

    def batch_transform(self, observations: Any) -> Any:
        """Return ``[rows, n]``."""
        return self._one_hot(observations)

    def _one_hot(self, values: Any) -> Any:
        if isinstance(values, torch.Tensor):
            shifted = values.long() - int(self.space.start)
            return torch.nn.functional.one_hot(shifted, int(self.space.n)).float()
        index = np.asarray(values, dtype=np.int64) - int(self.space.start)
        if ((index < 0) | (index >= self.space.n)).any():
            raise ContractError(f"{values} is not in {self.space}")
        return np.eye(int(self.space.n), dtype=np.float32)[index]


def get_preprocessor_cls(space: gym.Space[Any]) -> type[Preprocessor]:
    """Return the usual preprocessor of a space: flatten a Box, one-hot a Discrete, leave others."""
    if isinstance(space, gym.spaces.Box):
        return BoxFlattenPreprocessor
    if isinstance(space, gym.spaces.Discrete):
        return DiscretePreprocessor
    return NonPreprocessor
