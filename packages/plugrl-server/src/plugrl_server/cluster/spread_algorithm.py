"""`SpreadAlgorithm`: an algorithm whose acting and learning happen in workers.

Frames are collected here, by the algorithm itself, so that all that decides when to learn, to save
and to stop stays in one place. It knows nothing about Ray or sockets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from plugrl_server.algorithm.torch_state import learner_checkpoint
from plugrl_server.common.checkpoint import Checkpoint

if TYPE_CHECKING:
    from plugrl_server.algorithm.base_algorithm import BaseAlgorithm, MetricDict
    from plugrl_server.cluster.infer_group import InferGroup
    from plugrl_server.cluster.learner_group import LearnerGroup
    from plugrl_server.cluster.published_weights import PublishedWeights
    from plugrl_server.cluster.random_stream import RandomStream

__all__ = ["SpreadAlgorithm"]


@final
class SpreadAlgorithm:
    """Stands where the algorithm would stand; what is not defined here is the algorithm's own.

    Args:
        algorithm: collects; its policy follows the newest weights and does not act.
        actors: workers that act.
        learners: workers that learn; None: the algorithm learns here.
        weights: from learners to actors; None for a policy without weights.
        stream: of random numbers.
    """

    def __init__(
        self,
        algorithm: BaseAlgorithm,
        *,
        actors: InferGroup,
        learners: LearnerGroup | None,
        weights: PublishedWeights | None,
        stream: RandomStream,
    ) -> None:
        self._algorithm = algorithm
        self._actors, self._learners = actors, learners
        self._weights, self._stream = weights, stream
        self._collected: Any = None
        self._begin()
        actors.start()

    def __getattr__(self, name: str) -> Any:
        if name == "_algorithm":
            raise AttributeError(name)
        return getattr(self._algorithm, name)

    @property
    def current_version(self) -> int:
        """How often the policy has been learned, as told by the trainer."""
        return self._algorithm.current_version

    @current_version.setter
    def current_version(self, version: int) -> None:
        self._algorithm.current_version = version

    def _begin(self) -> None:
        """Bring learners, and what is published, to where the algorithm here stands."""
        if self._learners is not None:
            self._learners.start(learner_checkpoint(self._algorithm))
        if self._weights is not None:
            self._weights.publish(self._algorithm.learner_policy)

    # ---- acting --------------------------------------------------------------------------------

    def infer(self, obs: dict[str, Any]) -> tuple[Any, Any]:
        """Act on a batch."""
        algorithm = self._algorithm
        return self._actors.infer(algorithm.global_step, algorithm.current_version, obs)

    # ---- learning ------------------------------------------------------------------------------

    def pre_learn(self) -> None:
        """Take what was collected for the learners."""
        self._algorithm.pre_learn()
        if self._learners is not None:
            self._collected = self._algorithm.hand_over()

    def learn(self) -> tuple[int, MetricDict]:
        """Learn, in the workers that there are for it."""
        algorithm = self._algorithm
        if self._learners is None:
            self._stream.hand_to(None)
            return algorithm.learn()
        collected, self._collected = self._collected, None
        metrics, meta = self._learners.learn(algorithm.global_step, collected)
        algorithm.load_learner_meta(meta)
        return algorithm.global_step, algorithm.build_train_info(metrics)

    def post_learn(self) -> None:
        """Let all act with what was learned; on return they do."""
        algorithm, weights = self._algorithm, self._weights
        algorithm.post_learn()
        if weights is None:
            return
        if self._learners is None:
            weights.publish(algorithm.learner_policy)
        else:
            went_back = self._learners.publish(weights)
            if went_back is not None:
                algorithm.load_learner_meta(went_back.meta)
            weights.load_into(algorithm.policy)
        self._actors.load_weights()

    # ---- checkpoints ---------------------------------------------------------------------------

    def create_checkpoint(self) -> Checkpoint:
        """Give what was collected here, and what the first learner has learned."""
        self._stream.hand_to(None)  # its state is saved with the checkpoint
        own = self._algorithm.create_checkpoint()
        if self._learners is None:
            return own
        learned = self._learners.checkpoint()
        self._algorithm.load_learner_meta(learned.meta)
        return Checkpoint(
            step=own.step,
            model=learned.model,
            optimizer=learned.optimizer,
            meta={**own.meta, **learned.meta},
        )

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Continue from all of it, everywhere."""
        self._stream.is_here()
        self._algorithm.load_checkpoint(checkpoint)
        self._begin()
        self._actors.load_weights()

    def close(self) -> None:
        """End the workers."""
        self._actors.close()
        if self._learners is not None:
            self._learners.close()
        if self._weights is not None:
            self._weights.close()
