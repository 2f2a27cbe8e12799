"""Configuration of ``sac``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from plugrl_server.algorithm.base_algorithm import BaseAlgoConfig
from plugrl_server.algorithm.registration import register_algo_config
from plugrl_server.common.ranges import FINITE, UNBOUNDED, Ranges

__all__ = ["SACConfig"]


@register_algo_config("sac")
@dataclasses.dataclass
class SACConfig(BaseAlgoConfig):
    """Soft actor-critic."""

    _ranges: ClassVar[Ranges] = {
        "buffer_size": (1, UNBOUNDED),
        "gamma": (0, 1),
        "tau": (0, 1),
        "batch_size": (1, UNBOUNDED),
        "learning_starts": (0, UNBOUNDED),
        "update_every": (1, UNBOUNDED),
        "update_to_data_ratio": (0, FINITE),
        "policy_lr": (0, FINITE),
        "q_lr": (0, FINITE),
        "policy_frequency": (1, UNBOUNDED),
        "target_network_frequency": (1, UNBOUNDED),
        "save_interval": (1, UNBOUNDED),
    }

    global_steps: int | None = 1_000_000
    """Length of the run in environment steps; None never ends."""
    buffer_size: int = 1_000_000
    """Transitions kept for replay."""
    gamma: float = 0.99
    """Discount per environment step."""
    tau: float = 0.005
    """How far the slow critics move per update."""
    batch_size: int = 256
    """Transitions per update."""
    learning_starts: int = 5_000
    """Environment steps before the first update."""
    update_every: int = 1
    """Environment steps between learn steps."""
    update_to_data_ratio: float = 1
    """Updates per environment step."""
    policy_lr: float = 3e-4
    """Learning rate of the policy."""
    q_lr: float = 1e-3
    """Learning rate of the critics and the temperature."""
    policy_frequency: int = 2
    """Updates between policy updates; each then takes as many steps, so none are lost."""
    target_network_frequency: int = 1
    """Updates between moves of the slow critics."""
    save_interval: int = 10_000
    """Environment steps between checkpoints."""
    save_replay_buffer: bool = True
    """Put the transitions into checkpoints; without them a resumed run collects anew."""
