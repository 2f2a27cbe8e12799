"""`BaseAlgorithm`: what learns from the frames that clients report.

A *frame* is one finished chunk of actions in one environment: what was seen, what was done, what
came of it. The trainer calls `infer`, `feedback_batch`, `pre_learn` and `post_learn` from one
thread at a time, in the order in which things happened, and `learn` from another thread. Knows
nothing about sockets.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from plugrl_protocol.messages import split_info
from plugrl_server.algorithm.ranks import Ranks
from plugrl_server.common.checkpoint import Checkpoint
from plugrl_server.common.metrics import MetricDict
from plugrl_server.common.ranges import UNBOUNDED, Ranges, check_ranges
from plugrl_server.common.trees import take
from plugrl_server.errors import PolicyContractError
from plugrl_server.policy.state import (
    PolicyRuntimeState,
    PolicyStepState,
    PolicyTrainState,
    TrainStateSpec,
    infer_train_state_spec,
    slice_batched_state,
    to_numpy_state,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from plugrl_protocol.messages import Episode
    from plugrl_server.policy.base_policy import BasePolicy

__all__ = [
    "BaseAlgoConfig",
    "BaseAlgorithm",
    "Checkpoint",
    "EpisodeMetricWindow",
    "FrameBatch",
    "MetricDict",
    "Sampled",
]

_FIRST_NODE = (-1, "")


@dataclasses.dataclass
class BaseAlgoConfig:
    """What every algorithm's configuration has; a field of a subclass is an ``--algo.`` flag."""

    _ranges: ClassVar[Ranges] = {"global_steps": (1, UNBOUNDED)}

    global_steps: int | None = None
    """Length of the run in environment steps; None leaves it to the algorithm."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant; see `check_ranges`."""
        check_ranges(self, "--algo.")


class Sampled:
    """What one inference saw and gave, for all of its rows.

    Args:
        obs: what the policy saw.
        runtime_state: as the policy returned it.
        derive: makes the train state of it, when somebody asks; once.
    """

    __slots__ = ("_derive", "_train_state", "obs", "runtime_state")

    def __init__(
        self,
        obs: dict[str, Any],
        runtime_state: PolicyRuntimeState,
        derive: Callable[[PolicyRuntimeState], PolicyTrainState],
    ) -> None:
        self.obs = obs
        self.runtime_state = runtime_state
        self._derive: Callable[[PolicyRuntimeState], PolicyTrainState] | None = derive
        self._train_state: PolicyTrainState = None

    @property
    def train_state(self) -> PolicyTrainState:
        """As `BaseAlgorithm.derive_train_state` returned it."""
        if self._derive is not None:
            self._train_state = self._derive(self.runtime_state)
            self._derive = None
        return self._train_state


