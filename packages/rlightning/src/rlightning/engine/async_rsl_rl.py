"""`AsyncRSLRLEngine`, ``async_rsl``: the overlapping loop with `postprocess` at every step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlightning.engine.async_rl import AsyncRLEngine

if TYPE_CHECKING:
    from rlightning.types import BatchedData, EnvRet, PolicyResponse

__all__ = ["AsyncRSLRLEngine"]


class AsyncRSLRLEngine(AsyncRLEngine):
    """As ``asyncrl``; what `postprocess` returns goes into the buffer.

    A batch is one row per environment and train worker.
    """

    rollout_prefix = "Rollout"
    train_prefix = "Train"

    @property
    def batch_size(self) -> int:
        """Rows that the learner waits for."""
        return self._rows * len(self.policy_group.train_list)

    def act(self, env_rets: BatchedData[EnvRet]) -> BatchedData[PolicyResponse]:
        """Return the policy's answers after its `postprocess`."""
        return self.policy_group.postprocess(env_rets, super().act(env_rets))
