"""What every environment of the client looks like: `Observation`, `BaseEnvConfig`, `BaseEnv`.

An environment holds ``num_envs`` rows and steps them together. What it shows always has a leading
axis of rows, also for one row. Knows nothing of servers.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from plugrl_env_client.utils.observation import ImageArray, Observation, StateArray, TextArray

__all__ = [
    "Action",
    "BaseEnv",
    "BaseEnvConfig",
    "BoolArray",
    "ImageArray",
    "Observation",
    "RewardArray",
    "StateArray",
    "TextArray",
]

Action: TypeAlias = npt.NDArray[Any]
"""``[n, *A]``"""
RewardArray: TypeAlias = npt.NDArray[np.float32]
"""``[n]``"""
BoolArray: TypeAlias = npt.NDArray[np.bool_]
"""``[n]``"""


@dataclasses.dataclass
class BaseEnvConfig:
    """Options of an environment; each field is a flag ``--env.<field>``."""

    max_episode_steps: int | None = None
    """Truncate episodes after so many steps; None keeps the environment's own limit."""


ConfigT = TypeVar("ConfigT", bound=BaseEnvConfig)


class BaseEnv(gym.vector.VectorEnv[Any, Any, Any], abc.ABC, Generic[ConfigT]):
    """Rows that are stepped together.

    Ends of episodes. With ``metadata["autoreset_mode"]`` DISABLED or NEXT_STEP (the default), a
    step that ends a row shows the row's last observation, and the client then calls
    ``reset(options={"reset_indices": rows})`` before it steps again. With SAME_STEP the environment
    has reset the row itself: it shows the next episode's first observation, and
    ``info["final_obs"]`` is an `Observation` of all rows that shows the last one where the mask
    ``info["_final_obs"]`` is set.

    Success is read from ``info["is_success"]`` or ``info["success"]`` (bool ``[n]``).

    A subclass must set `single_action_space`.

    Args:
        config: its options.
        num_envs: n.
        process_id: which process of the run this is, or None if it was not asked for.
        total_processes: how many there are, or None.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012  # as Gymnasium declares it
    limits_episodes: ClassVar[bool] = False
    """Whether it applies ``config.max_episode_steps`` itself, as SAME_STEP environments must."""
    checks_actions: ClassVar[bool] = False
    """Whether it clips and converts actions itself; otherwise the client does."""

    def __init__(
        self,
        config: ConfigT,
        num_envs: int = 1,
        process_id: int | None = None,
        total_processes: int | None = None,
    ) -> None:
        self.config = config
        self.num_envs = num_envs
        self.process_id = process_id
        self.total_processes = total_processes
        self.rngs: list[np.random.Generator] = []

    @abc.abstractmethod
    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin new episodes.

        Args:
            seed: row i is seeded with ``seed + i``; None continues the random streams.
            options: ``{"reset_indices": int array}`` resets these rows alone.

        Returns:
            The observation of all rows, or of the reset rows in their order, and an info.
        """

    @abc.abstractmethod
    def step(
        self, actions: Action
    ) -> tuple[Observation, RewardArray, BoolArray, BoolArray, dict[str, Any]]:
        """Step every row.

        Args:
            actions: ``[n, *A]``.

        Returns:
            Observation, rewards, terminated, truncated, each of n rows, and the info.
        """

    def seed_rngs(self, seed: int | None) -> None:
        """Give every row a random generator of its own in `rngs`, seeded with ``seed + row``.

        With None the generators that there are go on; where there are none yet, they start from
        the system's entropy.
        """
        if seed is not None:
            self.rngs = [np.random.default_rng(seed + row) for row in range(self.num_envs)]
        elif not self.rngs:
            self.rngs = [np.random.default_rng() for _ in range(self.num_envs)]

    def fake_action(self) -> Action:
        """Return actions that can be stepped with, ``[n, *A]``: samples of the action space."""
        return np.stack([self.single_action_space.sample() for _ in range(self.num_envs)])

    def fake_obs(self) -> Observation:
        """Return an observation of the right names and shapes; by default that of a reset."""
        return self.reset()[0]