# Not frozen: construction takes three times as long then, and there is one per message.
@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class FrameBatch:
    """Frames of one client that were sampled together; every array has the ``m`` frames first."""

    sampled: Sampled
    """The inference; `sampled_rows` of it are meant. See `obs`, `runtime_state`, `train_state`."""
    sampled_rows: Any = None
    """A slice or an index array; None: all rows, in their order."""
    chains: np.ndarray[Any, np.dtype[np.int64]]
    """Frames with the same number follow each other without a gap, in the order of arrival."""
    was_terminated: np.ndarray[Any, np.dtype[np.bool_]]
    """Whether the environment's previous frame ended its episode: this one starts a new one."""
    was_truncated: np.ndarray[Any, np.dtype[np.bool_]]
    """Likewise, by a time limit."""
    next_obs: dict[str, Any]
    """What came of it; at an episode's end its own last observation."""
    rewards: np.ndarray[Any, np.dtype[np.float32]]
    """Summed over the chunk."""
    steps: np.ndarray[Any, np.dtype[np.int64]]
    """Environment steps per chunk; 1 each if the client does not say."""
    terminated: np.ndarray[Any, np.dtype[np.bool_]]
    truncated: np.ndarray[Any, np.dtype[np.bool_]]
    info: Mapping[str, Any]
    """As it came; `infos` splits it."""

    def __len__(self) -> int:
        return len(self.chains)

    def _cut(self, tree: Any) -> Any:
        return tree if self.sampled_rows is None else take(tree, self.sampled_rows)

    @property
    def obs(self) -> dict[str, Any]:
        """What the policy saw."""
        obs: dict[str, Any] = self._cut(self.sampled.obs)
        return obs

    @property
    def runtime_state(self) -> PolicyRuntimeState:
        """As the policy returned it."""
        return self._cut(self.sampled.runtime_state)

    @property
    def train_state(self) -> PolicyTrainState:
        """As `BaseAlgorithm.derive_train_state` returned it."""
        train_state: PolicyTrainState = self._cut(self.sampled.train_state)
        return train_state

    def infos(self) -> list[dict[str, Any]]:
        """Give ``info`` row by row."""
        return split_info(self.info, len(self))

    def rows(self, index: np.ndarray[Any, np.dtype[np.int64]]) -> FrameBatch:
        """Take the frames at some positions."""
        apart = ("info", "sampled", "sampled_rows")
        cut = {
            item.name: take(getattr(self, item.name), index)
            for item in dataclasses.fields(self)
            if item.name not in apart
        }
        rows = self.sampled_rows
        if rows is None:
            rows = index
        elif isinstance(rows, slice):
            rows = index + int(rows.start)
        else:
            rows = rows[index]
        listed = self.infos() if self.info else []
        info = _stack_infos([listed[i] for i in index.tolist()]) if listed else {}
        return FrameBatch(sampled=self.sampled, sampled_rows=rows, info=info, **cut)


def _stack_infos(infos: list[dict[str, Any]]) -> dict[str, Any]:
    """Undo `split_info` for maps of one form."""
    if not infos:
        return {}
    stacked: dict[str, Any] = {}
    for key, value in infos[0].items():
        if isinstance(value, dict):
            stacked[key] = {k: np.asarray([info[key][k] for info in infos]) for k in value}
        else:
            stacked[key] = np.asarray([info[key] for info in infos])
    return stacked


class EpisodeMetricWindow:
    """Success, return and length of the episodes since the last `reset`.

    Args:
        length: keep the newest so many; None keeps all.
    """

    def __init__(self, length: int | None = None) -> None:
        self._episodes: deque[tuple[float, float, float]] = deque(maxlen=length)

    def __len__(self) -> int:
        return len(self._episodes)

    def record(self, episode_info: Mapping[str, Any]) -> None:
        """Take ``info["episode"]`` of one environment, unless its ``mask`` is false."""
        if not bool(np.all(episode_info.get("mask", True))):
            return
        values = (float(np.ravel(episode_info.get(key, 0.0))[0]) for key in ("s", "r", "l"))
        success, episode_return, length = values
        self._episodes.append((success, episode_return, length))

    def summary(self) -> dict[str, float]:
        """Give the means of success, reward and length; zeros if there was no episode."""
        if not self._episodes:
            return {"success": 0.0, "reward": 0.0, "length": 0.0}
        success, episode_return, length = np.mean(self._episodes, axis=0).tolist()
        return {"success": success, "reward": episode_return, "length": length}

    def reset(self) -> None:
        """Forget the episodes."""
        self._episodes.clear()


