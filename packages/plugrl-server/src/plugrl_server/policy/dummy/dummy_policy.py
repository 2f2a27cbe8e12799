"""A policy that takes any observation and draws actions at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import numpy as np

from plugrl_server.policy.base_policy import BasePolicy, PolicyRuntimeState
from plugrl_server.policy.registration import register_policy

if TYPE_CHECKING:
    from plugrl_server.policy.dummy.dummy_config import DummyPolicyConfig

__all__ = ["DummyPolicy"]


@register_policy("dummy-policy")
@final
class DummyPolicy(BasePolicy):
    """Random actions from numpy's global generator, which ``--seed`` seeds."""

    def __init__(self, config: DummyPolicyConfig) -> None:
        super().__init__(config)
        self.action_dim = config.action_dim
        self.action_horizon = config.action_horizon

    def prepare_observation(self, _obs: dict[str, Any]) -> np.ndarray[Any, Any]:
        """Give row numbers ``[n, 1]``: nothing is read from the observation but its length."""
        return np.arange(len(_obs["text"]), dtype=np.float32)[:, None]

    def get_action_and_runtime_state(self, _obs: dict[str, Any]) -> tuple[Any, PolicyRuntimeState]:
        """Draw ``[n, H, D]`` floats, or ``[n, H]`` integers if discrete; no state."""
        n = len(_obs["text"])
        if self.config.discrete:
            return np.random.randint(self.action_dim, size=(n, self.action_horizon)), None
        size = (n, self.action_horizon, self.action_dim)
        return np.random.uniform(-1.0, 1.0, size).astype(np.float32), None

    def fake_runtime_state(self, batch_size: int) -> PolicyRuntimeState:
        """There is none."""
        del batch_size
        return None  # a value, not the lack of one
