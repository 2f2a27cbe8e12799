"""`Episode`: one recorded episode; `Dataset`: many of them, read when they are asked for."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rlightning.errors import ContractError

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Collection, Iterator

__all__ = ["Dataset", "Episode", "Field", "leaves", "map_tree"]


class Field(NamedTuple):
    """Shape of one step's entry, and its dtype."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclasses.dataclass
class Episode:
    """T steps, in order.

    Args:
        observations: arrays ``[T + 1, ...]``, nested in dictionaries (and tuples) where the
            observation is: what each action was chosen from, and what followed the last. Formats
            that do not keep the latter have ``[T, ...]``.
        actions: ``[T, ...]``, as they were executed.
        rewards: ``[T]``.
        terminated: ``[T]`` bool, whether the task ended with the step; only the last may.
        truncated: ``[T]`` bool, whether the recording or a time limit ended there.

    Raises:
        ContractError: lengths do not match, there is no step, or the episode goes on after its end.
    """

    observations: Any
    actions: np.ndarray[Any, Any]
    rewards: np.ndarray[Any, Any]
    terminated: np.ndarray[Any, Any]
    truncated: np.ndarray[Any, Any]

    def __post_init__(self) -> None:
        steps = len(self.actions)
        if steps == 0:
            raise ContractError("an episode has no step; leave empty episodes out")
        self.rewards = np.asarray(self.rewards, np.float32)
        self.terminated = np.asarray(self.terminated, bool)
        self.truncated = np.asarray(self.truncated, bool)
        for name in ("rewards", "terminated", "truncated"):
            found = getattr(self, name).shape
            if found != (steps,):
                raise ContractError(
                    f"an episode has {steps} actions and {name} of shape {found}; expected "
                    f"({steps},)"
                )
        for path, leaf in leaves(self.observations):
            if len(leaf) not in (steps, steps + 1):
                raise ContractError(
                    f"an episode has {steps} actions and {len(leaf)} observations"
                    f"{_named(path)}; expected {steps + 1}, the one after the last action included,"
                    f" or {steps} without it"
                )
        if (self.terminated | self.truncated)[:-1].any():
            at = int(np.flatnonzero((self.terminated | self.truncated)[:-1])[0])
            raise ContractError(
                f"an episode of {steps} steps ends at step {at} already; record what follows as an "
                "episode of its own"
            )

    def __len__(self) -> int:
        return len(self.actions)

    @property
    def knows_the_last_observation(self) -> bool:
        """Whether what followed the last action was recorded."""
        return all(len(leaf) == len(self) + 1 for _, leaf in leaves(self.observations))

    def transitions(self) -> dict[str, Any]:
        """Return ``observation, action, reward, terminated, truncated, next_observation``.

        As a `ReplayBuffer` takes them, ``[T, ...]`` each. A step whose next observation is not
        known is left out, unless the task ended with it: then nothing is bootstrapped from it. The
        last step is truncated where it did not terminate.
        """
        known = self.knows_the_last_observation
        steps = len(self) if known or self.terminated[-1] else len(self) - 1
        truncated = self.truncated[:steps].copy()
        if steps:
            truncated[-1] |= not self.terminated[steps - 1]
        last = steps if known or steps < len(self) else steps - 1
        after = np.minimum(np.arange(1, steps + 1), last)
        return {
            "observation": map_tree(lambda leaf: leaf[:steps], self.observations),
            "action": self.actions[:steps],
            "reward": self.rewards[:steps],
            "terminated": self.terminated[:steps],
            "truncated": truncated,
            "next_observation": map_tree(lambda leaf: leaf[after], self.observations),
        }


class Dataset(ABC):
    """Episodes on disk.

    Attributes:
        path: the folder.
        n_episodes: how many.
        n_steps: in all of them.
        observation_fields: by path; ``()`` where the observation is one array.
        action_field: of one action.
    """

    path: pathlib.Path
    n_episodes: int
    n_steps: int
    observation_fields: dict[tuple[str, ...], Field]
    action_field: Field

    def __len__(self) -> int:
        return self.n_episodes

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({str(self.path)!r}: {self.n_episodes} episodes, "
            f"{self.n_steps} steps)"
        )

    @abstractmethod
    def __iter__(self) -> Iterator[Episode]:
        """Read one episode after the other."""

    def reading(self, paths: Collection[tuple[str, ...]]) -> Iterator[Episode]:
        """Read one episode after the other; of the observations at least those at `paths`."""
        del paths
        return iter(self)


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the arrays of a nested observation with their paths, tuple entries by position."""
    if isinstance(tree, dict):
        items = [(str(key), value) for key, value in tree.items()]
    elif isinstance(tree, tuple):
        items = [(str(index), value) for index, value in enumerate(tree)]
    else:
        yield path, tree
        return
    for key, value in items:
        yield from leaves(value, (*path, key))


def map_tree(function: Any, tree: Any) -> Any:
    """Apply a function to every array of a nested observation."""
    if isinstance(tree, dict):
        return {key: map_tree(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map_tree(function, value) for value in tree)
    return function(tree)


def _named(path: tuple[str, ...]) -> str:
    return f" of {'.'.join(path)!r}" if path else ""
