"""Train a policy of rlightning from frames: its `rollout_step`, buffer, `update_dataset`, `train`.

The order of calls is the synchronous engine's: every frame's row goes into the buffer; after
``max_rollout_steps`` of every configured environment the policy answers what followed last (for an
on-policy buffer, which bootstraps from it), the buffer is sampled, the policy learns, and acting
goes on with the new weights. With one client of one environment it ends with the same weights.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, final

import numpy as np

from plugrl_server.algorithm.base_algorithm import BaseAlgoConfig, BaseAlgorithm, Checkpoint
from plugrl_server.algorithm.executed import executed_actions
from plugrl_server.algorithm.rlightning.parts import build_buffer, user_errors
from plugrl_server.algorithm.rlightning.served_policy import row_of
from plugrl_server.algorithm.torch_state import snapshot
from plugrl_server.errors import UsageError
from rlightning.types import BatchedData, EnvRet, to_numpy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_protocol.messages import Episode
    from plugrl_server.algorithm.base_algorithm import FrameBatch, MetricDict
    from plugrl_server.algorithm.rlightning.served_policy import ServedPolicy

__all__ = ["RLightningAlgorithm", "RLightningConfig"]

_NO = np.bool_(False)  # noqa: FBT003  # a value, not a switch


@dataclasses.dataclass
class RLightningConfig(BaseAlgoConfig):
    """What the command line says of a served policy; all else is in rlightning's configuration."""

    learns: bool = True
    """False only serves: nothing is stored, and actions are without exploration."""


@dataclasses.dataclass(slots=True)
class _Chain:
    """Consecutive frames of one environment: what came of the last one."""

    observation: Any
    """What followed; at an episode's end its own last observation."""
    reward: Any
    terminated: Any
    truncated: Any
    steps: Any

    @property
    def is_over(self) -> bool:
        return bool(self.terminated or self.truncated)


