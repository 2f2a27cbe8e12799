"""`SyncRLEngine`, ``syncrl``: roll out, learn, sync weights, again; strictly on-policy."""

from __future__ import annotations

from rlightning.engine.training_engine import TrainingEngine

__all__ = ["SyncRLEngine"]


class SyncRLEngine(TrainingEngine):
    """Alternates rollout and learning in one thread: every action is the newest weights'."""

    def _run_epochs(self) -> None:
        for epoch in self.iter_epochs(self.config.train.max_epochs):
            for _ in range(self.config.train.rollout_epoch):
                self._rollout(obj_set="train", prefix=self.rollout_prefix)
            if self.buffer.has_batch(self.config.train.batch_size):
                self._update_dataset()
                self._train()
                self._sync_weights()
            self._end_epoch(epoch)
