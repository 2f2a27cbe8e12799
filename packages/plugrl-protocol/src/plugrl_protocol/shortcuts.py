"""Read messages whose form was seen before, looking only at what can have changed.

Once a frame has passed `parse_infer` and its like, the next one of its `Template` needs its values
checked, and no more. A `Shortcut` is made from a parsed message and the arrays of its frame; where
parsing had to convert something there is none, and the long way is taken each time.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np

from plugrl_protocol.codec import Decoder
from plugrl_protocol.messages import (
    Action,
    Feedback,
    Infer,
    Observation,
    check_env_indices,
    check_rewards,
    check_step_ids,
    check_steps,
    message_type,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from plugrl_protocol.codec import Limits
    from plugrl_protocol.templates import Array

    Build: TypeAlias = Callable[[list[Array]], Any]

_ARRAY_MARK: Final = object()


class Shortcut:
    """How to read further messages of one form.

    Attributes:
        kind: their ``message_type``.
        build: makes a message of the arrays of its frame. Raises `MalformedMessageError` for values
            that break the page; gives None where only the long way can tell.
    """

    __slots__ = ("build", "kind")

    def __init__(self, kind: str, build: Build) -> None:
        self.kind, self.build = kind, build


class _Places:
    """Where each array of a message lies among the arrays of its frame."""

    def __init__(self, arrays: list[Array]) -> None:
        self._places = {id(array): place for place, array in enumerate(arrays)}

    def of(self, array: Array) -> int:
        """Give the place; KeyError when parsing made a new array."""
        return self._places[id(array)]

    def observation(self, seen: Observation) -> Build:
        images = [(name, self.of(array)) for name, array in seen.images.items()]
        states = [(name, self.of(array)) for name, array in seen.states.items()]
        text = self.of(seen.text)

        def build(arrays: list[Array]) -> Any:
            draft: Any = _ObservationDraft()
            draft.images = {name: arrays[place] for name, place in images} if images else {}
            draft.states = {name: arrays[place] for name, place in states} if states else {}
            draft.text = arrays[text]
            draft.__class__ = Observation
            return draft

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


# A frozen value takes a microsecond to make, because each field passes through object.__setattr__.
# A draft has the same slots, is filled freely, and then becomes the frozen value.


class _ObservationDraft:
    __slots__ = Observation.__slots__


class _InferDraft:
    __slots__ = Infer.__slots__


class _ActionDraft:
    __slots__ = Action.__slots__


class _FeedbackDraft:
    __slots__ = Feedback.__slots__


def shorten(kind: str, message: object, arrays: list[Array]) -> Shortcut:
    """Make the shortcut for messages like this one.

    Args:
        kind: the ``message_type``.
        message: parsed from the frame that ``arrays`` belong to.
        arrays: all arrays of that frame, in its order.

    Returns:
        A shortcut that always gives None where there is none.
    """
    places = _Places(arrays)
    build: Build = _take_the_long_way
    with contextlib.suppress(KeyError):
        if isinstance(message, Infer):
            build = _shorten_infer(message, places)
        elif isinstance(message, Feedback):
            build = _shorten_feedback(message, places)
        elif isinstance(message, Action):
            build = _shorten_action(message, places)
    return Shortcut(kind, build)


def _take_the_long_way(arrays: list[Array]) -> None:
    """Give nothing; see `Shortcut.build`."""


class Reader:
    """Decode and parse the frames of one connection.

    Args:
        limits: what decoding one frame may cost.
        parsers: ``message_type`` to the function that checks such a message.
        check_turn: raises where a message of a type is out of turn; knows at least the types that
            ``parsers`` lacks. Called before the message is looked at.
    """

    def __init__(
        self,
        limits: Limits,
        parsers: Mapping[str, Callable[[dict[str, Any]], Any]],
        check_turn: Callable[[str], object],
    ) -> None:
        self._decoder = Decoder(limits)
        self._templates = self._decoder.templates
        self._parsers = parsers
        self._check_turn = check_turn

    def read(self, frame: bytes) -> Any:
        """Read one frame.

        Raises:
            CodecError: it does not decode.
            ProtocolError: it is no message of the page, or out of turn.
        """
        template = self._templates.get(len(frame))
        if template is not None and template.memo is not None:
            arrays = template.read(frame)
            if arrays is not None:
                shortcut: Shortcut = template.memo
                self._check_turn(shortcut.kind)
                message = shortcut.build(arrays)
                if message is None:
                    message = self._parsers[shortcut.kind](template.tree(arrays))
                return message
        tree = self._decoder.decode(frame)
        kind = message_type(tree)
        self._check_turn(kind)
        message = self._parsers[kind](tree)
        template = self._decoder.fitting
        if template is not None:
            template.memo = shorten(kind, message, arrays_of(tree))
        return message


def make_infer(
    env_indices: Array, step_ids: Array, observation: Observation, reuse: Array | None
) -> Infer:
    """Make an `Infer`, faster than by its own constructor."""
    draft: Any = _InferDraft()
    draft.env_indices, draft.step_ids = env_indices, step_ids
    draft.observation, draft.reuse = observation, reuse
    draft.__class__ = Infer
    made: Infer = draft
    return made


# Each of these remembers the bytes of the last env indices that passed, not their array: that may
# be a view on a frame of many megabytes.


def _shorten_infer(like: Infer, places: _Places) -> Build:
    at_ids, at_steps = places.of(like.env_indices), places.of(like.step_ids)
    at_reuse = None if like.reuse is None else places.of(like.reuse)
    reuse = None if like.reuse is None else like.reuse.tobytes()
    observe = places.observation(like.observation)
    passed = b""

    def build(arrays: list[Array]) -> Any:
        nonlocal passed
        # How many rows are sent depends on the values of reuse.
        if at_reuse is not None and arrays[at_reuse].tobytes() != reuse:
            return None
        env_indices, step_ids = arrays[at_ids], arrays[at_steps]
        indices = env_indices.tobytes()
        if indices != passed:
            check_env_indices(env_indices, "infer.env_indices")
            passed = indices
        check_step_ids(step_ids, "infer.step_ids")
        given = None if at_reuse is None else arrays[at_reuse]
        return make_infer(env_indices, step_ids, observe(arrays), given)

    return build


def _shorten_feedback(like: Feedback, places: _Places) -> Build:
    at_ids, at_step_ids = places.of(like.env_indices), places.of(like.step_ids)
    at_rewards = places.of(like.rewards)
    at_terminated, at_truncated = places.of(like.terminated), places.of(like.truncated)
    at_steps = None if like.steps is None else places.of(like.steps)
    observe = places.observation(like.observation)
    info = places.tree(like.info)
    passed = b""

    def build(arrays: list[Array]) -> Any:
        nonlocal passed
        draft: Any = _FeedbackDraft()
        env_indices, step_ids, rewards = arrays[at_ids], arrays[at_step_ids], arrays[at_rewards]
        indices = env_indices.tobytes()
        if indices != passed:
            check_env_indices(env_indices, "feedback.env_indices")
            passed = indices
        steps = None
        if at_steps is not None:
            steps = arrays[at_steps]
            check_steps(steps)
        check_step_ids(step_ids, "feedback.step_ids")
        check_rewards(rewards)
        draft.env_indices, draft.step_ids, draft.steps = env_indices, step_ids, steps
        draft.observation, draft.rewards = observe(arrays), rewards
        draft.terminated, draft.truncated = arrays[at_terminated], arrays[at_truncated]
        draft.info = _fill(info, arrays) if info else {}
        draft.__class__ = Feedback
        return draft

    return build


def make_action(env_ids: Array, action: Array) -> Action:
    """Make an `Action`, faster than by its own constructor."""
    draft: Any = _ActionDraft()
    draft.env_ids, draft.action = env_ids, action
    draft.__class__ = Action
    made: Action = draft
    return made


def _shorten_action(like: Action, places: _Places) -> Build:
    at_ids, at_action = places.of(like.env_ids), places.of(like.action)
    passed = b""

    def build(arrays: list[Array]) -> Action:
        nonlocal passed
        env_ids = arrays[at_ids]
        indices = env_ids.tobytes()
        if indices != passed:
            check_env_indices(env_ids, "action.data.env_ids")
            passed = indices
        return make_action(env_ids, arrays[at_action])

    return build
