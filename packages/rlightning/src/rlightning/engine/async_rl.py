"""`AsyncRLEngine`, ``asyncrl``: one thread acts while another learns.

The rollout thread steps environments, stores rows and, between steps, takes over newer weights.
The learner trains as soon as there is a batch. Every row carries the version of the weights that
chose its action, so that staleness is a number and can be bounded.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import Field

from rlightning.config import Config
from rlightning.engine.training_engine import TrainingEngine
from rlightning.errors import ConfigError
from rlightning.runtime import FairLock, WorkerThread

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlightning.buffer import DataBuffer
    from rlightning.config import MainConfig
    from rlightning.env import EnvGroup
    from rlightning.policy import PolicyGroup
    from rlightning.types import BatchedData, EnvRet, PolicyResponse

__all__ = ["AsyncRLEngine"]

_POLL_S = 0.2
"""How often a waiting thread looks whether the other one has ended."""


class AsyncRLEngine(TrainingEngine):
    """Overlaps rollout and learning.

    An error in either thread ends the run with its own traceback and a checkpoint.

    Raises:
        ConfigError: a batch can never fill, because the buffer is smaller.
    """

    marks_rows = True

    class TrainExtras(Config):
        """Keys of the ``train`` section that only this class reads."""

        max_staleness: int | None = Field(default=None, ge=0)
        """Rows older than that many weight versions are not learned from, and counted."""

    def __init__(
        self,
        config: MainConfig,
        env_group: EnvGroup,
        policy_group: PolicyGroup,
        buffer: DataBuffer | None = None,
    ) -> None:
        self._lock = FairLock()
        self._halt = threading.Event()
        self._rollout_thread: WorkerThread | None = None
        self._learner = threading.current_thread()
        self._changed = threading.Condition()
        self._discarded = 0
        super().__init__(config, env_group, policy_group, buffer)
        policy_group.split_random_stream()
        if self.batch_size > config.buffer.capacity:
            raise ConfigError(
                f"a batch of {self.batch_size} rows never fills: buffer.capacity is "
                f"{config.buffer.capacity}"
            )

    @property
    def batch_size(self) -> int:
        """Rows that the learner waits for."""
        return self.config.train.batch_size

    def act(self, env_rets: BatchedData[EnvRet]) -> BatchedData[PolicyResponse]:
        """Return the policy's answers, each row marked with the version of the weights."""
        self.policy_group.update_eval_weights()
        responses = super().act(env_rets)
        version = self.policy_group.eval_list[0].weights_version
        for env_ret, response in zip(env_rets.values(), responses.values(), strict=True):
            shape = np.shape(env_ret.last_terminated)
            response.weights_version = np.full(shape, version, dtype=np.int64)
        return responses

    def _run_epochs(self) -> None:
        with WorkerThread(self._rollout_loop, name="rollout", on_end=self._notify) as rollout:
            self._rollout_thread = rollout
            for epoch in self.iter_epochs(self.config.train.max_epochs):
                self._update_dataset()
                self._train()
                self._sync_weights()
                self._end_epoch(epoch)

    def _rollout_loop(self, halt: threading.Event) -> None:
        self._halt = halt
        with contextlib.suppress(_Halted):
            while True:
                self._wait_for(lambda: self.buffer.can_insert(self._steps * self._rows))
                self._rollout()
                self._notify()

    def _check_stop(self) -> None:
        super()._check_stop()
        if threading.current_thread() is not self._learner and self._halt.is_set():
            raise _Halted

    def _exclusive(self) -> FairLock:
        return self._lock

    def _notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _wait_for(self, ready: Callable[[], bool], other: WorkerThread | None = None) -> None:
        with self._changed:
            while not ready():
                if other is not None:
                    other.check()
                self._check_stop()
                self._changed.wait(_POLL_S)
        if other is not None:
            other.check()

    # ---- stages --------------------------------------------------------------------------------

    def sync_weights(self) -> None:
        """Publish the learner's weights; the rollout thread takes them over between steps."""
        if self.policy_group.weight_buffer is None:
            with self._exclusive():
                self.policy_group.sync_weights()
        else:
            self.policy_group.send_weights()

    def update_dataset(self) -> None:
        """Wait for a batch and hand it to the learner, without rows that are too old."""
        while True:
            self._wait_for(lambda: self.buffer.can_sample(self.batch_size), self._rollout_thread)
            with self._exclusive():
                batches = self.buffer.sample(batch_size=self.batch_size, shuffle=self._shuffles)
            self._notify()
            batches = self._fresh(batches)
            if all(len(batch) for batch in batches):
                break
        self.policy_group.update_dataset(batches)

    def _fresh(self, batches: list[Any]) -> list[Any]:
        """Return the batches without rows older than ``max_staleness``; record their age."""
        version = self.policy_group.version
        staleness = [version - batch["weights_version"].double() for batch in batches]
        limit = self.config.train.get("max_staleness")
        if limit is not None:
            fresh = [stale <= limit for stale in staleness]
            self._discarded += sum(int((~keep).sum()) for keep in fresh)
            batches = [batch[keep] for batch, keep in zip(batches, fresh, strict=True)]
        joined = torch.cat([stale.flatten() for stale in staleness])
        metrics = {
            "staleness": float(joined.mean()),
            "staleness_max": float(joined.max()),
            "discarded_rows": float(self._discarded),
        }
        self.log(metrics, "weights")
        return batches


class _Halted(Exception):  # noqa: N818  # ends the rollout thread, never seen outside
    """The learner has ended."""
