"""`RateLimiter`: holds sampling and inserting to a ratio. Pure counting; nothing waits here."""

from __future__ import annotations

from rlightning.errors import ConfigError

__all__ = ["RateLimiter"]


class RateLimiter:
    """Says whether a learner may sample and whether environments may insert.

    With ``samples_per_insert`` the difference ``inserts * samples_per_insert - samples`` is kept
    within `error_buffer` of its value at `min_size` inserts, so that a fast learner waits for new
    data and a fast environment waits for the learner. The counters belong into checkpoints: a
    resumed run continues at the ratio instead of catching up.

    Args:
        min_size: rows a buffer must hold before anything is sampled.
        samples_per_insert: rows sampled per row inserted; None does not limit.
        error_buffer: how many sampled rows the ratio may be off, either way; by default a tenth of
            what `min_size` inserts are worth, at least `samples_per_insert`.

    Raises:
        ConfigError: a number is out of range.
    """

    def __init__(
        self,
        *,
        min_size: int = 1,
        samples_per_insert: float | None = None,
        error_buffer: float | None = None,
    ) -> None:
        if min_size < 1:
            raise ConfigError(f"min_size is {min_size}; expected at least 1")
        if samples_per_insert is not None and samples_per_insert <= 0:
            raise ConfigError(f"samples_per_insert is {samples_per_insert}; expected more than 0")
        self.min_size = min_size
        self.samples_per_insert = samples_per_insert
        ratio = samples_per_insert or 0.0
        if error_buffer is None:
            error_buffer = ratio * max(1.0, min_size / 10)
        if error_buffer < ratio:
            raise ConfigError(
                f"error_buffer is {error_buffer}; expected at least samples_per_insert, {ratio}: "
                "below that no insert fits between two samples"
            )
        self.error_buffer = error_buffer
        self.inserts = 0
        """Rows inserted so far."""
        self.samples = 0
        """Rows sampled so far."""

    def can_insert(self, rows: int = 1) -> bool:
        """Return whether `rows` more rows may be inserted now."""
        if self.samples_per_insert is None or self.inserts + rows <= self.min_size:
            return True
        ahead = self._ahead(self.inserts + rows, self.samples)
        return ahead <= self.error_buffer

    def can_sample(self, rows: int, *, size: int) -> bool:
        """Return whether a batch of `rows` may be sampled now from a buffer of `size` rows.

        Raises:
            ConfigError: such a batch never fits into `error_buffer`.
        """
        if self.samples_per_insert is not None and rows > 2 * self.error_buffer:
            raise ConfigError(
                f"a batch of {rows} rows never fits: error_buffer is {self.error_buffer} sampled "
                f"rows; raise it to at least {rows / 2:g}, or lower the batch size"
            )
        if size < self.min_size:
            return False
        if self.samples_per_insert is None:
            return True
        return self._ahead(self.inserts, self.samples + rows) >= -self.error_buffer

    def _ahead(self, inserts: int, samples: int) -> float:
        ratio = self.samples_per_insert or 0.0
        return (inserts - self.min_size) * ratio - samples

    def state_dict(self) -> dict[str, int]:
        """Return the counters."""
        return {"inserts": self.inserts, "samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore the counters."""
        self.inserts, self.samples = state["inserts"], state["samples"]
