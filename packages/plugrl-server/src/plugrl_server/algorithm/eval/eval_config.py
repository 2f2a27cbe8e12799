"""Configuration of ``eval``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from plugrl_server.algorithm.base_algorithm import BaseAlgoConfig
from plugrl_server.algorithm.registration import register_algo_config
from plugrl_server.common.ranges import UNBOUNDED, Ranges

__all__ = ["EvalConfig"]


@register_algo_config("eval")
@dataclasses.dataclass
class EvalConfig(BaseAlgoConfig):
    """Runs a policy without learning."""

    _ranges: ClassVar[Ranges] = {
        "num_episodes": (1, UNBOUNDED),
    }

    policy_checkpoint_path: str | None = None
    """A checkpoint's directory, or a run's; None evaluates the policy as it is constructed."""
    num_episodes: int | None = None
    """Stop after so many episodes; None never stops by itself."""
    break_action_chunk: bool = False
    """Kept for compatibility; the client decides how much of a chunk it uses."""
