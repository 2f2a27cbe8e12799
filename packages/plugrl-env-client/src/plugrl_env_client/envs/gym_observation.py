"""Turn batches of Gymnasium observations into images and state vectors.

Images are uint8 boxes of two or three dimensions; everything else becomes float32 vectors by the
rule of Gymnasium's ``flatten``: boxes are raveled, discrete values are one-hot.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from gymnasium import spaces

from plugrl_env_client.envs.base_env import Observation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import gymnasium as gym
    import numpy.typing as npt

__all__ = ["ImageLayout", "ObservationMapper"]

ImageLayout: TypeAlias = Literal["auto", "hwc", "chw"]

_CHANNELS = (1, 3, 4)
_log = logging.getLogger(__name__)


class ObservationMapper:
    """Maps batches of one space.

    A plain space is named ``image`` or ``obs``; the parts of Dict and Tuple spaces are named by
    their keys and positions, joined by dots.

    Args:
        space: what one row observes.
        image_layout: where the channels of images stand. ``"auto"`` takes the last axis if it has
            1, 3 or 4 entries, or else the first.
    """

    def __init__(self, space: gym.Space[Any], *, image_layout: ImageLayout = "auto") -> None:
        self._leaves = [
            _Leaf(name, path, part, image_layout) for name, path, part in _leaves(space, "", ())
        ]

    def __call__(self, batch: Any) -> Observation:
        """Map one batch; the arrays that need no conversion are shared with it."""
        images: dict[str, npt.NDArray[Any]] = {}
        states: dict[str, npt.NDArray[Any]] = {}
        for leaf in self._leaves:
            value = batch
            for key in leaf.path:
                value = value[key]
            (images if leaf.is_image else states)[leaf.name] = leaf.convert(np.asarray(value))
        return Observation(images, states)


def _leaves(
    space: gym.Space[Any], name: str, path: tuple[Any, ...]
) -> Iterator[tuple[str, tuple[Any, ...], gym.Space[Any]]]:
    parts: Any = None
    if isinstance(space, spaces.Dict):
        parts = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
    if parts is None:
        yield name, path, space
        return
    for key, part in parts:
        yield from _leaves(part, f"{name}.{key}" if name else str(key), (*path, key))


class _Leaf:
    """One part of a space: its name, where it is found, and how it is converted."""

    def __init__(
        self, name: str, path: tuple[Any, ...], space: gym.Space[Any], layout: ImageLayout
    ) -> None:
        self.path = path
        self.is_image = (
            isinstance(space, spaces.Box) and space.dtype == np.uint8 and len(space.shape) in (2, 3)
        )
        self.name = name or ("image" if self.is_image else "obs")
        self.convert: Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
        if self.is_image:
            self.convert = _image_converter(self.name, space.shape or (), layout)
        elif isinstance(space, spaces.Discrete):
            self.convert = _one_hot(np.array([space.n]), np.array([space.start]))
        elif isinstance(space, spaces.MultiDiscrete):
            self.convert = _one_hot(space.nvec.ravel(), np.ravel(space.start))
        else:
            self.convert = _to_vector


def _image_converter(
    name: str, shape: tuple[int, ...], layout: ImageLayout
) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    if len(shape) == 2:
        return lambda batch: batch[..., None]
    if layout == "auto":
        channels_first = shape[-1] not in _CHANNELS and shape[0] in _CHANNELS
        layout = "chw" if channels_first else "hwc"
        if channels_first:
            _log.info(
                "image %r of shape %s is taken as channels first (--env.image-layout)",
                name,
                shape,
            )
    if layout == "chw":
        return lambda batch: np.ascontiguousarray(np.moveaxis(batch, 1, -1))
    return lambda batch: batch


def _to_vector(batch: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    return batch.reshape(len(batch), -1).astype(np.float32)


def _one_hot(
    counts: npt.NDArray[Any], starts: npt.NDArray[Any]
) -> Callable[[npt.NDArray[Any]], npt.NDArray[Any]]:
    offsets = np.concatenate([[0], np.cumsum(counts)[:-1]]) - starts
    width = int(counts.sum())

    def convert(batch: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        vector = np.zeros((len(batch), width), np.float32)
        columns = batch.reshape(len(batch), -1) + offsets
        np.put_along_axis(vector, columns, 1.0, axis=1)
        return vector

    return convert
