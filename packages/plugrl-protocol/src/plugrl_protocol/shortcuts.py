"""Read and write messages whose form was seen before, looking only at what can have changed.

Frames of one connection look alike: same keys, dtypes and shapes, other data (see `Decoder`). Once
such a frame has passed `parse_infer` and its like, the next one needs its values checked, and no
more. A shortcut is made from a parsed message and the frame's arrays in order; where parsing had to
convert something there is none, and the long way is taken each time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import numpy as np

from plugrl_protocol.codec import Decoder, Encoder
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

    from plugrl_protocol.codec import Array, Limits

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


# -------------------------------------------------------------------------------------- sending

Form: TypeAlias = "tuple[Any, ...]"
Sent = TypeVar("Sent", Infer, Feedback, Action)
_MAX_FORMS: Final = 64
# Below this size a copy is cheaper than a buffer object.
_SMALL_BYTES: Final = 4096


def form_of(message: Infer | Feedback | Action) -> tuple[Form, list[Array]] | None:
    """Tell the form of a message that is to be sent, and its arrays in the order of its frame.

    Two messages of one form differ in the data of their arrays and in nothing else.

    Returns:
        None where there is more to it: ``reuse``, ``info``, or something that is no array.
    """
    try:
        if isinstance(message, Action):
            arrays: list[Any] = [message.env_ids, message.action]
            names: Form = ()
        else:
            seen = message.observation
            names = (*seen.images, None, *seen.states)
            arrays = [*seen.images.values(), *seen.states.values(), seen.text]
            if isinstance(message, Infer):
                if message.reuse is not None:
                    return None
                arrays += [message.env_indices, message.step_ids]
            else:
                if message.info:
                    return None
                arrays[:0] = [message.env_indices, message.step_ids]
                arrays += [message.rewards, message.terminated, message.truncated]
                if message.steps is not None:
                    arrays.append(message.steps)
        return (type(message), names, *[(a.dtype, a.shape) for a in arrays]), arrays
    except AttributeError:
        return None


def _check_values(message: Infer | Feedback | Action) -> None:
    """Check what the form of a message does not tell."""
    if isinstance(message, Action):
        return  # its env_ids were checked when they came
    kind = "infer" if isinstance(message, Infer) else "feedback"
    check_env_indices(message.env_indices, f"{kind}.env_indices")
    check_step_ids(message.step_ids, f"{kind}.step_ids")
    if isinstance(message, Feedback):
        check_rewards(message.rewards)
        if message.steps is not None:
            check_steps(message.steps)


class Sender:
    """Check and encode messages; one whose form was sent before is filled into prepared bytes."""

    def __init__(self, limits: Limits) -> None:
        self._encoder = Encoder(limits)
        self._limits = limits
        self._known: dict[Form, list[bytes]] = {}
        self._seen: set[Form] = set()

    def encode(self, message: dict[str, Any]) -> bytes:
        """Encode a message as it is; see `Encoder.encode`."""
        return self._encoder.encode(message)

    def prepare(
        self, message: Sent, parse: Callable[[dict[str, Any]], Sent]
    ) -> tuple[Sent, Callable[[], bytes]]:
        """Check a message before it is sent.

        Args:
            message: as the caller made it.
            parse: checks it in full, by its map.

        Returns:
            The message as the peer will read it, and a function that gives its frame.

        Raises:
            MalformedMessageError: the peer would refuse it.
        """
        found = form_of(message)
        if found is not None and found[0] in self._known:
            _check_values(message)
            return message, lambda: self._fill(*found)
        wire = message.to_wire()
        checked = parse(wire)
        again = form_of(checked)
        if found is None or again is None or found[0] != again[0]:
            # Parsing converts, for example integer states.
            return checked, lambda: self._encoder.encode(checked.to_wire())
        return checked, lambda: self._encode_form(wire, *found)

    def _encode_form(self, wire: dict[str, Any], form: Form, arrays: list[Array]) -> bytes:
        """Encode a message; at the second of its form, keep what will not change."""
        frame = self._encoder.encode(wire)
        if form not in self._seen:
            if len(self._seen) >= _MAX_FORMS:
                self._seen.clear()
            self._seen.add(form)
            return frame
        decoder = Decoder(self._limits)
        decoder.decode(frame)
        template = decoder.match(frame)
        if template is not None and len(template.between) == len(arrays) + 1:
            if len(self._known) >= _MAX_FORMS:
                self._known.clear()
            self._known[form] = template.between
        return frame

    def _fill(self, form: Form, arrays: list[Array]) -> bytes:
        """Put a frame of a known form together."""
        between = self._known[form]
        parts: list[Any] = [between[0]]
        for array, part in zip(arrays, between[1:], strict=True):
            if array.nbytes <= _SMALL_BYTES:
                parts.append(array.tobytes())
            else:
                parts.append(array if array.flags.c_contiguous else np.ascontiguousarray(array))
            parts.append(part)
        return b"".join(parts)
