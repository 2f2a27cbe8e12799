"""What every environment of the client looks like: `Observation`, `BaseEnvConfig`, `BaseEnv`.

An environment holds ``num_envs`` rows and steps them together. What it shows always has a leading
axis of rows, also for one row. Knows nothing of servers.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

import gymnasium as gym
import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from plugrl_env_client.errors import EnvContractError
from plugrl_protocol import messages

if TYPE_CHECKING:
    from collections.abc import Mapping

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

ImageArray: TypeAlias = npt.NDArray[np.uint8]
"""``[n, h, w, c]``"""
StateArray: TypeAlias = npt.NDArray[Any]
"""``[n, d]``, floating or integer"""
TextArray: TypeAlias = npt.NDArray[np.str_]
"""``[n]``"""
Action: TypeAlias = npt.NDArray[Any]
"""``[n, *A]``"""
RewardArray: TypeAlias = npt.NDArray[np.float32]
"""``[n]``"""
BoolArray: TypeAlias = npt.NDArray[np.bool_]
"""``[n]``"""


class Observation:
    """What a batch of rows sees.

    Args:
        images: name to ``uint8 [n, h, w, c]``; may be empty.
        states: name to numbers ``[n, d]``; may be empty.
        text: one instruction for all rows, or n of them; None means none.

    Attributes:
        images: and `states`: as given.
        text: ``<U [n]``.

    Raises:
        ValueError: the leading axes do not agree, or there is nothing that tells n.
    """

    __slots__ = ("images", "states", "text")

    def __init__(
        self,
        images: Mapping[str, ImageArray] | None = None,
        states: Mapping[str, StateArray] | None = None,
        text: str | list[str] | npt.NDArray[Any] | None = None,
    ) -> None:
        self.images = dict(images or {})
        self.states = dict(states or {})
        sizes = {
            f"{group}[{name!r}]": np.shape(array)[0] if np.ndim(array) else None
            for group, arrays in (("images", self.images), ("states", self.states))
            for name, array in arrays.items()
        }
        if text is not None and not isinstance(text, str):
            text = np.asarray(text, dtype=np.str_)
            sizes["text"] = len(text) if text.ndim == 1 else None
        if len(set(sizes.values())) != 1 or None in sizes.values():
            raise ValueError(
                f"an observation needs arrays with one common leading axis [n]; found {sizes}"
            )
        if text is None or isinstance(text, str):
            text = np.full(next(iter(sizes.values())) or 0, text or "")
        self.text: TextArray = text

    def __len__(self) -> int:
        return len(self.text)

    def __repr__(self) -> str:
        arrays = [f"{k}: {v.dtype} {list(v.shape)}" for k, v in (*self.images.items(),
                                                                 *self.states.items())]  # fmt: skip
        return f"Observation({', '.join(arrays)}, {len(self)} rows)"

    def rows(self, index: npt.NDArray[Any]) -> Observation:
        """Return a copy of the rows in `index`, indices or a mask."""
        taken = Observation.__new__(Observation)
        taken.images = {name: array[index] for name, array in self.images.items()}
        taken.states = {name: array[index] for name, array in self.states.items()}
        taken.text = self.text[index]
        return taken

    def with_rows(self, index: npt.NDArray[Any], source: Observation) -> Observation:
        """Return a copy in which the rows of `index` are those of `source`, in order.

        Raises:
            EnvContractError: `source` has other names, shapes or more rows.
        """
        if self.images.keys() != source.images.keys() or self.states.keys() != source.states.keys():
            raise EnvContractError(
                f"a reset shows {source}, a step {self}; the names must be the same"
            )
        merged = Observation.__new__(Observation)
        merged.images = {k: _replaced(v, index, source.images[k]) for k, v in self.images.items()}
        merged.states = {k: _replaced(v, index, source.states[k]) for k, v in self.states.items()}
        width = max(self.text.dtype, source.text.dtype, key=lambda dtype: dtype.itemsize)
        merged.text = _replaced(self.text.astype(width), index, source.text)
        return merged

    def to_wire(self) -> messages.Observation:
        """Return it as a message carries it; the protocol checks it when it is sent."""
        return messages.Observation(images=self.images, states=self.states, text=self.text)


def _replaced(array: npt.NDArray[Any], index: npt.NDArray[Any], rows: Any) -> npt.NDArray[Any]:
    merged = np.array(array)
    merged[index] = rows
    return merged


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
