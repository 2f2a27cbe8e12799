"""Policies by UID: registered when their module is imported, made when they are chosen.

Needs no torch.
"""

from __future__ import annotations

from typing import Any

from plugrl_server.common.registry import Kind, Registry
from plugrl_server.common.registry import Spec as PolicySpec
from plugrl_server.policy.base_policy import BasePolicy

__all__ = [
    "REGISTERED_POLICIES",
    "REGISTERED_POLICY_CONFIGS",
    "PolicySpec",
    "make_policy",
    "register_builtin_policy",
    "register_policy",
    "register_policy_config",
]

POLICIES = Registry(Kind("Policy", lambda: BasePolicy))
REGISTERED_POLICIES = POLICIES.specs
"""UID to `PolicySpec`."""
REGISTERED_POLICY_CONFIGS = POLICIES.configs
"""UID to variant to configuration."""

register_policy = POLICIES.register
register_policy_config = POLICIES.register_config
register_builtin_policy = POLICIES.register_builtin


def make_policy(uid: str, config: Any) -> BasePolicy:
    """Construct the policy called `uid`.

    Raises:
        KeyError: ``Policy <uid> is not registered.``
        MissingExtraError: an optional dependency of it is not installed.
    """
    policy: BasePolicy = POLICIES.get(uid).create(config)
    return policy
