"""`ObservationForm`: what environments that live elsewhere show, and how policies see it.

Over a wire an observation is named images and named state vectors. A policy gets the array itself
where there is only one, else a dictionary of all of them by name. Knows nothing about connections.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from gymnasium import spaces

from rlightning.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import gymnasium as gym

__all__ = ["Maps", "ObservationForm", "ObservationWriter"]

Array: TypeAlias = "np.ndarray[Any, Any]"
Maps: TypeAlias = "Mapping[str, Any]"
"""``{"images": {name: uint8 [n, h, w, c]}, "states": {name: float [n, d]}, "text": [n]}``"""

_CHANNELS = (1, 3, 4)


@dataclasses.dataclass(frozen=True)
class ObservationForm:
    """Names and shapes of one environment's images and states.

    Args:
        images: name to ``(height, width, channels)``.
        states: name to the vector's length.

    Raises:
        ConfigError: there is neither an image nor a state, or a name is of both kinds.
    """

    images: Mapping[str, tuple[int, int, int]]
    states: Mapping[str, int]

    def __post_init__(self) -> None:
        if not self.images and not self.states:
            raise ConfigError("an observation needs an image or a state; found neither")
        twice = self.images.keys() & self.states.keys()
        if twice:
            raise ConfigError(f"{sorted(twice)} are images and states; give them different names")

    @classmethod
    def of(cls, maps: Maps) -> ObservationForm:
        """Return the form of a batch."""
        images, states = maps["images"], maps["states"]
        return cls(
            {name: tuple(images[name].shape[1:]) for name in sorted(images)},
            {name: int(states[name].shape[1]) for name in sorted(states)},
        )

    @classmethod
    def of_space(cls, space: gym.Space[Any]) -> ObservationForm:
        """Return the form in which an environment client shows observations of `space`.

        uint8 boxes of two or three dimensions are images with their channels last; everything else
        is a vector by the rule of Gymnasium's ``flatten``. A space without parts is called
        ``image`` or ``obs``, parts by their keys and positions, joined by dots.
        """
        images: dict[str, tuple[int, int, int]] = {}
        states: dict[str, int] = {}
        for name, _, part in _paths(space, "", ()):
            if _is_image(part):
                images[name or "image"] = _channels_last(part.shape or ())
            else:
                states[name or "obs"] = int(spaces.flatdim(part))
        return cls(dict(sorted(images.items())), dict(sorted(states.items())))

    @property
    def space(self) -> gym.Space[Any]:
        """The observation space of one environment, as its policy sees it."""
        boxes: dict[str, spaces.Space[Any]] = {
            name: spaces.Box(0, 255, shape, np.uint8) for name, shape in self.images.items()
        }
        for name, width in self.states.items():
            boxes[name] = spaces.Box(-np.inf, np.inf, (width,), np.float32)
        return next(iter(boxes.values())) if len(boxes) == 1 else spaces.Dict(boxes)

    def read(self, maps: Maps) -> Any:
        """Return a batch as a policy sees it: images as they are, states as float32."""
        named = {name: maps["images"][name] for name in self.images}
        for name in self.states:
            named[name] = np.asarray(maps["states"][name], np.float32)
        if len(named) == 1:
            return next(iter(named.values()))
        return {name: named[name] for name in sorted(named)}

    def fits(self, maps: Maps) -> bool:
        """Return whether a batch has these names and shapes."""
        images, states = maps["images"], maps["states"]
        return (
            images.keys() == self.images.keys()
            and states.keys() == self.states.keys()
            and all(images[name].shape[1:] == shape for name, shape in self.images.items())
            and all(states[name].shape[1:] == (width,) for name, width in self.states.items())
        )

    def zeros(self, rows: int) -> Any:
        """Return a batch of zeros as a policy would see it."""
        return self.read(
            {
                "images": {k: np.zeros((rows, *v), np.uint8) for k, v in self.images.items()},
                "states": {k: np.zeros((rows, v), np.float32) for k, v in self.states.items()},
            }
        )

    def __str__(self) -> str:
        parts = [f"{name}:{'x'.join(map(str, shape))}" for name, shape in self.images.items()]
        parts += [f"{name}:{width}" for name, width in self.states.items()]
        return ",".join(parts)


def _paths(
    space: gym.Space[Any], name: str, path: tuple[Any, ...]
) -> Iterator[tuple[str, tuple[Any, ...], gym.Space[Any]]]:
    """Yield the name of every part, the keys that lead to it, and its space."""
    items: Any = None
    if isinstance(space, spaces.Dict):
        items = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        items = enumerate(space.spaces)
    if items is None:
        yield name, path, space
        return
    for key, part in items:
        yield from _paths(part, f"{name}.{key}" if name else str(key), (*path, key))


def _is_image(space: gym.Space[Any]) -> bool:
    is_bytes = isinstance(space, spaces.Box) and space.dtype == np.uint8
    return is_bytes and len(space.shape or ()) in (2, 3)


def _channels_last(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) == 2:
        return (*shape, 1)
    first, middle, last = shape
    if last not in _CHANNELS and first in _CHANNELS:
        return (middle, last, first)
    return (first, middle, last)


class ObservationWriter:
    """Turns batches of a space into named images and states, as `ObservationForm.of_space` says.

    Args:
        space: the observation space of one environment.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self._leaves = [(name, path, part) for name, path, part in _paths(space, "", ())]

    def __call__(self, batch: Any) -> dict[str, dict[str, Array]]:
        """Return ``{"images": ..., "states": ...}`` of a batch ``[n, ...]``."""
        images: dict[str, Array] = {}
        states: dict[str, Array] = {}
        for name, path, part in self._leaves:
            value = batch
            for key in path:
                value = value[key]
            if _is_image(part):
                images[name or "image"] = _image(np.asarray(value))
            else:
                states[name or "obs"] = _vector(np.asarray(value), part)
        return {"images": images, "states": states}


def _image(batch: Array) -> Array:
    if batch.ndim == 3:
        return batch[..., None]
    if _channels_last(batch.shape[1:]) != batch.shape[1:]:
        return np.ascontiguousarray(np.moveaxis(batch, 1, -1))
    return batch


def _vector(batch: Array, space: gym.Space[Any]) -> Array:
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete)):
        counts = np.ravel(space.n if isinstance(space, spaces.Discrete) else space.nvec)
        flat = batch.reshape(len(batch), -1) - np.ravel(space.start)
        columns = np.concatenate([[0], np.cumsum(counts)[:-1]]) + flat
        vector = np.zeros((len(batch), int(counts.sum())), np.float32)
        np.put_along_axis(vector, columns.astype(np.int64), 1.0, axis=1)
        return vector
    return batch.reshape(len(batch), -1).astype(np.float32)
