"""What two workers do that take turns: the workers' side of `rlightning.runtime.turns`.

Either of them stops where it is when the other one is gone, when its own object raises, and when
its caller says anything at all.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rlightning.runtime.channel import (
    ChannelClosedError,
    Listener,
    Watch,
    connect,
    packed,
    unpacked,
)
from rlightning.runtime.frames import UnframeableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rlightning.runtime.channel import Channel

__all__ = ["ANSWER", "ASK", "CALLS", "LEAVE"]

ASK, ANSWER, LEAVE = "turns.ask", "turns.answer", "turns.leave"
_CONNECT_S = 30.0
_REPORT_ROUNDS = 16
_REPORT_AFTER_S = 0.02
"""How many rounds, or after how long, the asker reports: enough to disturb the two but seldom."""


def _ask(
    target: Any,
    caller: Channel,
    say: Callable[..., None],
    method: str,
    rounds: int,
    as_arrays: bool,  # noqa: FBT001  # a call between processes
) -> list[Any]:
    """Play `rounds` rounds as the asker: take an answer, call `method` with it, ask again.

    Args:
        target: the worker's object.
        caller: who started this; whatever it says ends the rounds.
        say: tells the caller something: first where to connect to, then reports.
        method: of the worker's object.
        rounds: how many.
        as_arrays: whether `method` gets arrays where there are tensors.

    Returns:
        How many rounds were played, and the last one where it could not be reported.
    """
    listener = Listener()
    say(listener.path)
    reports = _Reports(say)
    link: Channel | None = None
    played = 0
    try:
        if not Watch(listener, caller).wait(_CONNECT_S)[0]:
            return [0, None]
        link = listener.accept(_CONNECT_S)
        watch, act = Watch(link, caller), getattr(target, method)
        while played < rounds and not watch.wait()[1]:
            answer = link.receive_frame()
            outcome = act(unpacked(answer, as_arrays=as_arrays))
            played += 1
            try:
                question = b"".join(packed(outcome))
            except UnframeableError:
                return [played, [unpacked(answer), outcome]]
            try:
                if played < rounds:
                    link.send([question])
            finally:
                reports.add(answer, question)
    except ChannelClosedError:
        pass  # nobody answers any more
    finally:
        listener.close()
        if link is not None:
            link.close()
        reports.send()
    return [played, None]


def _answer(
    target: Any,
    caller: Channel,
    _: Callable[..., None],
    path: str,
    method: str,
    rounds: int,
    question: Any,
    further: Sequence[Any],
) -> list[Any]:
    """Play `rounds` rounds as the answerer: call `method` with a question, send what it returns.

    Args:
        target: the worker's object.
        caller: who started this; whatever it says ends the rounds.
        path: where the asker listens.
        method: of the worker's object; takes and returns lists of one.
        rounds: how many.
        question: of the first round.
        further: arguments of `method`, after the question.

    Returns:
        How many questions were answered, and the last answer.
    """
    answered = 0
    answer: Any = None
    try:
        link = connect(path, _CONNECT_S)
    except ChannelClosedError:
        return [answered, answer]
    watch = Watch(link, caller)
    try:
        while True:
            (answer,) = getattr(target, method)([question], *further)
            answered += 1
            link.send(packed(answer))
            if answered == rounds or watch.wait()[1]:
                break
            question = link.receive()
    except (ChannelClosedError, UnframeableError):
        pass  # the caller hands the last answer on
    finally:
        link.close()
    return [answered, answer]


def _leave(target: Any, caller: Channel, say: Callable[..., None]) -> None:
    """Do nothing: that the call has come has ended the rounds."""


class _Reports:
    """What the asker has still to tell: each answer, and what came of it, as frames."""

    def __init__(self, say: Callable[..., None]) -> None:
        self._say = say
        self._frames: list[bytes] = []
        self._sent_s = time.monotonic()

    def add(self, answer: bytes, outcome: bytes) -> None:
        self._frames += (answer, outcome)
        waits = len(self._frames) < 2 * _REPORT_ROUNDS
        if not waits or time.monotonic() - self._sent_s > _REPORT_AFTER_S:
            self.send()

    def send(self) -> None:
        if self._frames:
            self._say(None, *self._frames)
            self._frames = []
        self._sent_s = time.monotonic()


CALLS: dict[str, Callable[..., Any]] = {ASK: _ask, ANSWER: _answer, LEAVE: _leave}
"""Calls that a worker's host carries out itself, with its object, the channel to the caller and a
function that says something to the caller before the answer."""
