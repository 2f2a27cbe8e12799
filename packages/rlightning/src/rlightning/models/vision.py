"""Convolutional encoders, and the one place where pixels become numbers for a network.

Knows nothing about observation spaces; ``encoders`` chooses among these by a space.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlightning.models.mlp import HIDDEN_GAIN, linear
from rlightning.ops.augmentation import random_shift as shift_at_random

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

__all__ = [
    "IMPALACNN",
    "LEAST_NATURE_SIZE",
    "ImageFormat",
    "ImageInput",
    "ImageNetwork",
    "NatureCNN",
    "PixelRange",
    "ResNet",
]

ImageFormat = Literal["CHW", "HWC"]
PixelRange = Literal["auto", "byte", "unit"]

LEAST_NATURE_SIZE = 36
"""Pixels each way that `NatureCNN` needs."""

_IMAGENET_MEAN = (0.485, 0.456, 0.406)
_IMAGENET_STD = (0.229, 0.224, 0.225)
_BYTE_MAX = 255.0


def _channel_statistics(values: tuple[float, float, float], channels: int) -> Tensor:
    """Per-channel constants, [1, C, 1, 1]: stacked RGB frames repeat, other counts average."""
    row = list(values) * (channels // 3) if channels % 3 == 0 else [sum(values) / 3] * channels
    return torch.tensor(row).reshape(1, channels, 1, 1)


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int, padding: int) -> nn.Conv2d:
    layer = nn.Conv2d(in_channels, out_channels, kernel, stride, padding)
    nn.init.orthogonal_(layer.weight, HIDDEN_GAIN)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


class ImageInput(nn.Module):
    """Turn a batch of images into what a CNN expects: CHW, float32, scaled, resized, standardised.

    Scaling happens here, once, and depends on an image alone, never on the others in its batch:

    * unsigned bytes are always divided by 255;
    * other numbers, with ``pixel_range="auto"``: an image with any value above 1 is taken for one
      in 0..255 (a byte image that was cast, as ``obs.float()`` does) and divided by 255; one within
      [0, 1] is left alone. A cast byte image whose brightest pixel is at most 1 looks like the
      latter, and a float image that overshoots 1 (noise, contrast) like the former: say
      ``"byte"`` or ``"unit"`` where that can happen.
    * ``"byte"`` always divides, ``"unit"`` never divides anything but unsigned bytes.

    Args:
        in_channels: channels per image.
        image_format: "CHW" or "HWC".
        size: (height, width) to resize to, bicubic and antialiased; None keeps the size.
        pixel_range: see above.
        standardize: subtract ImageNet's mean and divide by its standard deviation per channel
            (their averages if the channels are not RGB frames).
        random_shift: in training mode, shift each image by up to that many pixels.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        in_channels: int,
        *,
        image_format: ImageFormat = "CHW",
        size: tuple[int, int] | None = None,
        pixel_range: PixelRange = "auto",
        standardize: bool = True,
        random_shift: int = 0,
    ) -> None:
        super().__init__()
        if image_format not in ("CHW", "HWC"):
            raise ValueError(f"image_format is {image_format!r}, expected 'CHW' or 'HWC'")
        if pixel_range not in ("auto", "byte", "unit"):
            raise ValueError(f"pixel_range is {pixel_range!r}, expected 'auto', 'byte' or 'unit'")
        self.in_channels, self.image_format = in_channels, image_format
        self.size = None if size is None else (int(size[0]), int(size[1]))
        self.pixel_range, self.standardize = pixel_range, standardize
        self.random_shift = random_shift
        # Constants, not state: they follow the module's device and stay out of checkpoints.
        mean = _channel_statistics(_IMAGENET_MEAN, in_channels)
        self.register_buffer("mean", mean, persistent=False)
        std = _channel_statistics(_IMAGENET_STD, in_channels)
        self.register_buffer("std", std, persistent=False)

    def forward(self, images: Tensor | np.ndarray[Any, Any]) -> Tensor:
        """Prepare images.

        Args:
            images: [B, C, H, W] or [B, H, W, C], as ``image_format`` says; any numeric dtype.

        Returns:
            float32, [B, C, height, width], on the module's device.

        Raises:
            ValueError: not four axes, or another number of channels.
        """
        tensor = torch.as_tensor(images).to(self.mean.device)
        if tensor.dim() != 4:
            raise ValueError(
                f"expected a batch of images with four axes, [B, {', '.join(self.image_format)}], "
                f"got shape {tuple(tensor.shape)}; add a batch axis to a single image"
            )
        if self.image_format == "HWC":
            tensor = tensor.permute(0, 3, 1, 2)
        if tensor.shape[1] != self.in_channels:
            raise ValueError(
                f"expected {self.in_channels} channels in format {self.image_format}, got "
                f"{tensor.shape[1]} in images of shape {tuple(torch.as_tensor(images).shape)}; "
                "check in_channels and image_format"
            )
        pixels = self._scale(tensor)
        if self.size is not None and pixels.shape[-2:] != self.size:
            pixels = functional.interpolate(
                pixels, self.size, mode="bicubic", align_corners=False, antialias=True
            )
        if self.training and self.random_shift:
            pixels = shift_at_random(pixels, self.random_shift)
        return (pixels - self.mean) / self.std if self.standardize else pixels

    def _scale(self, tensor: Tensor) -> Tensor:
        pixels = tensor.to(torch.float32)
        if tensor.dtype == torch.uint8 or self.pixel_range == "byte":
            return pixels / _BYTE_MAX
        if self.pixel_range == "unit":
            return pixels
        is_byte = pixels.amax(dim=(1, 2, 3), keepdim=True) > 1.0
        return torch.where(is_byte, pixels / _BYTE_MAX, pixels)


