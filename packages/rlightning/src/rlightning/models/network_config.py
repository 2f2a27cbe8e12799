"""The keys of ``model_cfg`` that describe an actor-critic network."""

from typing import Literal

from pydantic import Field

from rlightning.config.base import StrictConfig
from rlightning.models.actor_critic import ActorCriticOptions
from rlightning.models.encoders import ImageOptions

__all__ = ["NetworkConfig"]


class NetworkConfig(StrictConfig):
    """Hidden layers, and how images are read."""

    hidden_sizes: list[int] | None = None
    """Hidden layers behind the encoder; unset: [64, 64], or none if there is an image."""
    activation: str = "tanh"
    """Activation of the hidden layers."""
    shared_encoder: bool | None = None
    """Whether actor and critic share encoder and hidden layers; unset: only for images."""
    log_std_init: float = 0.0
    """Initial logarithm of the standard deviation of Box actions."""
    image_encoder: Literal["nature", "impala", "flatten"] = "nature"
    """The network that reads images; ``flatten`` treats them as vectors."""
    image_layout: Literal["CHW", "HWC"] | None = None
    """Where an image's channels are; unset: told from the shape where that is clear."""
    image_size: tuple[int, int] = (84, 84)
    """Height and width that images are resized to."""
    image_features: int = Field(default=256, ge=1)
    """Width of an image's encoding."""

    def image_options(self) -> ImageOptions:
        """Return how image observations are encoded."""
        return ImageOptions(
            encoder=self.image_encoder,
            layout=self.image_layout,
            size=self.image_size,
            features=self.image_features,
        )

    def actor_critic_options(self) -> ActorCriticOptions:
        """Return the shape of the networks."""
        return ActorCriticOptions(
            hidden_sizes=self.hidden_sizes,
            activation=self.activation,
            shared_encoder=self.shared_encoder,
            log_std_init=self.log_std_init,
            images=self.image_options(),
        )
