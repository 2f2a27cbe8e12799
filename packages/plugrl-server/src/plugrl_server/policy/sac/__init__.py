"""``sac-policy``: bounded continuous actions and two critics, for ``sac``."""

from plugrl_server.policy.registration import register_builtin_policy
from plugrl_server.policy.sac.sac_config import SACPolicyConfig

__all__ = ["SACPolicyConfig"]

register_builtin_policy("sac-policy", "plugrl_server.policy.sac.sac_policy:SACPolicy")
