"""`TaskSpaces`: the spaces that one policy sees of several tasks, and how each task fits in.

Pure functions of spaces; knows nothing about environments, and does not load torch.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces

from rlightning.errors import ConfigError
from rlightning.types import is_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlightning.config import MultitaskConfig
    from rlightning.types import EnvMeta

__all__ = ["TaskFit", "TaskSpaces", "same_form", "task_names"]

Space = spaces.Space[Any]

_CHOICES = (
    "Make them equal with wrappers (`env.wrappers`), set multitask.pad_spaces: true (observation "
    "vectors, Box vectors and Discrete actions are then padded to the longest), or train a policy "
    "for each"
)


def task_names(names: Sequence[str]) -> list[str]:
    """Return a name per entry of ``env``, fit for a metric: unique, and without slashes.

    Entries that share a name are numbered from 1 in their order: ``arm``, ``arm`` become
    ``arm_1``, ``arm_2``.
    """
    plain = [name.replace("/", "-") for name in names]
    taken = {name for name in plain if plain.count(name) == 1}
    named: list[str] = []
    for name in plain:
        own, number = name, 0
        while own in taken or (number == 0 and plain.count(name) > 1):
            number += 1
            own = f"{name}_{number}"
        named.append(name if plain.count(name) == 1 else own)
        taken.add(named[-1])
    return named


def same_form(one: Space | None, other: Space | None) -> bool:
    """Return whether batches of two spaces can be joined: equal but for the bounds of boxes."""
    if isinstance(one, spaces.Box) and isinstance(other, spaces.Box):
        return one.shape == other.shape and one.dtype.kind == other.dtype.kind
    if isinstance(one, spaces.Dict) and isinstance(other, spaces.Dict):
        return one.spaces.keys() == other.spaces.keys() and all(
            same_form(part, other.spaces[key]) for key, part in one.spaces.items()
        )
    if isinstance(one, spaces.Tuple) and isinstance(other, spaces.Tuple):
        return len(one.spaces) == len(other.spaces) and all(
            map(same_form, one.spaces, other.spaces)
        )
    return bool(one == other)


@dataclasses.dataclass(frozen=True)
class TaskSpaces:
    """What one policy sees of all tasks of a run.

    Attributes:
        tasks: their names, in the order of the configuration.
        observation: of any task, padded; what stands under ``"observation"`` where there is more.
        action_space: of any task, padded. A Discrete one starts at 0.
        tells_task: whether observations say which task they are of.
        masks_actions: whether observations say which part of the action space their task has.
    """

    tasks: tuple[str, ...]
    observation: Space
    action_space: Space
    tells_task: bool
    masks_actions: bool

    @classmethod
    def of(
        cls, tasks: Sequence[str], metas: Sequence[EnvMeta], options: MultitaskConfig
    ) -> TaskSpaces:
        """Return what serves workers of these tasks.

        Args:
            tasks: the task of each worker.
            metas: their own spaces.
            options: the ``multitask`` section.

        Raises:
            ConfigError: spaces differ, and cannot be padded or are not to be; names two tasks,
                their spaces and what can be done.
        """
        observations = [meta.observation_space for meta in metas]
        actions = [meta.action_space for meta in metas]
        pad = options.pad_spaces
        observation, action = observations[0], actions[0]
        odd = next((i for i, o in enumerate(observations) if not same_form(o, observation)), None)
        if odd is not None:
            if not (pad and _all(_is_vector, observations)):
                raise _refusal("observation", tasks, observations, odd, pad=pad)
            observation = _padded_box(observations, outside=0.0)
        odd = next((i for i, other in enumerate(actions) if other != action), None)
        if odd is not None:
            if not (pad and (_all(_is_vector, actions) or _all(_is_discrete, actions))):
                raise _refusal("action", tasks, actions, odd, pad=pad)
            action = _common_actions(actions)
        masks = len({_choices(space) for space in actions}) > 1
        return cls(tuple(dict.fromkeys(tasks)), observation, action, options.task_id, masks)

    @property
    def observation_space(self) -> Space:
        """What the policy observes: the observation, or a Dict of it and what is told beside."""
        parts: dict[str, Space] = {"observation": self.observation}
        if self.masks_actions:
            parts["action_mask"] = spaces.MultiBinary(_choices(self.action_space))
        if self.tells_task:
            parts["task"] = spaces.Discrete(len(self.tasks))
        return self.observation if len(parts) == 1 else spaces.Dict(parts)

    def seen(self, meta: EnvMeta) -> EnvMeta:
        """Return an environment's spaces as the policy sees them."""
        return dataclasses.replace(
            meta,
            observation_space=self.observation_space,
            action_space=self.action_space,
            masked_actions=self.masks_actions,
        )

    def fit(self, task: str, observation_space: Space, action_space: Space) -> TaskFit:
        """Return how an environment of `task` with these spaces of its own fits in.

        Raises:
            ConfigError: it does not, for example because ``evaluate_cfg`` has changed its spaces.
        """
        fits = same_form(observation_space, self.observation) or (
            0 < _length(observation_space) <= _length(self.observation)
        )
        own, all_there_are = _choices(action_space), _choices(self.action_space)
        acts = action_space == self.action_space or (
            type(action_space) is type(self.action_space)
            and 0 < own <= all_there_are
            and (self.masks_actions or own == all_there_are)
        )
        if not (fits and acts):
            raise ConfigError(
                f"task {task!r} has the spaces {observation_space} and {action_space}, which do "
                f"not fit the run's, {self.observation} and {self.action_space}; does evaluate_cfg "
                "change what the environment observes?"
            )
        return TaskFit(self, self.tasks.index(task), observation_space, action_space)


