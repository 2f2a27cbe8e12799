"""Policies: the base class to subclass, the group that drives instances, built-in algorithms."""

from rlightning.policy.base_policy import BasePolicy
from rlightning.policy.policy_group import PolicyGroup

__all__ = ["BasePolicy", "PolicyGroup"]
