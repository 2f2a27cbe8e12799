"""The default step between a policy's answer and the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlightning.types import PolicyResponse

__all__ = ["default_env_preprocess_fn"]


def default_env_preprocess_fn(policy_resp: PolicyResponse) -> Any:
    """Return the action of `policy_resp` unchanged."""
    action = policy_resp.extras.get("action")
    return policy_resp.action if action is None else action
