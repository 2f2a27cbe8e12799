"""An algorithm that takes time and learns nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, final

from plugrl_server.algorithm.base_algorithm import BaseAlgorithm, Checkpoint
from plugrl_server.algorithm.registration import register_algo

if TYPE_CHECKING:
    from plugrl_server.algorithm.base_algorithm import FrameBatch, MetricDict
    from plugrl_server.policy.base_policy import PolicyRuntimeState

__all__ = ["DummyAlgorithm"]


@register_algo("dummy")
@final
class DummyAlgorithm(BaseAlgorithm):
    """Acts with any policy, after a pause; pauses again where others learn."""

    supports_overlap = True
    most_learners = None

    def __init__(self, config: Any, policy: Any) -> None:
        super().__init__(config, policy)
        self._frames = 0

    def separate_learner(self) -> None:
        """There is nothing to keep apart."""

    def infer(self, obs: dict[str, Any]) -> tuple[Any, PolicyRuntimeState]:
        """Act after a pause."""
        time.sleep(self.config.fake_inference_duration_sec)
        return self.infer_with_policy(obs)

    def feedback(self, **frame: Any) -> Any:
        """Not used: `feedback_batch` counts whole batches."""
        raise NotImplementedError("the dummy algorithm takes batches")

    def feedback_batch(self, batch: FrameBatch) -> MetricDict:
        """Count frames and steps."""
        self._frames += len(batch)
        self.global_step += int(batch.steps.sum())
        return {}

    def should_learn(self) -> bool:
        """Every ``fake_learn_freq`` frames."""
        return self._frames >= int(self.config.fake_learn_freq)

    def should_stop(self) -> bool:
        """At ``global_steps``."""
        total = self.config.global_steps
        return total is not None and self.global_step >= total

    def should_save(self) -> bool:
        """Never: there is nothing worth saving on the way."""
        return False

    def pre_learn(self) -> None:
        """Take the frames."""
        self._frames = 0

    def hand_over(self) -> None:
        """There is nothing to hand over."""

    def take_over(self, collected: None) -> None:
        """There is nothing to take over."""

    def learn_impl(self) -> tuple[int, MetricDict]:
        """Pause."""
        time.sleep(self.config.fake_learn_duration_sec)
        return self.global_step, {}

    def get_collect_progress_total(self) -> int:
        """Frames between two pauses."""
        return int(self.config.fake_learn_freq)

    def get_collect_progress_completed(self) -> int:
        """Frames since the last pause."""
        return self._frames

    def create_checkpoint(self) -> Checkpoint:
        """Give the counters."""
        return Checkpoint(step=self.global_step, meta={"frames": self._frames})

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Continue counting."""
        self.global_step, self._frames = checkpoint.step, int(checkpoint.meta["frames"])
