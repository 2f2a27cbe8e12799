"""``gaussian-policy``: actions from a gaussian distribution over a state vector."""

from plugrl_server.policy.gaussian.gaussian_config import GaussianPolicyConfig
from plugrl_server.policy.registration import register_builtin_policy

__all__ = ["GaussianPolicyConfig"]

register_builtin_policy(
    "gaussian-policy", "plugrl_server.policy.gaussian.gaussian_policy:GaussianPolicy"
)
