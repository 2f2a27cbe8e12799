"""Rebuild a message whose form was checked before, looking only at what can have changed.

Frames of one connection look alike: same keys, dtypes and shapes, other data (see `Decoder`). Once
such a frame has passed `parse_infer` and its like, the next one needs its values checked, and no
more. A shortcut is made from a parsed message and the frame's arrays in order; where parsing had to
convert something there is none, and the long way is taken each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from plugrl_protocol.messages import (
    Action,
    Feedback,
    Infer,
    Observation,
    check_env_indices,
    check_rewards,
    check_step_ids,
    check_steps,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugrl_protocol.codec import Array

_ARRAY_MARK: Final = object()


class _Places:
    """Where each array of a message lies among the arrays of its frame."""

    def __init__(self, arrays: list[Array]) -> None:
        self._places = {id(array): place for place, array in enumerate(arrays)}

    def of(self, array: Array) -> int:
        """Give the place; KeyError when parsing made a new array."""
        return self._places[id(array)]

    def observation(self, seen: Observation) -> Callable[[list[Array]], Observation]:
        images = [(name, self.of(array)) for name, array in seen.images.items()]
        states = [(name, self.of(array)) for name, array in seen.states.items()]
        text = self.of(seen.text)

        def build(arrays: list[Array]) -> Observation:
            return Observation(
                images={name: arrays[place] for name, place in images},
                states={name: arrays[place] for name, place in states},
                text=arrays[text],
            )

        return build

    def tree(self, value: Any) -> Any:
        """Mark the places of the arrays in a tree of maps and lists."""
        if isinstance(value, dict):
            return {key: self.tree(child) for key, child in value.items()}
        if isinstance(value, list):
            return [self.tree(child) for child in value]
        return (_ARRAY_MARK, self.of(value)) if isinstance(value, np.ndarray) else value


def _fill(tree: Any, arrays: list[Array]) -> Any:
    if isinstance(tree, dict):
        return {key: _fill(child, arrays) for key, child in tree.items()}
    if isinstance(tree, list):
        return [_fill(child, arrays) for child in tree]
    return arrays[tree[1]] if isinstance(tree, tuple) else tree


def arrays_of(tree: Any) -> list[Array]:
    """List the arrays of a decoded frame, in its order."""
    if isinstance(tree, np.ndarray):
        return [tree]
    if isinstance(tree, (dict, list)):
        children = tree.values() if isinstance(tree, dict) else tree
        return [array for child in children for array in arrays_of(child)]
    return []


def shorten(message: object, arrays: list[Array]) -> Callable[[list[Array]], Any] | None:
    """Make the shortcut for messages like this one.

    Args:
        message: parsed from the frame that ``arrays`` belong to.
        arrays: all arrays of that frame, in its order.

    Returns:
        A function from the arrays of a frame of the same form to its message; it raises
        `MalformedMessageError` for values that break the page. None where there is no shortcut.
    """
    places = _Places(arrays)
    try:
        if isinstance(message, Infer):
            return _shorten_infer(message, places)
        if isinstance(message, Feedback):
            return _shorten_feedback(message, places)
        if isinstance(message, Action):
            return _shorten_action(message, places)
    except KeyError:
        return None
    return None


def _shorten_infer(like: Infer, places: _Places) -> Callable[[list[Array]], Infer] | None:
    if like.reuse is not None:
        return None  # the number of rows that are sent depends on its values
    at_ids, at_steps = places.of(like.env_indices), places.of(like.step_ids)
    observe = places.observation(like.observation)

    def build(arrays: list[Array]) -> Infer:
        env_indices, step_ids = arrays[at_ids], arrays[at_steps]
        check_env_indices(env_indices, "infer.env_indices")
        check_step_ids(step_ids, "infer.step_ids")
        return Infer(env_indices=env_indices, step_ids=step_ids, observation=observe(arrays))

    return build


def _shorten_feedback(like: Feedback, places: _Places) -> Callable[[list[Array]], Feedback]:
    at_ids, at_step_ids = places.of(like.env_indices), places.of(like.step_ids)
    at_rewards = places.of(like.rewards)
    at_terminated, at_truncated = places.of(like.terminated), places.of(like.truncated)
    at_steps = None if like.steps is None else places.of(like.steps)
    observe = places.observation(like.observation)
    info = places.tree(like.info)

    def build(arrays: list[Array]) -> Feedback:
        env_indices, step_ids, rewards = arrays[at_ids], arrays[at_step_ids], arrays[at_rewards]
        steps = None if at_steps is None else arrays[at_steps]
        check_env_indices(env_indices, "feedback.env_indices")
        check_step_ids(step_ids, "feedback.step_ids")
        check_rewards(rewards)
        if steps is not None:
            check_steps(steps)
        return Feedback(
            env_indices=env_indices,
            step_ids=step_ids,
            observation=observe(arrays),
            rewards=rewards,
            terminated=arrays[at_terminated],
            truncated=arrays[at_truncated],
            info=_fill(info, arrays),
            steps=steps,
        )

    return build


def _shorten_action(like: Action, places: _Places) -> Callable[[list[Array]], Action]:
    at_ids, at_action = places.of(like.env_ids), places.of(like.action)

    def build(arrays: list[Array]) -> Action:
        check_env_indices(arrays[at_ids], "action.data.env_ids")
        return Action(env_ids=arrays[at_ids], action=arrays[at_action])

    return build
