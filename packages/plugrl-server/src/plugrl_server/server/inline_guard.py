"""Whether work is quick enough to be done on the event loop, measured and never assumed."""

from __future__ import annotations

from collections import deque

__all__ = ["InlineGuard"]

_TRUSTED_AFTER = 20
_WINDOW = 21
_SMOOTHING = 0.02
_SLOW = 20.0
_SLOW_SHARE = 0.05
_FAR_TOO_SLOW = 50.0


class InlineGuard:
    """Watches how long inferences and the storing of frames take.

    Work starts in its thread. After 20 calls whose median stays under the limit it may run on the
    event loop. It goes back to its thread

    * at once, for 20 calls at least, when one call takes fifty times the limit: the loop is held up
      by one such call at most;
    * while the median is above the limit, or one call in twenty takes twenty times the limit.

    A median and a share, because on a busy machine any call may be interrupted for a while, which
    would hold up a thread of its own just as well.

    Args:
        limit_s: in seconds; 0 never allows it.

    Attributes:
        allows: whether the next piece of work may run on the event loop.
        infer_s: the recent mean duration of an inference.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.infer_s = 0.0
        self._calls = 0
        self._slow_share = 0.0
        self._recent: deque[float] = deque(maxlen=_WINDOW)
        self.allows = False

    def note_infer(self, duration_s: float) -> None:
        """Tell how long an inference took."""
        self.infer_s += 0.1 * (duration_s - self.infer_s)
        self._recent.append(duration_s)
        self._calls += 1
        self._judge(duration_s)

    def note_feedback(self, duration_s: float) -> None:
        """Tell how long it took to store frames."""
        self._judge(duration_s)

    def _judge(self, duration_s: float) -> None:
        limit_s = self._limit_s
        is_slow = duration_s > _SLOW * limit_s
        self._slow_share += _SMOOTHING * (is_slow - self._slow_share)
        if duration_s > _FAR_TOO_SLOW * limit_s:
            self._calls = 0
        if self.allows and duration_s <= limit_s:
            return  # a call within the limit takes nothing away
        self.allows = (
            self._calls >= _TRUSTED_AFTER
            and self._slow_share <= _SLOW_SHARE
            and sorted(self._recent)[len(self._recent) // 2] <= limit_s
        )