class BaseAlgorithm(ABC):
    """An algorithm that learns from frames.

    Args:
        config: kept as ``self.config``.
        policy: kept as ``self.policy``; acts.

    Attributes:
        on_policy: whether only frames of the current policy may be learned from.
        break_action_chunk: kept for compatibility; the client decides how much of a chunk it uses.
        supports_overlap: whether `learn` leaves alone all that `infer` and `feedback_batch` touch.
        follows_chains: whether `expect_chains` is called before each `infer`.
        most_learners: in how many processes beside this one it can learn; None: any number.
        ranks: the learners that this one learns with.
        global_step: environment steps that were stored.
        learner_policy: what `learn` trains; another object than ``policy`` in overlap mode.
        current_version: how often the policy has been learned, as told by the trainer.
    """

    on_policy: ClassVar[bool] = True
    break_action_chunk: ClassVar[bool] = False
    supports_overlap: ClassVar[bool] = False
    follows_chains: ClassVar[bool] = False
    most_learners: ClassVar[int | None] = 0

    def __init__(self, config: Any, policy: BasePolicy) -> None:
        self.config = config
        self.policy = policy
        self.learner_policy = policy
        self.global_step = 0
        self.current_version = 0
        self.ranks = Ranks()
        self._episodes = EpisodeMetricWindow()
        self._nodes: dict[int, tuple[int, str]] = {}
        self._learn_progress: Callable[[int, int], None] | None = None

    # ---- acting --------------------------------------------------------------------------------

    @abstractmethod
    def infer(self, obs: dict[str, Any]) -> tuple[np.ndarray[Any, Any], PolicyRuntimeState]:
        """Act on a batch; see `BasePolicy.get_action_and_runtime_state`."""

    def expect_chains(self, chains: Sequence[int]) -> None:
        """Take note of whose observations `infer` gets next, for algorithms that follow chains.

        Args:
            chains: one number per row, the one that its frame will have; see `FrameBatch.chains`.
        """

    def derive_train_state(self, runtime_state: PolicyRuntimeState) -> PolicyTrainState:
        """Reduce a runtime state to what is stored: a nested map of arrays, or None."""
        del runtime_state
        return None  # a value, not the lack of one

    def example_train_state(self, batch_size: int) -> PolicyTrainState:
        """Give a train state of zeros, which sizes buffers."""
        return self.derive_train_state(self.policy.fake_runtime_state(batch_size))

    def example_train_state_spec(self) -> TrainStateSpec:
        """Give the shapes and dtypes of a train state."""
        return infer_train_state_spec(self.example_train_state(1))

    def build_step_state_from_runtime_state(
        self, runtime_state: PolicyRuntimeState, *, include_train_state: bool = True
    ) -> PolicyStepState:
        """Give both states of a batch."""
        train_state = self.derive_train_state(runtime_state) if include_train_state else None
        return PolicyStepState(runtime_state=runtime_state, train_state=train_state)

    # ---- storing -------------------------------------------------------------------------------

    @abstractmethod
    def feedback(  # noqa: PLR0913  # the documented signature
        self,
        *,
        obs: dict[str, Any],
        runtime_state: PolicyRuntimeState,
        train_state: PolicyTrainState = None,
        terminated: bool,
        truncated: bool,
        next_obs: dict[str, Any],
        reward: float,
        info: dict[str, Any],
        next_terminated: bool,
        next_truncated: bool,
        prev_node: tuple[int, str],
    ) -> tuple[tuple[int, str], int, MetricDict]:
        """Store one frame. Override this, or `feedback_batch` for speed.

        Args:
            obs: what was seen, one row.
            runtime_state: of the action, one row.
            train_state: likewise.
            terminated: whether the environment's previous frame ended its episode.
            truncated: likewise, by a time limit.
            next_obs: what came of the action, one row.
            reward: summed over the chunk.
            info: of this environment.
            next_terminated: whether this frame ended the episode.
            next_truncated: likewise, by a time limit.
            prev_node: what this returned for the frame before; ``(-1, "")`` for a chain's first.

        Returns:
            A name for this frame, the environment steps so far, and numbers to log.
        """

    def feedback_batch(self, batch: FrameBatch) -> MetricDict:
        """Store frames; give numbers to log. This default calls `feedback` row by row."""
        metrics: MetricDict = {}
        obs, runtime_state, train_state = batch.obs, batch.runtime_state, batch.train_state
        for row, info in enumerate(batch.infos()):
            chain = int(batch.chains[row])
            cut = slice(row, row + 1)
            node, step, logged = self.feedback(
                obs=take(obs, cut),
                runtime_state=slice_batched_state(runtime_state, row),
                train_state=slice_batched_state(train_state, row),
                terminated=bool(batch.was_terminated[row]),
                truncated=bool(batch.was_truncated[row]),
                next_obs=take(batch.next_obs, cut),
                reward=float(batch.rewards[row]),
                info=info,
                next_terminated=bool(batch.terminated[row]),
                next_truncated=bool(batch.truncated[row]),
                prev_node=self._nodes.get(chain, _FIRST_NODE),
            )
            self._nodes[chain] = node
            self.global_step = step
            metrics.update(logged)
        return metrics

    @property
    def takes_batches(self) -> bool:
        """Whether frames are stored many at a time: `feedback_batch` is overridden."""
        return type(self).feedback_batch is not BaseAlgorithm.feedback_batch

    def forget_chain(self, chain: int) -> None:
        """No frame with this number will come again."""
        self._nodes.pop(chain, None)

    def discard_feedback(
        self, *, info: dict[str, Any], next_terminated: bool, next_truncated: bool
    ) -> None:
        """Take a frame that may not be stored: a finished episode still counts in the metrics."""
        if (next_terminated or next_truncated) and "episode" in info:
            self.record_episode_metrics(info["episode"])

    def discard_batch(self, batch: FrameBatch) -> None:
        """Take frames that may not be stored."""
        if not batch.info:
            return
        for row, info in enumerate(batch.infos()):
            self.discard_feedback(
                info=info,
                next_terminated=bool(batch.terminated[row]),
                next_truncated=bool(batch.truncated[row]),
            )

    @property
    def max_staleness(self) -> int | None:
        """How many versions older than the learner a frame's policy may be; None: any."""
        return 0 if self.on_policy else None

    def frames_before_control(self) -> int:
        """How many more frames can be stored before a learn step, a save or the end may be due.

        The trainer may answer requests before it stores that many. This default, 0, has every frame
        stored when it arrives.
        """
        return 0

    def frames_before_step(self, step: int) -> int:
        """How many more frames can be stored before `global_step` may be `step`, at least."""
        # A frame lasts at most as many steps as a chunk is long.
        longest = max(1, int(getattr(self.policy, "action_horizon", 1)))
        return (step - self.global_step - 1) // longest

    # ---- learning ------------------------------------------------------------------------------

    @abstractmethod
    def should_learn(self) -> bool:
        """Whether there is enough to learn from; must turn false in `pre_learn` or `learn`."""

    @abstractmethod
    def should_stop(self) -> bool:
        """Whether the run is finished."""

    @abstractmethod
    def should_save(self) -> bool:
        """Whether a checkpoint is due; must turn false in `create_checkpoint`."""

    def separate_learner(self) -> None:
        """Give the learner a policy of its own; called once, before `init_optimizers`.

        Raises:
            NotImplementedError: the algorithm cannot learn while the policy acts.
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot learn while its policy acts; use --learn-mode sync"
        )

    def init_optimizers(self) -> None:
        """Called once after construction."""

    def pre_learn(self) -> None:
        """Called before `learn`, while nothing else runs."""

    def learn(self) -> tuple[int, MetricDict]:
        """Learn; runs in the learner's thread.

        Returns:
            The environment steps so far and the numbers to log.
        """
        step, metrics = self.learn_impl()
        return step, self.build_train_info(metrics)

    @abstractmethod
    def learn_impl(self) -> tuple[int, MetricDict]:
        """Learn; the method to override."""

    def post_learn(self) -> None:
        """Called after `learn`, while nothing else runs: weights reach the acting policy here."""
        self.reset_episode_metrics()

    # ---- learning in another process (`most_learners`) -----------------------------------------

    def hand_over(self) -> Any:
        """Give what `learn_impl` needs of what was collected, and forget it.

        Called between `pre_learn` and `post_learn`, in place of `learn`. Plain data, arrays and
        tensors; nothing in it may change afterwards.
        """
        raise NotImplementedError(f"{type(self).__name__} learns only where it collects")

    def take_over(self, collected: Any) -> None:
        """Make ready for `learn_impl`, in a learner, where `pre_learn` is never called.

        Args:
            collected: what `hand_over` gave; the same in each of `ranks`.
        """
        raise NotImplementedError(f"{type(self).__name__} learns only where it collects")

    def named_optimizers(self) -> dict[str, Any]:
        """Give the optimizers by the names that they have in checkpoints."""
        return {}

    def learner_meta(self) -> dict[str, Any]:
        """Give what learning moves beside weights and optimizers, for a checkpoint's ``meta``.

        Counters, normalisers, generators, as plain data and tensors, copied.
        """
        return {}

    def load_learner_meta(self, meta: Mapping[str, Any]) -> None:
        """Restore what `learner_meta` gave, out of a ``meta`` that may hold more."""

    # ---- checkpoints ---------------------------------------------------------------------------

    @abstractmethod
    def create_checkpoint(self) -> Checkpoint:
        """Give all that a resumed run needs; nothing in it may change afterwards."""

    @abstractmethod
    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Continue from what `create_checkpoint` gave."""

    # ---- metrics and progress ------------------------------------------------------------------

    def record_episode_metrics(self, episode_info: Mapping[str, Any]) -> None:
        """Take ``info["episode"]`` of one environment."""
        self._episodes.record(episode_info)

    def record_episodes(self, episodes: list[Episode]) -> None:
        """Take finished episodes as the protocol reads them."""
        for episode in episodes:
            values = {"r": episode.episode_return, "l": episode.length_steps, "s": episode.success}
            self._episodes.record({k: v for k, v in values.items() if v is not None})

    def get_rollout_metrics(self, prefix: str = "rollout") -> MetricDict:
        """Give the means over recent episodes; empty if there was none."""
        return {prefix: self._episodes.summary()} if len(self._episodes) else {}

    def reset_episode_metrics(self) -> None:
        """Forget recent episodes."""
        self._episodes.reset()

    def get_lifecycle_metrics(self) -> MetricDict:
        """Give counters that belong to every row of metrics."""
        return {"train": {"global_step": self.global_step}}

    def build_train_info(self, *groups: MetricDict) -> MetricDict:
        """Merge groups of metrics with those of recent episodes and of the run."""
        merged: MetricDict = {}
        for group in (*groups, self.get_rollout_metrics(), self.get_lifecycle_metrics()):
            for key, value in group.items():
                if isinstance(value, dict) and isinstance(merged.get(key), dict):
                    merged[key] = {**merged[key], **value}
                else:
                    merged[key] = value
        return merged

    def get_total_training_steps(self) -> int | None:
        """How many environment steps the run has; None if unknown."""
        total: int | None = self.config.global_steps
        return total

    def get_collect_progress_total(self) -> int | None:
        """How much is collected before the next learn step; None if unknown."""
        return None

    def get_collect_progress_completed(self) -> int:
        """How much of it there is."""
        return 0

    def get_learn_progress_total(self) -> int | None:
        """How many parts a learn step has; None if unknown."""
        return None

    def report_learn_progress(self, done: int, total: int) -> None:
        """Tell how far a learn step is."""
        if self._learn_progress is not None:
            self._learn_progress(done, total)

    # ---- for subclasses ------------------------------------------------------------------------

    def infer_with_policy(self, obs: dict[str, Any]) -> tuple[Any, PolicyRuntimeState]:
        """Act with the policy; the action as a numpy array.

        Raises:
            PolicyContractError: the policy gave something else than two values.
        """
        given = self.policy.get_action_and_runtime_state(obs)
        if not isinstance(given, tuple) or len(given) != 2:
            raise PolicyContractError(
                f"{type(self.policy).__name__}.get_action_and_runtime_state gave "
                f"{type(given).__name__}; expected two values: the action [n, H, ...], and a "
                "runtime state or None"
            )
        action, runtime_state = given
        if not isinstance(action, np.ndarray):
            action = to_numpy_state(action)
        return action, runtime_state