@final
class RLightningAlgorithm(BaseAlgorithm):
    """Serves and trains a `ServedPolicy`.

    Args:
        config: see `RLightningConfig`.
        policy: with its networks.

    Attributes:
        epoch: learn steps that are done.

    Raises:
        UsageError: an epoch does not fit into the buffer, or the buffer's dataset not to clients.
    """

    follows_chains = True
    supports_overlap = True

    def __init__(self, config: RLightningConfig, policy: ServedPolicy) -> None:
        super().__init__(config, policy)
        self.run = policy.config
        self.served = policy
        policy.deterministic = not config.learns
        self.epoch = 0
        self._saved_epoch = 0
        self._frames = 0
        self._chains: dict[int, _Chain] = {}
        self._expected: Sequence[int] = ()
        self._batch: list[Any] | None = None
        rows = sum(section.num_envs * section.num_workers for section in self.run.env)
        # Room for as many as are configured; whoever dials in becomes a worker of its own.
        seats = [f"seat-{row}" for row in range(rows)]
        with user_errors():
            self.buffer = build_buffer(self.run)
            self.buffer.init([policy.row_meta] * rows, seats)
        self.on_policy = self.buffer.needs_bootstrap_response  # type: ignore[misc]  # of the class elsewhere
        self._frames_per_epoch = self._epoch_length(rows)
        policy.group.sync_weights()

    def _epoch_length(self, rows: int) -> int:
        train, capacity = self.run.train, self.run.buffer.capacity
        wanted, rollouts = train.max_rollout_steps, train.rollout_epoch
        steps = capacity // (rows * rollouts) if wanted == -1 else wanted
        frames: int = steps * rows * rollouts
        if frames > capacity or frames == 0:
            raise UsageError(
                f"{rollouts} rollout(s) of {steps} steps of {rows} environments make {frames} "
                f"transitions per epoch; buffer.capacity is {capacity}. Raise buffer.capacity, or "
                "lower train.max_rollout_steps or train.rollout_epoch"
            )
        return frames

    # ---- acting --------------------------------------------------------------------------------

    def expect_chains(self, chains: Sequence[int]) -> None:
        """Take note of whose observations `infer` gets next."""
        self._expected = chains

    def infer(self, obs: dict[str, Any]) -> tuple[Any, Any]:
        """Draw actions."""
        rows = self.served.prepare_observation(obs)
        return self.served.act(
            [self._env_ret(chain, row_of(rows, row)) for row, chain in enumerate(self._expected)]
        )

    def _env_ret(self, chain: int, observation: Any) -> EnvRet:
        """Return what an environment shows now, with what came of its last action."""
        name, last = f"env-{chain}", self._chains.get(chain)
        if last is None:
            last = _Chain(observation, np.float32(0.0), _NO, _NO, np.int64(0))
        info: dict[str, Any] = {}
        if last.is_over:
            info = {"final_obs": last.observation, "_final_obs": np.bool_(True)}  # noqa: FBT003  # a value
        extra = {"last_steps": last.steps} if self.served.action_horizon > 1 else {}
        return EnvRet(
            name, observation, last.reward, last.terminated, last.truncated, info, _extra=extra
        )

    # ---- storing -------------------------------------------------------------------------------

    def feedback(self, **frame: Any) -> Any:
        """Not used: `feedback_batch` stores whole batches."""
        raise NotImplementedError("rlightning's policies take batches")

    def feedback_batch(self, batch: FrameBatch) -> MetricDict:
        """Store frames."""
        self.global_step += int(batch.steps.sum())
        if not self.config.learns:
            return {}
        self._frames += len(batch)
        following = self.served.prepare_observation(batch.next_obs)
        pairs: Any = batch.runtime_state
        if not self.on_policy and "executed_action" in batch.info:
            self._put_executed(batch, pairs)
        for row, chain in enumerate(batch.chains.tolist()):
            env_ret, response = pairs[row]
            name = f"env-{chain}"
            if chain not in self._chains:
                self.buffer.add_worker(name, self.served.row_meta)
            self.buffer.add_transition(name, env_ret, response)
            self._chains[chain] = _Chain(
                row_of(following, row),
                batch.rewards[row],
                batch.terminated[row],
                batch.truncated[row],
                batch.steps[row],
            )
        return {}

    @staticmethod
    def _put_executed(batch: FrameBatch, pairs: Any) -> None:
        """Learn off policy from what was really done, a person's actions included."""
        asked = np.stack([np.asarray(to_numpy(response.action)) for _, response in pairs])
        executed = executed_actions(batch, asked)
        for row, (_, response) in enumerate(pairs):
            response.action = executed[row]

    def forget_chain(self, chain: int) -> None:
        """No frame with this number will come again: what there is of it is complete."""
        super().forget_chain(chain)
        if chain in self._chains:
            self._close_segments([chain])
            self.buffer.remove_worker(f"env-{chain}")
            del self._chains[chain]
        self.served.group.forget_episodes([f"env-{chain}"])

    def _close_segments(self, chains: Sequence[int]) -> None:
        """Give the buffer what followed the last frames of chains."""
        names = [f"env-{chain}" for chain in chains]
        env_rets = [self._env_ret(chain, self._chains[chain].observation) for chain in chains]
        if not env_rets:
            return
        if not self.buffer.needs_bootstrap_response:
            replay: Any = self.buffer
            replay.finish_segments(BatchedData(names, env_rets))
            return
        with self.served.group.memory_kept():
            responses = self.served.respond(env_rets)
        for name, env_ret, response in zip(names, env_rets, responses, strict=True):
            self.buffer.add_transition(name, env_ret, response, truncated=True)

    # ---- learning ------------------------------------------------------------------------------

    def separate_learner(self) -> None:
        """Learner and actor are two instances anyway."""

    def should_learn(self) -> bool:
        """When an epoch's frames are in."""
        return self._frames >= self._frames_per_epoch

    def should_stop(self) -> bool:
        """After ``train.max_epochs``."""
        return bool(self.config.learns and self.epoch >= self.run.train.max_epochs)

    def should_save(self) -> bool:
        """Every ``train.save_interval`` epochs."""
        interval = int(self.run.train.save_interval)
        return 0 < interval <= self.epoch - self._saved_epoch

    def pre_learn(self) -> None:
        """Sample the buffer, so that the learner needs it no more."""
        train, sampler = self.run.train, self.run.buffer.sampler
        self._frames = 0
        if self.on_policy:
            self._close_segments(list(self._chains))
        self._batch = None
        if self.on_policy or self.buffer.can_sample(train.batch_size):
            shuffles = sampler is not None and sampler.type == "batch"
            self._batch = self.buffer.sample(batch_size=train.batch_size, shuffle=shuffles)

    def learn_impl(self) -> tuple[int, MetricDict]:
        """Let the policy learn."""
        batch, self._batch = self._batch, None
        metrics: dict[str, Any] = {}
        group = self.served.group
        buffer: Any = self.buffer  # a policy reports priorities to a buffer that has asked for them
        if batch is not None:
            group.update_dataset(batch)
            metrics = group.train()
            for index, priority in group.priorities():
                buffer.update_priorities(index, priority)
        logged = {name: float(value) for name, value in metrics.items()}
        return self.global_step, {"train": {**logged, "epoch": self.epoch + 1}}

    def post_learn(self) -> None:
        """Let the acting policy have the weights."""
        self.served.group.sync_weights()
        self.epoch += 1
        super().post_learn()

    # ---- progress and checkpoints --------------------------------------------------------------

    def record_episodes(self, episodes: list[Episode]) -> None:
        """Take finished episodes."""
        super().record_episodes(episodes)

    def get_total_training_steps(self) -> int | None:
        """How many steps the run has, where a chunk is one."""
        return self._frames_per_epoch * int(self.run.train.max_epochs)

    def get_collect_progress_total(self) -> int:
        """Frames of an epoch."""
        return self._frames_per_epoch

    def get_collect_progress_completed(self) -> int:
        """How many of them there are."""
        return min(self._frames, self._frames_per_epoch)

    def create_checkpoint(self) -> Checkpoint:
        """Give weights, what the learner needs, counters and the buffer's state."""
        self._saved_epoch = self.epoch
        state = self.served.group.export_state()
        weights = state.pop("weights")
        return Checkpoint(
            step=self.global_step,
            model=snapshot(weights),
            meta={
                "epoch": self.epoch,
                "group": snapshot(state),
                "buffer": self.buffer.state_dict(),
            },
        )

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Continue from all of it; of a checkpoint to serve, only the weights."""
        group, meta = self.served.group, checkpoint.meta
        self.global_step = checkpoint.step
        if not self.config.learns or "group" not in meta:
            group.load_weights(checkpoint.model or {})
            return
        group.import_state({**meta["group"], "weights": checkpoint.model})
        self.buffer.load_state_dict(meta["buffer"])
        self.epoch = self._saved_epoch = int(meta["epoch"])
