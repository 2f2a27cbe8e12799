"""`RSLRLEngine`, ``rsl``: the synchronous loop with the policy's `postprocess` at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlightning.engine.sync_rl import SyncRLEngine
from rlightning.errors import ConfigError

if TYPE_CHECKING:
    from rlightning.types import BatchedData, EnvRet, PolicyResponse

__all__ = ["RSLRLEngine"]


class RSLRLEngine(SyncRLEngine):
    """As ``syncrl``; what `postprocess` returns goes into the buffer.

    A batch is the whole buffer with the sampler ``all``, else one row per environment.
    """

    rollout_prefix = "Rollout"
    train_prefix = "Train"

    def act(self, env_rets: BatchedData[EnvRet]) -> BatchedData[PolicyResponse]:
        """Return the policy's answers after its `postprocess`."""
        return self.policy_group.postprocess(env_rets, super().act(env_rets))

    def update_dataset(self) -> None:
        """Sample the buffer for the learner.

        Raises:
            ConfigError: the buffer is empty.
        """
        if self.buffer.size() == 0:
            raise ConfigError("the buffer is empty after a rollout; is buffer.capacity too small?")
        sampler = self.config.buffer.sampler
        everything = sampler is None or sampler.type == "all"
        size = self.buffer.size() if everything else self._rows * len(self.policy_group.train_list)
        self.policy_group.update_dataset(
            self.buffer.sample(batch_size=size, shuffle=self._shuffles)
        )
