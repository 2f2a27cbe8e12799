"""Frames of an environment as it runs, the last one of every episode included."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["FrameTap"]


class FrameTap(gym.Wrapper[Any, Any, Any, Any]):
    """Renders after every reset and step, before a vector environment can reset in between.

    Args:
        env: an environment made with ``render_mode="rgb_array"``.

    Raises:
        ValueError: it renders otherwise, or not at all.
    """

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        if env.render_mode != "rgb_array":
            raise ValueError(
                f"frames need render_mode 'rgb_array'; this environment has {env.render_mode!r}"
            )
        self._frames: list[np.ndarray[Any, Any]] = []

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        """Reset and keep the first frame."""
        result = self.env.reset(**kwargs)
        self._keep()
        return result

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step and keep the frame."""
        result = self.env.step(action)
        self._keep()
        return result

    def _keep(self) -> None:
        self._frames.append(np.asarray(self.env.render(), dtype=np.uint8))

    def take(self) -> list[np.ndarray[Any, Any]]:
        """Return the frames since the last call, uint8 ``[height, width, 3]``."""
        frames, self._frames = self._frames, []
        return frames
