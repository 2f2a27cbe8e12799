"""Turn observations of any supported Gymnasium space into one feature vector per row.

``make_encoder`` walks the space once, at construction; at run time each encoder only computes.
Composite spaces are concatenated in the space's own order. Observations arrive batched: a tensor
[B, *shape] for a plain space, a mapping for ``Dict`` (a TensorDict too), a sequence for ``Tuple``
(or a mapping with the positions as string keys, the form in which buffers keep it).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn import functional

from rlightning.errors import ConfigError
from rlightning.models.vision import (
    IMPALACNN,
    ImageFormat,
    ImageNetwork,
    NatureCNN,
    PixelRange,
    ResNet,
)

__all__ = ["Encoder", "ImageOptions", "image_layout", "is_image", "make_encoder", "tuple_item"]

_log = logging.getLogger(__name__)

_NETWORKS: dict[str, type[ImageNetwork]] = {
    "nature": NatureCNN,
    "impala": IMPALACNN,
    "resnet": ResNet,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageOptions:
    """How image observations are encoded."""

    encoder: Literal["nature", "impala", "resnet", "flatten"] = "nature"
    """The network; ``flatten`` treats images as plain vectors."""
    layout: ImageFormat | None = None
    """Where the channels are. None: the shorter outer axis, said in the log; told apart or refused.
    Stating it also makes a three-dimensional float Box an image."""
    size: tuple[int, int] = (84, 84)
    """(height, width) that images are resized to."""
    features: int = 256
    """Width of the encoding."""
    random_shift: int = 0
    """Pixels by which images are shifted at random in training mode, up to that many."""


class Encoder(nn.Module):
    """Base of all encoders.

    Attributes:
        out_features: width F of the encoding [B, F].
    """

    out_features: int


def make_encoder(space: spaces.Space[Any], images: ImageOptions | None = None) -> Encoder:
    """Build the encoder of an observation space.

    Args:
        space: Box, Discrete, MultiDiscrete, MultiBinary, or Dict and Tuple of them, nested freely.
        images: how image-like boxes are encoded.

    Returns:
        A module from observations to float32 [B, out_features].

    Raises:
        ConfigError: the space (or one inside) is of another kind, or an image's layout is unclear.
    """
    images = images or ImageOptions()
    if isinstance(space, spaces.Dict):
        parts = {key: make_encoder(inner, images) for key, inner in space.spaces.items()}
        return _DictEncoder(parts)
    if isinstance(space, spaces.Tuple):
        return _TupleEncoder([make_encoder(inner, images) for inner in space.spaces])
    if isinstance(space, spaces.Box):
        return _ImageEncoder(space, images) if is_image(space, images) else _FlatEncoder(space)
    if isinstance(space, spaces.Discrete):
        return _OneHotEncoder([int(space.n)], [int(space.start)])
    if isinstance(space, spaces.MultiDiscrete):
        start = np.asarray(space.start).ravel().tolist()
        return _OneHotEncoder(space.nvec.ravel().tolist(), start)
    if isinstance(space, spaces.MultiBinary):
        return _FlatEncoder(space)
    raise ConfigError(
        f"observation space {space} is not supported by the built-in networks, which take Box, "
        "Discrete, MultiDiscrete, MultiBinary, and Dict or Tuple of them; convert it in the "
        "environment or write a policy with its own encoder"
    )


def is_image(space: spaces.Space[Any], images: ImageOptions) -> bool:
    """Return whether a space is encoded by a CNN: 2-D or 3-D bytes, or 3-D with a stated layout."""
    if not isinstance(space, spaces.Box) or images.encoder == "flatten":
        return False
    if space.dtype == np.uint8:
        return len(space.shape) in (2, 3)
    return len(space.shape) == 3 and images.layout is not None


def image_layout(shape: Sequence[int], stated: ImageFormat | None = None) -> ImageFormat:
    """Decide where the channels of a three-dimensional image are.

    Args:
        shape: of one image.
        stated: what the configuration says, taken at its word.

    Returns:
        The layout; if not stated, the channel axis is the outer one shorter than both others.

    Raises:
        ConfigError: neither or both outer axes look like channels.
    """
    if stated is not None:
        return stated
    first, middle, last = shape
    if last < min(first, middle) or first < min(middle, last):
        layout: ImageFormat = "HWC" if last < first else "CHW"
        _log.info("images of shape %s are read as %s; image_layout states it", shape, layout)
        return layout
    raise ConfigError(
        f"the channel axis of images of shape {tuple(shape)} is not clear; "
        "set image_layout: HWC or image_layout: CHW in model_cfg"
    )


def tuple_item(observation: Any, position: int) -> Any:
    """Return one part of a ``Tuple`` observation in either of its forms, sequence or mapping."""
    if isinstance(observation, Sequence):
        return observation[position]
    return observation[str(position)]


class _FlatEncoder(Encoder):
    """Numbers as they are."""

    def __init__(self, space: spaces.Box | spaces.MultiBinary) -> None:
        super().__init__()
        self.out_features = int(np.prod(space.shape, dtype=int))

    def forward(self, observation: Tensor) -> Tensor:
        """[B, *shape] of any dtype to float32 [B, F]."""
        return observation.reshape(len(observation), self.out_features).to(torch.float32)


class _OneHotEncoder(Encoder):
    """One block of zeros and a one per discrete variable."""

    start: Tensor

    def __init__(self, sizes: Sequence[int], start: Sequence[int]) -> None:
        super().__init__()
        self.sizes = list(sizes)
        self.out_features = sum(self.sizes)
        self.register_buffer("start", torch.tensor(list(start)), persistent=False)

    def forward(self, observation: Tensor) -> Tensor:
        """Integers [B] or [B, *shape] to float32 [B, F]."""
        index = observation.reshape(len(observation), -1).long() - self.start
        blocks = [functional.one_hot(index[:, i], n) for i, n in enumerate(self.sizes)]
        return torch.cat(blocks, -1).to(torch.float32)


class _ImageEncoder(Encoder):
    """A CNN."""

    def __init__(self, space: spaces.Box, images: ImageOptions) -> None:
        super().__init__()
        self.add_channel = len(space.shape) == 2
        layout: ImageFormat = "CHW"
        channels = 1
        if not self.add_channel:
            layout = image_layout(space.shape, images.layout)
            channels = space.shape[0 if layout == "CHW" else -1]
        self.network = _NETWORKS[images.encoder](
            images.size,
            channels,
            layout,
            out_feature_dim=images.features,
            pixel_range=_pixel_range(space),
            random_shift=images.random_shift,
        )
        self.out_features = images.features

    def forward(self, observation: Tensor) -> Tensor:
        """[B, H, W], [B, H, W, C] or [B, C, H, W] to float32 [B, F]."""
        features: Tensor = self.network(
            observation.unsqueeze(1) if self.add_channel else observation
        )
        return features


def _pixel_range(space: spaces.Box) -> PixelRange:
    """Read the scale from the space, so that no image has to be guessed from its content."""
    return "byte" if space.dtype == np.uint8 or float(space.high.max()) > 1.0 else "unit"


class _DictEncoder(Encoder):
    def __init__(self, parts: Mapping[str, Encoder]) -> None:
        super().__init__()
        # Keys may hold dots or clash with module attributes, so modules are numbered.
        self.keys = list(parts)
        self.parts = nn.ModuleList(parts.values())
        self.out_features = sum(part.out_features for part in parts.values())

    def forward(self, observation: Mapping[str, Any]) -> Tensor:
        """A mapping of batches to float32 [B, F]."""
        pairs = zip(self.keys, self.parts, strict=True)
        return torch.cat([part(observation[key]) for key, part in pairs], -1)


class _TupleEncoder(Encoder):
    def __init__(self, parts: Sequence[Encoder]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.out_features = sum(part.out_features for part in parts)

    def forward(self, observation: Any) -> Tensor:
        """A sequence of batches, or a mapping by position, to float32 [B, F]."""
        parts = enumerate(self.parts)
        return torch.cat([part(tuple_item(observation, i)) for i, part in parts], -1)
