"""What a policy is told about its environment, and the roles a policy can have."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import Any

__all__ = ["EnvMeta", "PolicyRole"]


@dataclasses.dataclass
class EnvMeta:
    """The spaces and size of an environment worker; spaces are always those of ONE environment."""

    env_id: str | None = None
    action_space: Any = None
    """A `gymnasium.Space`: the action of one row."""
    observation_space: Any = None
    """A `gymnasium.Space`: the observation of one row."""
    num_envs: int | None = None
    """How many rows the worker steps at once."""
    label: str | None = None
    """How errors call the worker: its configuration's name and its index."""
    masked_actions: bool = False
    """Whether some rows have only a part of the actions: ``observation["action_mask"]`` says which,
    and only a policy that reads it can act."""


class PolicyRole(StrEnum):
    """What a policy instance is for: gradient updates or acting."""

    TRAIN = "train"
    EVAL = "eval"
