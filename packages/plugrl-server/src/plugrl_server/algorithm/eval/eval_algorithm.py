"""Count the episodes of a policy that does not change."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any, final

from plugrl_server.algorithm.base_algorithm import BaseAlgorithm, Checkpoint
from plugrl_server.algorithm.registration import register_algo
from plugrl_server.common.checkpoint_manager import load_checkpoint_from_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from plugrl_protocol.messages import Episode
    from plugrl_server.algorithm.base_algorithm import FrameBatch, MetricDict
    from plugrl_server.policy.base_policy import PolicyRuntimeState

__all__ = ["EvalAlgorithm"]


@register_algo("eval")
@final
class EvalAlgorithm(BaseAlgorithm):
    """Acts; every episode is logged when it ends.

    Args:
        config: which checkpoint, and how many episodes.
        policy: what is evaluated; a torch policy is put into evaluation mode.
    """

    on_policy = False
    supports_overlap = True

    def __init__(self, config: Any, policy: Any) -> None:
        super().__init__(config, policy)
        self.episodes_done = 0
        self._finished: list[dict[str, float]] = []
        if config.policy_checkpoint_path is not None:
            self.load_checkpoint(
                load_checkpoint_from_path(pathlib.Path(config.policy_checkpoint_path))
            )
            self.global_step = 0
        if hasattr(policy, "eval"):
            policy.eval()

    def separate_learner(self) -> None:
        """There is no learner."""

    def infer(self, obs: dict[str, Any]) -> tuple[Any, PolicyRuntimeState]:
        """Act."""
        return self.infer_with_policy(obs)

    def feedback(self, **frame: Any) -> Any:
        """Not used: `feedback_batch` takes whole batches."""
        raise NotImplementedError("eval takes batches")

    def feedback_batch(self, batch: FrameBatch) -> MetricDict:
        """Count steps; give the last episode that ended."""
        self.global_step += int(batch.steps.sum())
        finished, self._finished = self._finished, []
        return {"episode": finished[-1]} if finished else {}

    def record_episodes(self, episodes: list[Episode]) -> None:
        """Take finished episodes."""
        super().record_episodes(episodes)
        self.episodes_done += len(episodes)
        for episode in episodes:
            self._finished.append(
                {
                    "reward": episode.episode_return or 0.0,
                    "length": float(episode.length_steps or 0),
                    "success": float(episode.success or 0),
                }
            )

    def record_episode_metrics(self, episode_info: Mapping[str, Any]) -> None:
        """Episodes are recorded by `record_episodes`."""
        del episode_info

    def should_learn(self) -> bool:
        """Never."""
        return False

    def should_stop(self) -> bool:
        """After ``num_episodes``, or at ``global_steps``."""
        episodes, steps = self.config.num_episodes, self.config.global_steps
        enough_episodes = episodes is not None and self.episodes_done >= episodes
        return enough_episodes or (steps is not None and self.global_step >= steps)

    def should_save(self) -> bool:
        """Never: nothing changes."""
        return False

    def learn_impl(self) -> tuple[int, MetricDict]:
        """Nothing is learned."""
        raise NotImplementedError("eval does not learn")

    def create_checkpoint(self) -> Checkpoint:
        """Give the weights as they are."""
        from plugrl_server.algorithm.torch_state import copy_weights

        return Checkpoint(step=self.global_step, model=copy_weights(self.policy))

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load the weights."""
        if checkpoint.model is not None:
            from plugrl_server.algorithm.torch_state import load_weights

            load_weights(self.policy, checkpoint.model)
        self.global_step = checkpoint.step