class TaskFit:
    """Translates between the spaces of one environment and those that the policy sees.

    Args:
        common: what the policy sees.
        task: the position of the environment's task.
        observation_space: the environment's own.
        action_space: the environment's own.

    Attributes:
        common: what the policy sees.
        translates: whether actions of the policy are not the environment's own as they are.
    """

    def __init__(
        self, common: TaskSpaces, task: int, observation_space: Space, action_space: Space
    ) -> None:
        self.common = common
        self._task = np.int64(task)
        pads = not same_form(observation_space, common.observation)
        self._width = common.observation.shape[0] if pads else None  # type: ignore[index]
        self.translates = action_space != common.action_space
        self._mask = np.zeros(0, np.int8)
        if common.masks_actions:
            self._mask = np.zeros(_choices(common.action_space), np.int8)
            self._mask[: _choices(action_space)] = 1
        self._start = 0
        self._scale: Any = None
        if isinstance(action_space, spaces.Discrete) and self.translates:
            self._start = int(action_space.start)
            self.translates = self._start != 0
        elif isinstance(action_space, spaces.Box) and self.translates:
            self._size = int(action_space.shape[0])
            self._scale, self._shift = _stretch(common.action_space, action_space)

    def observation(self, own: Any, rows: int | None) -> Any:
        """Return what the policy sees of an observation of `rows` rows; None: one, without axis."""
        padded = own if self._width is None else _pad(own, self._width)
        common = self.common
        if not (common.tells_task or common.masks_actions):
            return padded
        lead = () if rows is None else (rows,)
        seen = {"observation": padded}
        if common.masks_actions:
            seen["action_mask"] = np.broadcast_to(self._mask, (*lead, self._mask.size)).copy()
        if common.tells_task:
            seen["task"] = np.full(lead, self._task)
        return seen

    def own_action(self, action: Any) -> Any:
        """Return the environment's own part of actions ``[..., D]``, or ``[...]`` if Discrete."""
        if not self.translates:
            return action
        if self._scale is None:
            return action + self._start
        own = action[..., : self._size]
        if is_tensor(own):
            return own * own.new_tensor(self._scale) + own.new_tensor(self._shift)
        return own * self._scale + self._shift

    def common_action(self, own: Any) -> Any:
        """Return the policy's form of the environment's own actions; undoes `own_action`."""
        if not self.translates:
            return own
        if self._scale is None:
            return np.asarray(own) - self._start
        width = int(self.common.action_space.shape[0])  # type: ignore[index]
        return _pad((np.asarray(own) - self._shift) / self._scale, width)


