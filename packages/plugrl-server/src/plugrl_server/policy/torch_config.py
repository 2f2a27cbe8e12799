"""The configuration of torch policies, apart from torch: a menu needs the one without the other."""

from __future__ import annotations

import dataclasses

from plugrl_server.policy.base_policy import BasePolicyConfig

__all__ = ["BaseTorchPolicyConfig"]


@dataclasses.dataclass
class BaseTorchPolicyConfig(BasePolicyConfig):
    """What every torch policy's configuration has."""

    device: str = "auto"
    """Where the model runs: ``auto`` (CUDA where there is one), ``cpu``, ``cuda``, ``cuda:1``."""
