"""Configuration of ``dummy``."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from plugrl_server.algorithm.base_algorithm import BaseAlgoConfig
from plugrl_server.algorithm.registration import register_algo_config
from plugrl_server.common.ranges import FINITE, UNBOUNDED, Ranges

__all__ = ["DummyAlgoConfig"]


@register_algo_config("dummy")
@dataclasses.dataclass
class DummyAlgoConfig(BaseAlgoConfig):
    """Sleeps instead of computing."""

    _ranges: ClassVar[Ranges] = {
        "fake_inference_duration_sec": (0, FINITE),
        "fake_learn_duration_sec": (0, FINITE),
        "fake_learn_freq": (1, UNBOUNDED),
    }

    global_steps: int | None = 300
    """Length of the run in environment steps; None never ends."""
    fake_inference_duration_sec: float = 0.1
    """How long an inference takes, in seconds."""
    fake_learn_duration_sec: float = 10.0
    """How long a learn step takes, in seconds."""
    fake_learn_freq: int = 100
    """Frames between two learn steps."""
    break_action_chunk: bool = False
    """Kept for compatibility; the client decides how much of a chunk it uses."""
