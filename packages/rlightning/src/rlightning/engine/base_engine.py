"""`BaseEngine`: the frame of every training loop: stages, hooks around them, timing, metrics.

An engine is the one place where environments, policies and buffers meet. The stages of a subclass
(`rollout`, `update_dataset`, `train`, `evaluate`) are called through wrappers that run the hooks
and measure; hooks run also where a stage raises.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from rlightning.config import Config
from rlightning.engine.evaluation import evaluate_episodes, summarise
from rlightning.errors import RLightningError
from rlightning.runtime import RunContext, open_run
from rlightning.types import PolicyRole
from rlightning.utils.logger import close_logger, get_logger, get_metrics_logger, log_metric
from rlightning.utils.profiler import profiler
from rlightning.utils.progress import ProgressDisplay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rlightning.buffer import DataBuffer
    from rlightning.config import MainConfig
    from rlightning.env import EnvGroup
    from rlightning.policy import PolicyGroup

__all__ = ["BaseEngine"]

_log = get_logger("engine")


class BaseEngine(ABC):
    """Base of all training loops.

    Args:
        config: the whole run.
        env_group: the training environments.
        policy_group: TRAIN and EVAL policies.
        buffer: the buffer between them; None for evaluation only.
    """

    class TrainExtras(Config):
        """Further keys of the ``train`` section that this class reads, with their defaults."""

    def __init__(
        self,
        config: MainConfig,
        env_group: EnvGroup,
        policy_group: PolicyGroup,
        buffer: DataBuffer | None = None,
    ) -> None:
        self.config = config
        self.env_group = env_group
        self.policy_group = policy_group
        self.epoch = 0
        """Epochs completed."""
        self.env_steps = 0
        """Environment steps taken in training, over all rows."""
        self.timing_raw: dict[str, dict[str, float]] = {}
        self.last_metrics: dict[str, float] = {}
        """The newest value of every metric, by full name."""
        self._new_metrics: set[str] = set()  # those that the progress display has not had yet
        self._buffer = buffer
        cluster = config.cluster
        self._takes_turns = cluster is not None and cluster.enable_offload
        self._opened_run = config.run is None
        self.run_context: RunContext = config.run or open_run(config)

    @property
    def buffer(self) -> DataBuffer:
        """The buffer.

        Raises:
            RLightningError: this run has none.
        """
        if self._buffer is None:
            raise RLightningError(f"{type(self).__name__} was built without a buffer")
        return self._buffer

    # ---- what subclasses implement -------------------------------------------------------------

    @abstractmethod
    def run(self) -> None:
        """Run to the end."""

    @abstractmethod
    def rollout(self, *args: Any, **kwargs: Any) -> Any:
        """Collect transitions."""

    @abstractmethod
    def update_dataset(self) -> None:
        """Hand the learner a batch."""

    @abstractmethod
    def train(self) -> dict[str, float]:
        """Update the policy."""

    def warm_up(self) -> None:
        """Run once through every stage before training; nothing by default."""

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Measure the policy; not every engine can.

        Raises:
            RLightningError: this engine cannot.
        """
        raise RLightningError(f"{type(self).__name__} does not evaluate")

    def close(self) -> None:
        """Close the environments, and the run's logs where this engine opened them."""
        self.env_group.close()
        if self._opened_run:
            close_logger()

    # ---- hooks ---------------------------------------------------------------------------------

    # With ``cluster.enable_offload``, actors and learners take turns on their device: whoever has
    # worked leaves it, and the next call brings it back. Environments are told to come back.

    def _pre_rollout_hook(self) -> None:
        """Run before `rollout`."""
        if self._takes_turns:
            self.env_group.reload()

    def _post_rollout_hook(self) -> None:
        """Run after `rollout`, also where it raised."""
        if self._takes_turns:
            self.policy_group.rest(PolicyRole.EVAL)
            self.env_group.offload()

    def _pre_evaluate_hook(self) -> None:
        """Run before `evaluate`."""

    def _post_evaluate_hook(self) -> None:
        """Run after `evaluate`, also where it raised."""
        if self._takes_turns:
            self.policy_group.rest(PolicyRole.EVAL)

    def _pre_update_dataset_hook(self) -> None:
        """Run before `update_dataset`."""

    def _post_update_dataset_hook(self) -> None:
        """Run after `update_dataset`, also where it raised."""

    def _pre_train_hook(self) -> None:
        """Run before `train`."""

    def _post_train_hook(self) -> None:
        """Run after `train`, also where it raised."""

    def _pre_sync_weights_hook(self) -> None:
        """Run before `sync_weights`."""

    def _post_sync_weights_hook(self) -> None:
        """Run after `sync_weights`, also where it raised."""
        if self._takes_turns:
            self.policy_group.rest(PolicyRole.TRAIN)
            self.policy_group.rest(PolicyRole.EVAL)

    # ---- stages as they are called -------------------------------------------------------------

    def sync_weights(self) -> None:
        """Publish the learner's weights; on return the actors have them."""
        self.policy_group.sync_weights()

    def _rollout(self, *args: Any, **kwargs: Any) -> Any:
        with self._stage("rollout", self._pre_rollout_hook, self._post_rollout_hook):
            return self.rollout(*args, **kwargs)

    def _evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self._stage("evaluate", self._pre_evaluate_hook, self._post_evaluate_hook):
            return self.evaluate(*args, **kwargs)

    def _update_dataset(self) -> None:
        hooks = self._pre_update_dataset_hook, self._post_update_dataset_hook
        with self._stage("update_dataset", *hooks):
            self.update_dataset()

    def _train(self) -> dict[str, float]:
        with self._stage("train", self._pre_train_hook, self._post_train_hook):
            return self.train()

    def _sync_weights(self) -> None:
        hooks = self._pre_sync_weights_hook, self._post_sync_weights_hook
        with self._stage("sync_weights", *hooks):
            self.sync_weights()

    @contextlib.contextmanager
    def _stage(
        self, name: str, before: Callable[[], None], after: Callable[[], None]
    ) -> Iterator[None]:
        before()
        try:
            with profiler.timer(name, self.timing_raw):
                yield
        finally:
            after()

    def _check_stop(self) -> None:
        """Raise `StopRequested` where somebody asked the run to stop."""
        self.run_context.stop.raise_if_requested()

    def _measure(
        self, env_group: EnvGroup, obj_set: str, prefix: str, seed: int
    ) -> dict[str, float]:
        """Play ``train.eval_episodes`` episodes without exploration and record their metrics."""
        tally = evaluate_episodes(
            env_group,
            self.policy_group,
            episodes=self.config.train.eval_episodes,
            max_steps=self.config.train.max_eval_rollout_steps,
            options={"obj_set": obj_set},
            seed=seed,
            check_stop=self._check_stop,
        )
        metrics = summarise(tally)
        self.log(metrics, prefix)
        return metrics

    # ---- metrics and progress ------------------------------------------------------------------

    def log(self, metrics: dict[str, Any], prefix: str) -> None:
        """Record metrics at the current number of environment steps."""
        get_metrics_logger().advance(env_step=self.env_steps, epoch=self.epoch)
        log_metric(metrics, step=self.env_steps, prefix=prefix)
        named = {f"{prefix}/{key}": value for key, value in metrics.items()}
        self.last_metrics |= named
        self._new_metrics.update(named)

    def iter_epochs(self, num_epochs: int) -> Iterator[int]:
        """Yield the index of each epoch still to run, showing progress."""
        with ProgressDisplay(num_epochs, enabled=self.config.verbose) as display:
            for index in range(self.epoch, num_epochs):
                yield index
                new, self._new_metrics = self._new_metrics, set()
                metrics = {"env_steps": self.env_steps, **self.last_metrics}
                display.update(index + 1, metrics, new={"env_steps", *new})

    def print_timing_summary(self, reset: bool = False) -> None:  # noqa: FBT001, FBT002  # public contract
        """Log where the time went: by stage, and what policies timed of their own.

        Args:
            reset: forget it afterwards.
        """
        if self.timing_raw:
            _log.info("time by stage\n%s", profiler.summary(self.timing_raw))
        self.policy_group.print_timing_summary(reset)
        if reset:
            self.timing_raw = {}
