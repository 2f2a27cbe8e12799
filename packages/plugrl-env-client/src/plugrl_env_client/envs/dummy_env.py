"""``dummy-v1``: noise in the shapes of a robot with two cameras, for measuring everything else."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from plugrl_env_client.envs.base_env import BaseEnv, BaseEnvConfig, Observation
from plugrl_env_client.utils.registration import register_env, register_env_config
from plugrl_env_client.utils.wrappers import reset_rows

__all__ = ["DummyEnv", "DummyEnvConfig"]


@register_env_config("Dummy-v1")
@dataclasses.dataclass
class DummyEnvConfig(BaseEnvConfig):
    """Options of the dummy."""

    img_size: int = 224
    """Height and width of the image "img", in pixels."""
    wrist_img_size: int = 112
    """Height and width of the image "wrist_img", in pixels."""
    action_dim: int = 7
    """Width of an action."""
    state_dim: int = 10
    """Width of the state vector "state"."""
    text: str = "do something"
    """The instruction."""
    terminated_prob: float = 0.01
    """How likely a step ends an episode."""


@register_env("Dummy-v1", max_episode_steps=200_000)
class DummyEnv(BaseEnv[DummyEnvConfig]):
    """Shows noise, pays noise, ends by chance."""

    def __init__(
        self,
        config: DummyEnvConfig,
        num_envs: int = 1,
        process_id: int | None = None,
        total_processes: int | None = None,
    ) -> None:
        super().__init__(config, num_envs, process_id, total_processes)
        self.single_action_space = spaces.Box(-1.0, 1.0, (config.action_dim,), np.float32)
        self._text = np.full(num_envs, config.text)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Show new noise; with a seed, row i's noise is that of ``seed + i``."""
        self.seed_rngs(seed)
        return self._observe(np.arange(self.num_envs)[reset_rows(options)]), {}

    def step(self, actions: Any) -> tuple[Observation, Any, Any, Any, dict[str, Any]]:
        """Step every row; see `BaseEnv.step`."""
        draws = np.array([rng.random(3) for rng in self.rngs])
        terminated = draws[:, 0] < self.config.terminated_prob
        info = {"success": terminated & (draws[:, 2] < 0.5)}
        rewards = draws[:, 1].astype(np.float32)
        obs = self._observe(np.arange(self.num_envs))
        return obs, rewards, terminated, np.zeros(self.num_envs, np.bool_), info

    def _observe(self, rows: npt.NDArray[np.int64]) -> Observation:
        config = self.config
        rngs = [self.rngs[row] for row in rows.tolist()]
        return Observation(
            images={
                "img": _noise(rngs, config.img_size),
                "wrist_img": _noise(rngs, config.wrist_img_size),
            },
            states={"state": _vectors(rngs, config.state_dim)},
            text=self._text[rows],
        )


def _noise(rngs: list[np.random.Generator], size: int) -> npt.NDArray[np.uint8]:
    return np.stack([rng.integers(0, 256, (size, size, 3), np.uint8) for rng in rngs])


def _vectors(rngs: list[np.random.Generator], width: int) -> npt.NDArray[np.float32]:
    return np.stack([rng.standard_normal(width, np.float32) for rng in rngs])
