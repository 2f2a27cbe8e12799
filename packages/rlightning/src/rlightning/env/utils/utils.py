"""The default step between a policy's answer and the environment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlightning.errors import ContractError

if TYPE_CHECKING:
    from rlightning.types import PolicyResponse

__all__ = ["default_env_preprocess_fn"]


def default_env_preprocess_fn(policy_resp: PolicyResponse) -> Any:
    """Return the action of `policy_resp` unchanged.

    Raises:
        ContractError: the policy answered without one.
    """
    action = policy_resp.extras.get("action")
    if action is None:
        found = "`action` is None" if "action" in policy_resp.extras else "it has no `action`"
        have = ", ".join(policy_resp.extras) or "nothing"
        raise ContractError(
            f"the policy answered {have}: {found}. Answer with the field `action`, or give "
            "build_env_group a preprocess_fn that makes the action of what there is"
        )
    return action