# ---- spaces ------------------------------------------------------------------------------------


def _all(test: Any, items: Sequence[Any]) -> bool:
    return all(map(test, items))


def _is_vector(space: Any) -> bool:
    return isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype.kind == "f"


def _length(space: Any) -> int:
    """Return how many numbers a vector has; 0 for other spaces."""
    return int(space.shape[0]) if _is_vector(space) else 0


def _is_discrete(space: Any) -> bool:
    return isinstance(space, spaces.Discrete)


def _choices(space: Any) -> int:
    """Return the length of the mask of an action space; 0 for one that has none."""
    return int(space.n) if isinstance(space, spaces.Discrete) else _length(space)


def _common_actions(actions: Sequence[Any]) -> Space:
    if _is_discrete(actions[0]):
        return spaces.Discrete(max(int(space.n) for space in actions))
    return _padded_box(actions, outside=None)


def _padded_box(boxes: Sequence[Any], *, outside: float | None) -> spaces.Box:
    """Return the Box that holds all; entries that a box lacks have the value `outside`, if any."""
    width = max(box.shape[0] for box in boxes)
    low, high = np.full(width, np.inf), np.full(width, -np.inf)
    for box in boxes:
        size = box.shape[0]
        low[:size] = np.minimum(low[:size], box.low)
        high[:size] = np.maximum(high[:size], box.high)
        if outside is not None and size < width:
            low[size:] = np.minimum(low[size:], outside)
            high[size:] = np.maximum(high[size:], outside)
    dtype: Any = np.result_type(*(box.dtype for box in boxes))
    return spaces.Box(low.astype(dtype), high.astype(dtype), dtype=dtype)


def _stretch(common: Any, own: spaces.Box) -> tuple[Any, Any]:
    """Return scale and shift of the map that takes the range of `common` to that of `own`.

    The identity where both are equal, or one is not bounded: then the environment's border clips.
    """
    size = own.shape[0]
    low, high = common.low[:size].astype(np.float64), common.high[:size].astype(np.float64)
    own_low, own_high = own.low.astype(np.float64), own.high.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = (own_high - own_low) / (high - low)
        shift = own_low - low * scale
    bounded = np.isfinite(scale) & np.isfinite(shift) & (scale > 0)
    scale, shift = np.where(bounded, scale, 1.0), np.where(bounded, shift, 0.0)
    return scale.astype(np.float32), shift.astype(np.float32)


def _refusal(
    kind: str, tasks: Sequence[str], found: Sequence[Any], index: int, *, pad: bool
) -> ConfigError:
    reason = _CHOICES
    if pad:
        reason = (
            "multitask.pad_spaces pads vectors (one-dimensional float boxes) and, of actions, "
            "Discrete ones; make these equal with wrappers (`env.wrappers`), or train a policy for "
            "each"
        )
    return ConfigError(
        f"env {tasks[index]!r} has the {kind} space {found[index]}, env {tasks[0]!r} has "
        f"{found[0]}; one policy needs one {kind} space. {reason}"
    )


def _pad(vector: Any, width: int) -> Any:
    """Return ``[..., d]`` numbers with zeros behind, ``[..., width]``."""
    shape = (*vector.shape[:-1], width)
    padded = vector.new_zeros(shape) if is_tensor(vector) else np.zeros(shape, vector.dtype)
    padded[..., : vector.shape[-1]] = vector
    return padded