class ImageNetwork(nn.Module):
    """Base of the encoders: `ImageInput`, convolutions, one linear layer.

    Args:
        standard_input_size: (height, width) that images are resized to.
        in_channels: channels per image.
        image_format: "CHW" or "HWC".
        out_feature_dim: width of the encoding.
        pixel_range: how values are scaled, see ``ImageInput``.
        random_shift: in training mode, shift each resized image by up to that many pixels.

    Attributes:
        out_feature_dim: size of the encoding, 256 unless told otherwise.
    """

    def __init__(
        self,
        standard_input_size: tuple[int, int] = (84, 84),
        in_channels: int = 3,
        image_format: ImageFormat = "CHW",
        *,
        out_feature_dim: int = 256,
        pixel_range: PixelRange = "auto",
        random_shift: int = 0,
    ) -> None:
        super().__init__()
        height, width = standard_input_size
        self.input = ImageInput(
            in_channels,
            image_format=image_format,
            size=(height, width),
            pixel_range=pixel_range,
            random_shift=random_shift,
        )
        self.convolutions = self.make_convolutions(in_channels, (height, width))
        flat = _flat_size(self.convolutions, in_channels, (height, width))
        self.projection = nn.Sequential(linear(flat, out_feature_dim), nn.ReLU())
        self.out_feature_dim = out_feature_dim

    def make_convolutions(self, in_channels: int, size: tuple[int, int]) -> nn.Sequential:
        """Return what turns prepared images [B, C, height, width] into flat features [B, F]."""
        raise NotImplementedError

    def forward(self, images: Tensor | np.ndarray[Any, Any]) -> Tensor:
        """Encode images [B, C, H, W] or [B, H, W, C] into float32 [B, out_feature_dim].

        Raises:
            ValueError: not four axes, or another number of channels.
        """
        features: Tensor = self.projection(self.convolutions(self.input(images)))
        return features


class NatureCNN(ImageNetwork):
    """Encode images with the three-layer network of Mnih et al. 2015 (Nature 518).

    Images are resized to at least 36 pixels each way; otherwise as `ImageNetwork`.
    """

    def make_convolutions(self, in_channels: int, size: tuple[int, int]) -> nn.Sequential:
        """Return three strided convolutions.

        Raises:
            ValueError: `size` is too small for them.
        """
        least = LEAST_NATURE_SIZE
        if min(size) < least:
            raise ValueError(
                f"standard_input_size is {size}; three strided convolutions need at "
                f"least {least, least}. Smaller images are enlarged to it"
            )
        return nn.Sequential(
            _conv(in_channels, 32, 8, 4, 0),
            nn.ReLU(),
            _conv(32, 64, 4, 2, 0),
            nn.ReLU(),
            _conv(64, 64, 3, 1, 0),
            nn.ReLU(),
            nn.Flatten(),
        )


