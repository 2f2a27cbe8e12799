"""Whether work is quick enough to be done on the event loop, measured and never assumed."""

from __future__ import annotations

__all__ = ["InlineGuard"]

_TRUSTED_AFTER = 20
_SMOOTHING = 0.1
_ONE_SLOW_CALL = 5.0


class InlineGuard:
    """Watches how long inferences and the storing of frames take.

    Work starts in its thread. After 20 calls whose mean stays under the limit it may run on the
    event loop. It goes back to its thread, for 20 calls at least, when the mean passes the limit or
    when one call takes five times as long: the loop is held up by one slow call at most.

    Args:
        limit_s: in seconds; 0 never allows it.

    Attributes:
        infer_s: the recent mean duration of an inference.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.infer_s = 0.0
        self._feedback_s = 0.0
        self._calls = 0

    def allows(self) -> bool:
        """Whether the next piece of work may run on the event loop."""
        return self._calls >= _TRUSTED_AFTER

    def note_infer(self, duration_s: float, *, inline: bool) -> None:
        """Tell how long an inference took, and where."""
        del inline
        self.infer_s += _SMOOTHING * (duration_s - self.infer_s)
        self._judge(duration_s, self.infer_s)

    def note_feedback(self, duration_s: float) -> None:
        """Tell how long it took to store a message's frames."""
        self._feedback_s += _SMOOTHING * (duration_s - self._feedback_s)
        self._judge(duration_s, self._feedback_s, counts=False)

    def _judge(self, duration_s: float, mean_s: float, *, counts: bool = True) -> None:
        if mean_s > self._limit_s or duration_s > _ONE_SLOW_CALL * self._limit_s:
            self._calls = 0
        elif counts:
            self._calls += 1
