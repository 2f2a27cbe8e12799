"""`Fit`: does a dataset belong to an environment, and its episodes in the environment's form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from rlightning.datasets.episode import Episode, Field, leaves
from rlightning.errors import ConfigError, ContractError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlightning.datasets.episode import Dataset

__all__ = ["Fit", "space_fields"]

_Path = tuple[str, ...]


def space_fields(space: spaces.Space[Any], path: _Path = ()) -> Iterator[tuple[_Path, Field]]:
    """Yield the arrays that a space's samples consist of.

    Raises:
        ConfigError: a part is neither Box, Discrete, MultiDiscrete nor MultiBinary.
    """
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from space_fields(part, (*path, key))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from space_fields(part, (*path, str(index)))
    elif isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        yield path, Field(tuple(space.shape or ()), np.dtype(space.dtype))
    else:
        raise ConfigError(f"datasets hold arrays; the space {space} is none")


class Fit:
    """A dataset seen with an environment's eyes.

    Observations are matched by name (``observation.state`` of a LeRobot dataset is ``state``, and
    ``observation.images.top`` also ``top``); the only one of a dataset also fits an environment
    whose observation has no name. What the environment does not have is left out.

    Args:
        dataset: the episodes.
        observation_space: of one environment.
        action_space: of one environment.

    Raises:
        ConfigError: an observation is missing or has another shape, or actions have another shape
            or kind; both sides are named.
    """

    def __init__(
        self,
        dataset: Dataset,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
    ) -> None:
        self.dataset = dataset
        self._observation_space, self._action_space = observation_space, action_space
        self._wanted = dict(space_fields(observation_space))
        self._source = self._match()
        self._check_actions()

    def __iter__(self) -> Iterator[Episode]:
        for number, episode in enumerate(self.dataset.reading(set(self._source.values()))):
            found = dict(leaves(episode.observations))
            arrays = {
                path: np.asarray(found[self._source[path]]).astype(field.dtype, copy=False)
                for path, field in self._wanted.items()
            }
            yield Episode(
                _nested(self._observation_space, arrays),
                self._actions(episode.actions, number),
                episode.rewards,
                episode.terminated,
                episode.truncated,
            )

    def _match(self) -> dict[_Path, _Path]:
        have, wanted = self.dataset.observation_fields, self._wanted
        source = {path: _camera(path, have) for path in wanted}
        if len(have) == len(wanted) == 1 and (() in have or () in wanted):
            source = dict(zip(wanted, have, strict=True))
        wrong = [
            f"{'.'.join(path) or 'the observation'} ({field})"
            for path, field in wanted.items()
            if source[path] not in have
            or have[source[path]].shape != field.shape
            or not np.can_cast(have[source[path]].dtype, field.dtype, "same_kind")
        ]
        if wrong:
            listed = ", ".join(f"{'.'.join(path)} ({f})".lstrip() for path, f in have.items())
            raise ConfigError(
                f"the environment observes {self._observation_space}; the dataset "
                f"{self.dataset.path} has nothing to fit {', '.join(wrong)}: its observations "
                f"are {listed or 'none that are numbers'}{_videos(self.dataset)}"
            )
        return source

    def _check_actions(self) -> None:
        have = self.dataset.action_field
        wanted = dict(space_fields(self._action_space)).get(())
        if wanted is None:
            raise ConfigError(f"actions of several parts, {self._action_space}, fit no dataset")
        whole = isinstance(self._action_space, spaces.Discrete) and have.shape == (1,)
        fits = have.shape == wanted.shape or whole
        if not fits or not np.can_cast(have.dtype, wanted.dtype, "same_kind"):
            raise ConfigError(
                f"the environment takes actions {self._action_space} ({wanted}); the dataset "
                f"{self.dataset.path} has actions {have}"
            )

    def _actions(self, actions: np.ndarray[Any, Any], number: int) -> np.ndarray[Any, Any]:
        space = self._action_space
        if isinstance(space, spaces.Discrete):
            actions = np.asarray(actions).reshape(len(actions))
            low, high = int(space.start), int(space.start + space.n - 1)
            if actions.min() < low or actions.max() > high:
                raise ContractError(
                    f"episode {number} of {self.dataset.path} has actions from {actions.min()} to "
                    f"{actions.max()}; the environment takes {low} to {high}"
                )
        return np.asarray(actions).astype(space.dtype, copy=False)


def _camera(path: _Path, have: dict[_Path, Field]) -> _Path:
    """Return where a dataset keeps an observation; cameras may be together in ``images``."""
    among_images = ("images", *path)
    return among_images if path not in have and among_images in have else path


def _videos(dataset: Dataset) -> str:
    left_out = getattr(dataset, "left_out", [])
    if not left_out:
        return ""
    return (
        f"; {', '.join(left_out)} are videos, which are not read: record or convert the dataset "
        "with pictures instead (LeRobot: use_videos=False)"
    )


def _nested(space: spaces.Space[Any], arrays: dict[_Path, Any], path: _Path = ()) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _nested(part, arrays, (*path, key)) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return tuple(_nested(part, arrays, (*path, str(index))) for index, part in parts)
    return arrays[path]
