"""The keys of ``model_cfg`` that say how images are read; every built-in policy has them."""

from typing import Literal, Self

from pydantic import Field, PositiveInt, model_validator

from rlightning.config.base import StrictConfig
from rlightning.models.encoders import ImageOptions
from rlightning.models.vision import LEAST_NATURE_SIZE

__all__ = ["ImageConfig"]


class ImageConfig(StrictConfig):
    """How image observations are encoded."""

    image_encoder: Literal["nature", "impala", "resnet", "flatten"] = "nature"
    """The network that reads images; ``flatten`` treats them as vectors."""
    image_layout: Literal["CHW", "HWC"] | None = None
    """Where an image's channels are; unset: told from the shape where that is clear."""
    image_size: tuple[PositiveInt, PositiveInt] = (84, 84)
    """Height and width that images are resized to."""
    image_features: int = Field(default=256, ge=1)
    """Width of an image's encoding."""
    image_random_shift: int = Field(default=0, ge=0)
    """Pixels by which images are shifted at random while learning, up to that many; 0: not."""

    @model_validator(mode="after")
    def _fits_the_network(self) -> Self:
        least = LEAST_NATURE_SIZE
        if self.image_encoder == "nature" and min(self.image_size) < least:
            raise ValueError(
                f"image_size is {list(self.image_size)}; image_encoder nature needs at least "
                f"[{least}, {least}]. Smaller images are enlarged to it"
            )
        return self

    def image_options(self) -> ImageOptions:
        """Return how image observations are encoded."""
        return ImageOptions(
            encoder=self.image_encoder,
            layout=self.image_layout,
            size=self.image_size,
            features=self.image_features,
            random_shift=self.image_random_shift,
        )
