"""What can be configured about PPO: its part of ``model_cfg``, ``optim_cfg`` and ``train``."""

from typing import Literal

from pydantic import Field

from rlightning.config import Config, StrictConfig
from rlightning.models.network_config import NetworkConfig

__all__ = ["PPOModelConfig", "PPOOptimConfig", "PPOTrainConfig"]


class PPOModelConfig(NetworkConfig):
    """``policy.model_cfg`` of PPO."""

    normalize_observations: bool = False
    """Shift and scale vector observations by everything seen so far."""
    normalize_returns: bool = False
    """Let the critic predict returns divided by their running standard deviation."""


class PPOOptimConfig(StrictConfig):
    """``policy.optim_cfg`` of PPO: the settings of Adam."""

    lr: float = Field(default=3e-4, gt=0)
    """Learning rate."""
    critic_lr: float | None = Field(default=None, gt=0)
    """Learning rate of what only the critic uses; unset: `lr`."""
    eps: float = Field(default=1e-5, gt=0)
    """Added to the root of the second moment."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the moments."""


class PPOTrainConfig(Config):
    """Keys of the ``train`` section that PPO reads."""

    ppo_epochs: int = Field(default=10, ge=1)
    """Passes over the rollout."""
    minibatch_size: int = Field(default=64, ge=1)
    """Rows of one gradient step; what is left over is spread over the others."""
    clip_ratio: float = Field(default=0.2, gt=0)
    """How far a probability ratio may profitably move from 1."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    value_coef: float = Field(default=0.5, ge=0)
    """Weight of the critic's mean squared error."""
    max_grad_norm: float = Field(default=0.5, gt=0, allow_inf_nan=True)
    """Norm the whole gradient is clipped to; ``.inf`` leaves it."""
    normalize_advantage: bool = True
    """Standardise advantages in each minibatch."""
    clip_value_loss: bool = False
    """Keep values within `clip_ratio` of the collected ones (in the critic's unit)."""
    target_kl: float | None = Field(default=None, gt=0)
    """End an update at the minibatch whose KL estimate exceeds 1.5 times this."""
    anneal_lr: bool = False
    """Lower the learning rate linearly to zero over `max_epochs`."""
    micro_batch_size: int | None = Field(default=None, ge=1)
    """Rows of one forward and backward pass, whose gradients add up to the minibatch's; unset: all
    at once."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """``bf16`` runs the networks' forward pass of an update in mixed precision."""
    compile: bool = False
    """Compile the networks' forward pass of an update with `torch.compile`."""
    fused_update: Literal["off", "auto"] = "off"
    """``off`` learns by autograd; ``auto`` takes the hand-written step where it applies, two plain
    tanh networks on a CPU, for two to three times the speed and the same weights to rounding."""
