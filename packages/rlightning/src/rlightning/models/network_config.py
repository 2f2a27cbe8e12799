"""The keys of ``model_cfg`` that describe an actor-critic network."""

from pydantic import PositiveInt

from rlightning.models.actor_critic import ActorCriticOptions
from rlightning.models.image_config import ImageConfig

__all__ = ["NetworkConfig"]


class NetworkConfig(ImageConfig):
    """Hidden layers, and how images are read."""

    hidden_sizes: list[PositiveInt] | None = None
    """Hidden layers behind the encoder; unset: [64, 64], or none if there is an image."""
    activation: str = "tanh"
    """Activation of the hidden layers."""
    shared_encoder: bool | None = None
    """Whether actor and critic share encoder and hidden layers; unset: only for images."""
    log_std_init: float = 0.0
    """Initial logarithm of the standard deviation of Box actions."""

    def actor_critic_options(self) -> ActorCriticOptions:
        """Return the shape of the networks."""
        return ActorCriticOptions(
            hidden_sizes=self.hidden_sizes,
            activation=self.activation,
            shared_encoder=self.shared_encoder,
            log_std_init=self.log_std_init,
            images=self.image_options(),
        )
