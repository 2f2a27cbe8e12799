"""Environments: workers of one or more rows, and the group that a run steps as one."""

from rlightning.env.base_env import BaseEnv
from rlightning.env.env_group import EnvGroup
from rlightning.types import EnvMeta

__all__ = ["BaseEnv", "EnvGroup", "EnvMeta"]
