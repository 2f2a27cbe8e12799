"""Configuration of ``ppo``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from plugrl_server.algorithm.base_algorithm import BaseAlgoConfig
from plugrl_server.algorithm.registration import register_algo_config
from plugrl_server.common.ranges import FINITE, UNBOUNDED, Ranges

__all__ = ["PPOConfig", "PPOSquareConfig"]


@register_algo_config("ppo")
@dataclasses.dataclass
class PPOConfig(BaseAlgoConfig):
    """Proximal policy optimisation."""

    _ranges: ClassVar[Ranges] = {
        "learning_rate": (0, FINITE),
        "critic_learning_rate": (0, FINITE),
        "adam_eps": (0, FINITE),
        "buffer_size": (1, UNBOUNDED),
        "batch_size": (1, UNBOUNDED),
        "update_epochs": (1, UNBOUNDED),
        "gamma": (0, 1),
        "gae_lambda": (0, 1),
        "train_itrs": (1, UNBOUNDED),
        "clip_coef": (0, UNBOUNDED),
        "ent_coef": (-FINITE, FINITE),
        "vf_coef": (0, FINITE),
        "max_grad_norm": (0, UNBOUNDED),
        "target_kl": (0, UNBOUNDED),
        "reward_clip": (0, UNBOUNDED),
        "reward_scaling_gamma": (0, 1),
        "n_critic_warmup_itrs": (0, UNBOUNDED),
        "save_interval": (1, UNBOUNDED),
        "max_staleness": (0, UNBOUNDED),
    }

    global_steps: int | None = None
    """Length of the run in environment steps; None: until `train_itrs` learn steps are done."""
    learning_rate: float = 3e-4
    """Of Adam."""
    critic_learning_rate: float | None = None
    """Of the critic; None: as `learning_rate`."""
    adam_eps: float = 1e-5
    """Of Adam."""
    anneal_lr: bool = True
    """Let the learning rates fall linearly to zero at the end of the run."""
    buffer_size: int = 2048
    """Frames per learn step."""
    batch_size: int = 64
    """Frames per gradient step."""
    update_epochs: int = 10
    """Passes over the buffer per learn step."""
    gamma: float = 0.99
    """Discount per environment step."""
    gae_lambda: float = 0.95
    """Of generalised advantage estimation."""
    norm_adv: bool = True
    """Standardise advantages per gradient step."""
    train_itrs: int = 488
    """Learn steps of the run, where `global_steps` is not given."""
    clip_coef: float = 0.2
    """Width of the trust interval of the probability ratio."""
    clip_vloss: bool = True
    """Keep the critic near its old prediction, by `clip_coef`; small networks on a CPU learn
    several times faster without."""
    ent_coef: float = 0.0
    """Weight of the entropy bonus."""
    vf_coef: float = 0.5
    """Weight of the critic's loss."""
    max_grad_norm: float | None = 0.5
    """Norm that gradients are clipped to; None turns clipping off."""
    target_kl: float | None = None
    """End a learn step early when the policy has moved this far; None never does."""
    normalize_rewards: bool = True
    """Divide rewards by the running spread of the discounted return."""
    reward_clip: float = 10.0
    """Bound of divided rewards."""
    reward_scaling_gamma: float | None = None
    """Discount of that return; None: as `gamma`."""
    n_critic_warmup_itrs: int = 0
    """Learn steps at the start that train the critic only."""
    save_interval: int = 50
    """Learn steps between checkpoints."""
    max_staleness: int = 0
    """Versions that a frame's policy may be old. Above 0, V-trace corrects the advantages."""


@register_algo_config("ppo", "dppo-square")
@dataclasses.dataclass
class PPOSquareConfig(PPOConfig):
    """For robomimic's square task, with the settings of DPPO's Gaussian baseline."""

    learning_rate: float = 1e-4
    critic_learning_rate: float | None = 1e-3
    adam_eps: float = 1e-8
    anneal_lr: bool = False
    buffer_size: int = 20_000
    batch_size: int = 10_000
    gamma: float = 0.999
    clip_coef: float = 0.01
    clip_vloss: bool = False
    max_grad_norm: float | None = None
    target_kl: float | None = 1.0
    reward_scaling_gamma: float | None = 0.99
    n_critic_warmup_itrs: int = 1