class _Residual(nn.Module):
    """Two 3x3 convolutions beside an identity."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = _conv(channels, channels, 3, 1, 1)
        self.second = _conv(channels, channels, 3, 1, 1)

    def forward(self, maps: Tensor) -> Tensor:
        """Keep the shape [B, C, H, W]."""
        inner = self.second(functional.relu(self.first(functional.relu(maps))))
        return maps + inner  # type: ignore[no-any-return]  # nn.Module calls are typed Any


class IMPALACNN(ImageNetwork):
    """Encode images with the residual network of Espeholt et al. 2018 (IMPALA, figure 3, right).

    Args:
        *args: as `ImageNetwork`; images of any size from 1 work.
        channels: width of each stage; every stage halves the resolution.
        **kwargs: as `ImageNetwork`.
    """

    def __init__(self, *args: Any, channels: Sequence[int] = (16, 32, 32), **kwargs: Any) -> None:
        self._channels = tuple(channels)
        super().__init__(*args, **kwargs)

    def make_convolutions(self, in_channels: int, size: tuple[int, int]) -> nn.Sequential:
        """Return stages of a convolution, a pool and two residual blocks."""
        layers: list[nn.Module] = []
        previous = in_channels
        for stage in self._channels:
            layers += [_conv(previous, stage, 3, 1, 1), nn.MaxPool2d(3, 2, 1)]
            layers += [_Residual(stage), _Residual(stage)]
            previous = stage
        return nn.Sequential(*layers, nn.ReLU(), nn.Flatten())


class _Basic(nn.Module):
    """Two normalised 3x3 convolutions beside an identity, or a 1x1 convolution where shapes change.

    Group normalisation does not depend on the batch, so that acting and learning see the same
    network. The second one starts at zero: at first a block passes its input on.
    """

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            _conv(in_channels, channels, 3, stride, 1),
            _norm(channels),
            nn.ReLU(),
            _conv(channels, channels, 3, 1, 1),
            _norm(channels),
        )
        nn.init.zeros_(self.inner[-1].weight)  # type: ignore[arg-type]  # a GroupNorm's, a parameter
        changes = stride > 1 or in_channels != channels
        self.beside = _conv(in_channels, channels, 1, stride, 0) if changes else nn.Identity()

    def forward(self, maps: Tensor) -> Tensor:
        """[B, in_channels, H, W] to [B, channels, H / stride, W / stride], rounded up."""
        return functional.relu(self.beside(maps) + self.inner(maps))


class ResNet(ImageNetwork):
    """Encode images with a small residual network (He et al. 2016, arXiv:1512.03385).

    Ten layers like those of a ResNet-10, with group normalisation, a quarter to half as wide, and
    without the last average, which would lose where things are.

    Args:
        *args: as `ImageNetwork`; images of any size from 1 work.
        channels: width of each stage; every stage but the first halves the resolution, which the
            first two layers have quartered.
        **kwargs: as `ImageNetwork`.
    """

    def __init__(
        self, *args: Any, channels: Sequence[int] = (32, 64, 128, 128), **kwargs: Any
    ) -> None:
        self._channels = tuple(channels)
        super().__init__(*args, **kwargs)

    def make_convolutions(self, in_channels: int, size: tuple[int, int]) -> nn.Sequential:
        """Return a stem and one block per stage."""
        previous = self._channels[0]
        layers: list[nn.Module] = [
            _conv(in_channels, previous, 7, 2, 3),
            _norm(previous),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        for index, stage in enumerate(self._channels):
            layers.append(_Basic(previous, stage, 1 if index == 0 else 2))
            previous = stage
        return nn.Sequential(*layers, nn.Flatten())


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(channels, 8), channels)


@torch.no_grad()
def _flat_size(convolutions: nn.Module, in_channels: int, size: tuple[int, int]) -> int:
    return int(convolutions(torch.zeros(1, in_channels, *size)).shape[1])
