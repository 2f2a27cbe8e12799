"""`RateLimiter`: holds sampling and inserting to a ratio. Pure counting; nothing waits here."""

from __future__ import annotations

from rlightning.errors import ConfigError

__all__ = ["RateLimiter"]


class RateLimiter:
    """Says whether a learner may sample and whether environments may insert.

    With ``samples_per_insert`` the difference ``inserts * samples_per_insert - samples`` is kept
    within `error_buffer` of its value when sampling could start, so that a fast learner waits for
    new data and a fast environment waits for the learner. At any time at least one of the two may
    go on. The counters belong into checkpoints: a resumed run continues at the ratio instead of
    catching up.

    Args:
        min_size: rows a buffer must hold before anything is sampled.
        batch_counts: whether a larger batch wants as many rows as it has.
        samples_per_insert: rows sampled per row inserted; None does not limit.
        error_buffer: how many sampled rows the ratio may be off, either way; by default a tenth of
            what `min_size` inserts are worth, and enough for the batches and inserts asked for.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        *,
        min_size: int = 1,
        batch_counts: bool = True,
        samples_per_insert: float | None = None,
        error_buffer: float | None = None,
    ) -> None:
        if min_size < 1:
            raise ConfigError(f"min_size is {min_size}; expected at least 1")
        if samples_per_insert is not None and not samples_per_insert > 0:
            raise ConfigError(f"samples_per_insert is {samples_per_insert}; expected more than 0")
        if error_buffer is not None and not error_buffer > 0:
            raise ConfigError(f"error_buffer is {error_buffer}; expected more than 0")
        self.min_size = min_size
        self._batch_counts = batch_counts
        self.samples_per_insert = samples_per_insert
        self.inserts = 0
        """Rows inserted so far."""
        self.samples = 0
        """Rows sampled so far."""
        self._error_buffer = error_buffer
        self._insert_rows = 0  # the largest insert and
        self._sample_rows = 0  # the largest batch asked for

    @property
    def error_buffer(self) -> float:
        """How many sampled rows the ratio may be off."""
        if self._error_buffer is not None:
            return self._error_buffer
        ratio = self.samples_per_insert or 0.0
        return max(ratio * self.min_size / 10, self._needed())

    def _needed(self) -> float:
        """Return the smallest tolerance with which one of the two sides can always go on."""
        ratio = self.samples_per_insert or 0.0
        return (self._sample_rows + ratio * max(1, self._insert_rows)) / 2

    def can_insert(self, rows: int = 1) -> bool:
        """Return whether `rows` more rows may be inserted now.

        Raises:
            ConfigError: with such inserts and batches both sides would wait for each other.
        """
        self._insert_rows = max(self._insert_rows, rows)
        if self.samples_per_insert is None or self.inserts < self.start:
            return True
        self._refuse_standstill()
        return self._ahead(self.inserts + rows, self.samples) <= self.error_buffer

    def can_sample(self, rows: int, *, size: int) -> bool:
        """Return whether a batch of `rows` may be sampled now from a buffer of `size` rows.

        Raises:
            ConfigError: with such inserts and batches both sides would wait for each other.
        """
        self._sample_rows = max(self._sample_rows, rows)
        if size < self.start:
            return False
        if self.samples_per_insert is None:
            return True
        self._refuse_standstill()
        return self._ahead(self.inserts, self.samples + rows) >= -self.error_buffer

    @property
    def start(self) -> int:
        """How many rows there must be before anything is sampled."""
        return max(self.min_size, self._sample_rows if self._batch_counts else 0)

    def _ahead(self, inserts: int, samples: int) -> float:
        return (inserts - self.start) * (self.samples_per_insert or 0.0) - samples

    def _refuse_standstill(self) -> None:
        if self.error_buffer < self._needed():
            raise ConfigError(
                f"error_buffer is {self.error_buffer:g} sampled rows; with batches of "
                f"{self._sample_rows} rows and inserts of {max(1, self._insert_rows)}, learner and "
                "environments would wait for each other: raise it to at least "
                f"{self._needed():g}, or leave it out"
            )

    def state_dict(self) -> dict[str, int]:
        """Return the counters."""
        return {"inserts": self.inserts, "samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the counters."""
        self.inserts, self.samples = state["inserts"], state["samples"]
