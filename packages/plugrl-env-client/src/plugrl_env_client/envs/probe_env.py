"""``probe-v1``: an environment whose whole history can be read from its state.

Section 7 of the wire page: a checker that knows what it sent can tell from every feedback what the
client did with it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from gymnasium import spaces

from plugrl_env_client.envs.base_env import BaseEnv, BaseEnvConfig, Observation
from plugrl_env_client.utils.registration import register_env, register_env_config
from plugrl_env_client.utils.wrappers import reset_rows

__all__ = ["ProbeEnv", "ProbeEnvConfig"]


@register_env_config("Probe-v1")
@dataclasses.dataclass
class ProbeEnvConfig(BaseEnvConfig):
    """Options of the probe."""

    action_dim: int = 3
    """Width of an action."""


@register_env("Probe-v1")
class ProbeEnv(BaseEnv[ProbeEnvConfig]):
    """Counts steps and repeats actions.

    Row i's episodes last ``3 + 2 * (i mod 3)`` steps and terminate; a step earns 1. States: ``t``
    float64 ``[n, 1]``, the steps taken, and ``a`` float64 ``[n, d]``, the last action.
    """

    def __init__(
        self,
        config: ProbeEnvConfig,
        num_envs: int = 1,
        process_id: int | None = None,
        total_processes: int | None = None,
    ) -> None:
        super().__init__(config, num_envs, process_id, total_processes)
        self.single_action_space = spaces.Box(-np.inf, np.inf, (config.action_dim,), np.float64)
        self.lengths_steps = 3 + 2 * (np.arange(num_envs) % 3)
        self._time = np.zeros((num_envs, 1))
        self._action = np.zeros((num_envs, config.action_dim))

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Set the chosen rows to time 0; nothing here is random."""
        rows = reset_rows(options)
        self._time[rows] = 0.0
        self._action[rows] = 0.0
        return self._observe(), {}

    def step(self, actions: Any) -> tuple[Observation, Any, Any, Any, dict[str, Any]]:
        """Step every row; see `BaseEnv.step`."""
        self._time += 1.0
        self._action[:] = actions
        terminated = self._time[:, 0] >= self.lengths_steps
        rewards = np.ones(self.num_envs, np.float32)
        return self._observe(), rewards, terminated, np.zeros(self.num_envs, np.bool_), {}

    def _observe(self) -> Observation:
        return Observation(states={"t": self._time.copy(), "a": self._action.copy()})
