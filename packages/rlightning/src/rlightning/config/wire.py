"""What the ``env`` section says about environments that dial in: their actions and observations.

The remote environment and the training server both read it, so that one configuration means the
same to both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import ConfigDict, Field, model_validator

from rlightning.config.base import Config, StrictConfig
from rlightning.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import gymnasium as gym

    from rlightning.config.schema import EnvConfig
    from rlightning.utils.observation_form import ObservationForm

__all__ = ["ActionSpaceConfig", "ObservationConfig", "WireConfig", "WireSpaces", "wire_spaces"]


class ActionSpaceConfig(StrictConfig):
    """The action space of one environment: ``n``, or ``nvec``, or ``low`` and ``high``."""

    model_config = ConfigDict(allow_inf_nan=True)  # a Box may have no bounds

    n: int | None = Field(default=None, ge=1)
    """Discrete: how many actions."""
    nvec: list[int] | None = None
    """MultiDiscrete: how many choices each number has."""
    start: int = 0
    """Discrete and MultiDiscrete: the environment's smallest value."""
    low: float | list[float] | None = None
    """Box: lower bound, of all numbers or each."""
    high: float | list[float] | None = None
    """Box: upper bound, of all numbers or each."""
    shape: list[int] | None = None
    """Box: shape of an action, where the bounds do not tell it."""

    @model_validator(mode="after")
    def _one_kind(self) -> ActionSpaceConfig:
        is_box = self.low is not None and self.high is not None
        if [self.n is not None, self.nvec is not None, is_box].count(True) != 1:
            raise ValueError("give n, or nvec, or low and high (with shape)")
        if is_box and not np.all(np.asarray(self.low) <= np.asarray(self.high)):  # nor with a NaN
            raise ValueError(
                f"found low {self.low} and high {self.high}; expected numbers, none of them above "
                "its high"
            )
        return self

    def space(self) -> gym.Space[Any]:
        """Return the Gymnasium space."""
        from gymnasium import spaces

        if self.n is not None:
            return spaces.Discrete(self.n, start=self.start)
        if self.nvec is not None:
            return spaces.MultiDiscrete(self.nvec, start=[self.start] * len(self.nvec))
        bounds = (np.asarray(self.low, np.float32), np.asarray(self.high, np.float32))
        shape = tuple(self.shape) if self.shape else np.broadcast_shapes(*(b.shape for b in bounds))
        low, high = (np.broadcast_to(bound, shape) for bound in bounds)
        return spaces.Box(low.copy(), high.copy(), dtype=np.float32)


class ObservationConfig(StrictConfig):
    """What one environment shows."""

    states: dict[str, int] = Field(default_factory=dict)
    """Name to length of each state vector."""
    images: dict[str, tuple[int, int, int]] = Field(default_factory=dict)
    """Name to height, width and channels of each image."""


class WireConfig(Config):
    """Keys of an ``env`` section about environments that dial in."""

    action_space: ActionSpaceConfig | None = None
    """The action space; unset: that of the Gymnasium environment called ``task``."""
    observation: ObservationConfig | None = None
    """Names and shapes of what is observed; unset: as ``task`` says, else as the first client."""
    action_horizon: int = Field(default=1, ge=1)
    """Actions of one answer: the policy's action is then ``[H, *A]``."""


class WireSpaces(NamedTuple):
    """What follows from a section.

    Attributes:
        action: of one environment, as the environment has it, of a chunk where the horizon is
            above 1.
        observation: None: the first client shows it.
    """

    action: gym.Space[Any]
    observation: ObservationForm | None


def wire_spaces(
    section: EnvConfig,
    keys: WireConfig,
    task_spaces: Callable[[], tuple[gym.Space[Any], gym.Space[Any]]],
) -> WireSpaces:
    """Return the spaces of environments that dial in.

    Args:
        section: the ``env`` section.
        keys: its keys about the wire.
        task_spaces: makes the Gymnasium environment ``section.task`` and gives its observation
            space and its action space; raises where there is none.

    Raises:
        ConfigError: the action space is not configured and ``task`` names no environment.
    """
    from rlightning.utils.observation_form import ObservationForm

    form = None
    if keys.observation is not None:
        form = ObservationForm(
            dict(sorted(keys.observation.images.items())),
            dict(sorted(keys.observation.states.items())),
        )
    if keys.action_space is not None:
        return WireSpaces(_chunk(keys.action_space.space(), keys.action_horizon), form)
    try:
        observation, action = task_spaces()
    except Exception as error:
        raise ConfigError(
            f"env {section.name!r}: what acts is not known here. Set action_space, for example "
            "{n: 2} or {low: -1, high: 1, shape: [6]}, or let task name a Gymnasium environment "
            f"that can be made here ({section.task!r} cannot: {error})"
        ) from error
    form = ObservationForm.of_space(observation) if form is None else form
    return WireSpaces(_chunk(action, keys.action_horizon), form)


def _chunk(space: gym.Space[Any], horizon: int) -> gym.Space[Any]:
    """Return the space of `horizon` actions; that of one is the space itself."""
    from gymnasium import spaces

    if horizon == 1:
        return space
    if isinstance(space, spaces.Box):
        low, high = (np.stack([bound] * horizon) for bound in (space.low, space.high))
        return spaces.Box(low, high, dtype=space.dtype.type)
    if isinstance(space, spaces.Discrete):
        return spaces.MultiDiscrete([space.n] * horizon, start=[space.start] * horizon)
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = (np.stack([part] * horizon) for part in (space.nvec, space.start))
        return spaces.MultiDiscrete(nvec, start=start)
    raise ConfigError(f"chunks of actions of {space} are not supported; use action_horizon: 1")
