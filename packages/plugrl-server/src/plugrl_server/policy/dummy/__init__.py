"""``dummy-policy``: random actions, for trying clients and servers."""

from plugrl_server.policy.dummy.dummy_config import DummyPolicyConfig
from plugrl_server.policy.registration import register_builtin_policy

__all__ = ["DummyPolicyConfig"]

register_builtin_policy("dummy-policy", "plugrl_server.policy.dummy.dummy_policy:DummyPolicy")
