"""`SupervisedEngine`, ``supervised``: learn from a dataset; environments are for evaluation."""

from __future__ import annotations

from rlightning.engine.training_engine import TrainingEngine

__all__ = ["SupervisedEngine"]


class SupervisedEngine(TrainingEngine):
    """Samples the buffer, learns, evaluates; never collects.

    What other engines count as environment steps are here rows learned from: metrics and
    checkpoints are ordered by them.

    Raises:
        ConfigError: the buffer holds nothing to learn from.
    """

    def _run_epochs(self) -> None:
        for epoch in self.iter_epochs(self.config.train.max_epochs):
            self._check_stop()
            self._update_dataset()
            self.env_steps += self.config.train.batch_size
            self._train()
            self._sync_weights()
            self._end_epoch(epoch)
