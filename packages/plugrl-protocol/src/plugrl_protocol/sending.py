"""Check and encode messages, looking only at what can have changed since one of the same form.

The counterpart of `plugrl_protocol.shortcuts`: a message whose arrays have the names, dtypes and
shapes of an earlier one needs its values checked, and is filled into the bytes that stay the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar

import numpy as np

from plugrl_protocol.codec import Decoder, Encoder
from plugrl_protocol.messages import (
    Action,
    Feedback,
    Infer,
    check_env_indices,
    check_rewards,
    check_step_ids,
    check_steps,
)
from plugrl_protocol.templates import Filler, Spec, spec_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugrl_protocol.codec import Limits
    from plugrl_protocol.templates import Array

Sent = TypeVar("Sent", Infer, Feedback, Action)
Names: TypeAlias = "tuple[str | None, ...]"

_MAX_FORMS: Final = 64


def outline(message: Infer | Feedback | Action) -> tuple[Names, list[Array]] | None:
    """List the names in a message that is to be sent, and its arrays in the order of its frame.

    Returns:
        None where there is more to it: ``info``, or a wrong ``reuse``.
    """
    if isinstance(message, Action):
        return (), [message.env_ids, message.action]
    seen = message.observation
    images, states = seen.images, seen.states
    names = (*images, None, *states)
    if isinstance(message, Infer):
        arrays: list[Array] = [
            *images.values(), *states.values(), seen.text, message.env_indices, message.step_ids
        ]  # fmt: skip
        if message.reuse is not None:
            if len(seen) + message.reuse.tolist().count(True) != len(message.reuse):
                return None
            arrays.append(message.reuse)
        return names, arrays
    if message.info:
        return None
    arrays = [
        message.env_indices, message.step_ids, *images.values(), *states.values(), seen.text,
        message.rewards, message.terminated, message.truncated,
    ]  # fmt: skip
    if message.steps is not None:
        arrays.append(message.steps)
    return names, arrays


class Form:
    """What messages of one form have in common.

    Attributes:
        kind: the class of the messages.
        names: as `outline` gives them.
        filler: puts the frames together.
    """

    __slots__ = ("_indices", "_steps", "filler", "kind", "names")

    def __init__(self, kind: type, names: Names, filler: Filler) -> None:
        self.kind, self.names, self.filler = kind, names, filler
        # Values that passed before; an empty array never does.
        self._indices = self._steps = b""

    def check_values(self, message: Infer | Feedback | Action) -> None:
        """Check what the form does not tell.

        Raises:
            MalformedMessageError: the peer would refuse the message.
        """
        if isinstance(message, Action):
            return  # its env_ids were checked when they came
        kind = "infer" if isinstance(message, Infer) else "feedback"
        indices = message.env_indices.tobytes()
        if indices != self._indices:
            check_env_indices(message.env_indices, f"{kind}.env_indices")
            self._indices = indices
        if isinstance(message, Feedback):
            if message.steps is not None:
                steps = message.steps.tobytes()
                if steps != self._steps:
                    check_steps(message.steps)
                    self._steps = steps
            check_step_ids(message.step_ids, "feedback.step_ids")
            check_rewards(message.rewards)
        else:
            check_step_ids(message.step_ids, "infer.step_ids")


class Sender:
    """Check and encode the messages of one connection: `check` one, then ask for its `frame`.

    Args:
        limits: what the peer accepts.
    """

    def __init__(self, limits: Limits) -> None:
        self._encoder = Encoder(limits)
        self._limits = limits
        self._forms: dict[Any, Form] = {}
        self._seen: set[Any] = set()
        self._last: dict[int, Form] = {}  # by the number of arrays
        # Of the message that was checked last.
        self._form: Form | None = None
        self._arrays: list[Array] = []
        self._wire: dict[str, Any] = {}

    def encode(self, message: dict[str, Any]) -> bytes:
        """Encode a message as it is; see `Encoder.encode`."""
        return self._encoder.encode(message)

    def check(self, message: Sent, parse: Callable[[dict[str, Any]], Sent]) -> Sent:
        """Check a message before it is sent.

        Args:
            message: as the caller made it.
            parse: checks it in full, by its map.

        Returns:
            The message as the peer will read it.

        Raises:
            MalformedMessageError: the peer would refuse it.
        """
        key: Any = None
        try:
            found = outline(message)
            if found is not None:
                names, self._arrays = found
                specs: list[Spec] = list(map(spec_of, self._arrays))
                form = self._last.get(len(specs))
                if (
                    form is None
                    or form.filler.specs != specs
                    or form.names != names
                    or form.kind is not type(message)
                ):
                    key = (type(message), names, *specs)
                    form = self._forms.get(key)
                if form is not None:
                    self._last[len(specs)] = self._form = form
                    form.check_values(message)
                    return message
        except AttributeError:
            pass  # something that is no array: the long way tells what
        self._form = None
        self._wire = message.to_wire()
        checked = parse(self._wire)
        if key is not None and key == _key(checked):
            self._keep(key)
        else:  # parsing converts, for example integer states
            self._wire = checked.to_wire()
        return checked

    def frame(self) -> bytes:
        """Encode the message that was checked last."""
        if self._form is not None:
            return self._form.filler.fill(self._arrays)
        return self._encoder.encode(self._wire)

    def _keep(self, key: Any) -> None:
        """Note a form; when it comes for the second time, keep what will not change."""
        if key not in self._seen:
            if len(self._seen) >= _MAX_FORMS:
                self._seen.clear()
            self._seen.add(key)
            return
        kind, names, *specs = key
        frame = self._encoder.encode(self._wire)
        decoder = Decoder(self._limits)
        decoder.decode(frame)
        decoder.decode(frame)
        template = decoder.fitting
        plain = all(array_type is np.ndarray for array_type, _, _ in specs)
        if plain and template is not None and len(template.between) == len(specs) + 1:
            if len(self._forms) >= _MAX_FORMS:
                self._forms.clear()
            self._forms[key] = Form(kind, names, Filler(specs, template.between))


def _key(message: Infer | Feedback | Action) -> Any:
    """Tell forms apart: messages of one form differ in the data of their arrays alone."""
    found = outline(message)
    return None if found is None else (type(message), found[0], *map(spec_of, found[1]))
