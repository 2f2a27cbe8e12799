"""``categorical-policy``: actions from a categorical distribution over a state vector."""

from plugrl_server.policy.categorical.categorical_config import CategoricalPolicyConfig
from plugrl_server.policy.registration import register_builtin_policy

__all__ = ["CategoricalPolicyConfig"]

register_builtin_policy(
    "categorical-policy", "plugrl_server.policy.categorical.categorical_policy:CategoricalPolicy"
)
