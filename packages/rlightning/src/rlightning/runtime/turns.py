"""Two workers that answer each other, while who started them looks on.

One worker, the *asker*, makes something of an answer and asks again; the other, the *answerer*,
answers: an environment and a policy. Called one by one, each step of theirs would pass through the
process that calls them, twice, and wait for it. Instead both are told once how many rounds to play.
They are connected with each other, and the asker reports what was answered and what came of it, a
few rounds at a time.

It is the same work in the same order, and nothing is lost that would not be lost otherwise: when a
worker raises, dies, hangs or is called meanwhile, both stop where they are, and `Turns` knows which
answer has not reached the asker yet. The caller then goes on one call at a time.

Knows nothing about environments and policies.
"""

from __future__ import annotations

import collections
import math
from typing import TYPE_CHECKING, Any

from rlightning.errors import WorkerLostError
from rlightning.runtime.channel import packed
from rlightning.runtime.channel_future import ChannelFuture
from rlightning.runtime.frames import UnframeableError
from rlightning.runtime.turn_workers import ANSWER, ASK, LEAVE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlightning.runtime.base import Future, Handle

__all__ = ["Turns"]


class Turns:
    """The caller's side: gives what the two have done, round by round.

    Each round, `take_answer` is called first and `take_outcome` then. Either returns None where
    the two have stopped: then the caller makes the call itself.
    """

    def __init__(
        self, asker: Handle, answerer: Handle, asking: ChannelFuture, *, rounds: int
    ) -> None:
        self._asker = asker
        self._answerer = answerer
        self._asking = asking
        self._answering: Future | None = None
        self._leaving: Future | None = None
        self._wanted = rounds
        self._rounds: collections.deque[Any] = collections.deque()
        self._known = 0
        self._outcome: Any = None
        self._last: Any = None
        self._error: Exception | None = None
        self._is_over = False
        self.stumbled = False
        """Whether they stopped because something fitted no channel: they always will."""

    @classmethod
    def begin(
        cls,
        asker: Handle,
        answerer: Handle,
        *,
        ask: str,
        answer: str,
        question: Any,
        further: Sequence[Any] = (),
        rounds: int,
        as_arrays: bool = False,
    ) -> Turns | None:
        """Let two workers begin; None where they are not both reached over channels.

        Args:
            asker: calls `ask` with each answer, which returns the next question.
            answerer: calls `answer` with a list of one question, which returns a list of one.
            ask: a method of the asker's object.
            answer: a method of the answerer's object.
            question: of the first round.
            further: arguments of `answer`, after the question.
            rounds: how many rounds.
            as_arrays: whether `ask` gets arrays where answers have tensors.
        """
        if not (asker.is_near and answerer.is_near and _fits(question)):
            return None
        asking = asker.call(ASK, ask, rounds, as_arrays, timeout_s=math.inf)
        if not isinstance(asking, ChannelFuture):  # it is dead, as its next call will say
            return None
        asking.method = ask
        turns = cls(asker, answerer, asking, rounds=rounds)
        if asking.wait_for_part(asker.timeout_s) and asking.parts:
            call = [asking.parts.popleft(), answer, rounds, question, list(further)]
            turns._answering = answerer.call(ANSWER, *call, timeout_s=math.inf)
            if isinstance(turns._answering, ChannelFuture):
                turns._answering.method = answer
        return turns

    # ---- rounds --------------------------------------------------------------------------------

    def take_answer(self) -> Any:
        """Return what was answered in this round; None where it was not.

        Raises:
            Exception: what the answerer raised.
        """
        while not self._rounds and not self._is_over:
            self._wait()
        if self._rounds:
            answer, self._outcome = self._rounds.popleft()
            return answer
        answer, self._last = self._last, None
        if answer is None and self._error is not None:
            raise self._error
        return answer

    @property
    def has_outcome(self) -> bool:
        """Whether `take_outcome` returns something, or raises."""
        return self._outcome is not None or self._error is not None

    def take_outcome(self) -> Any:
        """Return what the asker made of the answer; None where it did not.

        Raises:
            Exception: what the asker raised.
        """
        outcome, self._outcome = self._outcome, None
        if outcome is None and self._error is not None:
            raise self._error
        return outcome

    def all_taken(self) -> bool:
        """Let the two stop; return whether all that they did was taken."""
        self.close()
        return not self._rounds and self._last is None

    def close(self) -> None:
        """Let the two stop, and wait until both can be called again."""
        self._stop()
        while not self._is_over:
            self._wait()

    # ---- the end -------------------------------------------------------------------------------

    def _stop(self) -> None:
        if not self._is_over and self._leaving is None:
            other = self._asker if self._answering is None else self._answerer
            self._leaving = other.call(LEAVE, timeout_s=math.inf)

    def _wait(self) -> None:
        """Wait for rounds, or for the end of it all."""
        if not self._asking.wait_for_part(self._asker.timeout_s / 2):
            # Which of the two hangs? The answerer has its own time to stop in. Then it is gone,
            # and the asker, which has nobody to wait for any more, has its own time too.
            self._stop()
            _await(self._answering, self._answerer)
            _await(self._asking, self._asker)
        if self._asking.parts:
            self._add(self._asking.parts.popleft())
        else:
            self._finish()

    def _add(self, frames: Sequence[Any]) -> None:
        """Take note of answers, each followed by what came of it."""
        self._rounds.extend(zip(frames[::2], frames[1::2], strict=True))
        self._known += len(frames) // 2

    def _finish(self) -> None:
        """Find out where both have stopped."""
        for future, worker in (
            (self._asking, self._asker),
            (self._answering, self._answerer),
            (self._leaving, self._answerer),
        ):
            _await(future, worker)
        asked = self._end_of(self._asking)
        while self._asking.parts:
            self._add(self._asking.parts.popleft())
        if asked is not None and asked[1] is not None:
            self._add(asked[1])
        answered = self._end_of(self._answering)
        if answered is not None and answered[0] == self._known + 1:
            self._last = answered[1]
        self._end_of(self._leaving)
        whole = asked is not None and answered is not None and self._leaving is None
        self.stumbled = whole and self._known < self._wanted
        self._is_over = True

    def _end_of(self, future: Future | None) -> Any:
        """Return what a worker ended with; None where it is lost, which its next call says."""
        try:
            return None if future is None else future.result()
        except WorkerLostError:
            return None
        except Exception as error:  # noqa: BLE001  # raised where its result is asked for
            self._error = self._error or error
            return None


def _fits(question: Any) -> bool:
    try:
        packed(question)
    except UnframeableError:
        return False
    return True


def _await(future: Future | None, worker: Handle) -> None:
    """Wait for an answer, for as long as the worker has from now on; then it counts as dead."""
    if isinstance(future, ChannelFuture):
        future.expect_within(worker.timeout_s)
        future.poll(worker.timeout_s + 1.0)
