"""Train a policy of rlightning from frames: its `rollout_step`, buffer, `update_dataset`, `train`.

The order of calls is the synchronous engine's: every frame's row goes into the buffer; after
``max_rollout_steps`` of every configured environment the policy answers what followed last (for an
on-policy buffer, which bootstraps from it), the buffer is sampled, the policy learns, and acting
goes on with the new weights. With one client of one environment it ends with the same weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from typing import TYPE_CHECKING, Any, final

import numpy as np

from plugrl_server.algorithm.base_algorithm import BaseAlgoConfig, BaseAlgorithm, Checkpoint
from plugrl_server.algorithm.executed import executed_actions
from plugrl_server.algorithm.rlightning.chains import ChainGroup, ChainTable, name_of
from plugrl_server.algorithm.rlightning.parts import build_buffer, user_errors
from plugrl_server.algorithm.torch_state import snapshot
from plugrl_server.common.logging_utils import get_logger
from plugrl_server.common.trees import take
from plugrl_server.errors import UsageError
from rlightning.policy.joining import ROW_OWNERS
from rlightning.types import BatchedData, PolicyResponse, map_leaves, to_numpy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_protocol.messages import Episode
    from plugrl_server.algorithm.base_algorithm import FrameBatch, MetricDict
    from plugrl_server.algorithm.rlightning.served_policy import ServedPolicy
    from rlightning.types import EnvRet

__all__ = ["RLightningAlgorithm", "RLightningConfig"]

_log = get_logger("rlightning")


@dataclasses.dataclass
class RLightningConfig(BaseAlgoConfig):
    """What the command line says of a served policy; all else is in rlightning's configuration."""

    learns: bool = True
    """False only serves: nothing is stored, and actions are without exploration."""


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
        self._table = ChainTable(shows_steps=policy.action_horizon > 1)
        self._groups: dict[str, ChainGroup] = {}
        self._group_of: dict[int, ChainGroup] = {}
        self._numbers = itertools.count()
        self._expected: Sequence[int] = ()
        self._batch: list[Any] | None = None
        rows = sum(section.num_envs * section.num_workers for section in self.run.env)
        # Room for as many as are configured; whoever dials in becomes a worker of its own.
        seats = [f"seat-{row}" for row in range(rows)]
        with user_errors():
            self.buffer = build_buffer(self.run)
            learners = len(policy.group.train_list)
            self.buffer.init([policy.row_meta] * rows, seats, train_worker_num=learners)
        self.on_policy = not self.buffer.keeps_sampled  # type: ignore[misc]  # of the class elsewhere
        self._frames_per_epoch = self._epoch_length(rows)
        policy.group.sync_weights()
        if config.learns:
            self._say_that_nobody_evaluates()

    def _say_that_nobody_evaluates(self) -> None:
        """Clients train, and the server has no environments of its own."""
        train = self.run.train
        asked = {
            "train.eval_interval": train.eval_interval > 0,
            "train.eval_at_start": train.eval_at_start,
            "train.record_episodes": train.record_episodes > 0,
            "env.evaluate_cfg": any(section.evaluate_cfg for section in self.run.env),
        }
        keys = ", ".join(key for key, is_set in asked.items() if is_set)
        _log.log(
            logging.WARNING if keys else logging.INFO,
            "a server does not evaluate%s: all its clients train. Measure a checkpoint with "
            "`rlightning eval CHECKPOINT`, or let an engine drive the clients: "
            "`rlightning train CONFIG env.backend=env_server`",
            keys and f" ({keys} of the configuration)",
        )

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
        slots = self._table.slots_of(self._expected)
        return self.served.act(self._table.env_ret("clients", slots, rows))

    # ---- storing -------------------------------------------------------------------------------

    def feedback(self, **frame: Any) -> Any:
        """Not used: `feedback_batch` stores whole batches."""
        raise NotImplementedError("rlightning's policies take batches")

    def feedback_batch(self, batch: FrameBatch) -> MetricDict:
        """Store frames."""
        self.global_step += int(batch.steps.sum())
        following = self.served.prepare_observation(batch.next_obs)
        chains = batch.chains.tolist()
        if self.config.learns:
            self._frames += len(batch)
            self._store(batch, chains)
        self._table.note(self._table.slots_of(chains), following, batch)
        return {}

    def _store(self, batch: FrameBatch, chains: list[int]) -> None:
        state: Any = batch.runtime_state
        if not self.on_policy and "executed_action" in batch.info:
            # Off policy is learned from what was really done, a person's actions included.
            response = state["response"]
            executed = executed_actions(batch, np.asarray(to_numpy(response["action"])))
            state = {**state, "response": {**response, "action": executed}}
        group = self._group_of.get(chains[0])
        if group is not None and group.chains == tuple(chains):
            self._add(group, state)
            return
        new = [chain for chain in chains if chain not in self._group_of]
        if new:
            self._begin(new)
        for group in dict.fromkeys(self._group_of[chain] for chain in chains):
            at = [row for row, chain in enumerate(chains) if self._group_of[chain] is group]
            members = np.array([group.chains.index(chains[row]) for row in at])
            self._add(group, take(state, np.array(at)), members)

    def _begin(self, chains: list[int]) -> None:
        """Let chains be one worker of the buffer from now on."""
        name = f"clients-{next(self._numbers)}"
        group = ChainGroup(name, tuple(chains), self._table.slots_of(chains))
        self._groups[name] = group
        self._group_of |= dict.fromkeys(chains, group)
        meta = dataclasses.replace(self.served.row_meta, num_envs=len(chains))
        self.buffer.add_worker(name, meta)

    def _add(self, group: ChainGroup, state: Any, members: Any = None) -> None:
        """Store a row of a group: what its environments showed and the policy answered.

        Args:
            group: N chains.
            state: see `ServedPolicy.act`; m rows.
            members: which of the chains those are, ``[m]``; None: all, in their order.
        """
        idle = None
        if members is not None and not np.array_equal(members, np.arange(len(group.chains))):
            idle = np.ones(len(group.chains), np.bool_)
            idle[members] = False
            state = group.spread(members, state)
        env_ret = self._env_ret(group, state["observation"], idle)
        self.buffer.add_transition(group.name, env_ret, _response(group, state["response"]))

    def _env_ret(self, group: ChainGroup, observation: Any, idle: Any = None) -> EnvRet:
        """Return a row of a group as an environment worker gives it; of one, without an axis."""
        env_ret = self._table.env_ret(group.name, group.slots, observation)
        del env_ret.info[ROW_OWNERS]
        if idle is not None:
            env_ret.info["_idle"] = idle
        if len(group.chains) > 1:
            return env_ret
        return env_ret._map(_first)

    def forget_chain(self, chain: int) -> None:
        """No frame with this number will come again."""
        super().forget_chain(chain)
        group = self._group_of.get(chain)
        if group is None:
            self._let_go([chain])
            return
        group.gone.add(chain)
        if len(group.gone) == len(group.chains):  # what there is of it is complete
            self._close([group])
            self.buffer.remove_worker(group.name)
            del self._groups[group.name]
            for each in group.chains:
                del self._group_of[each]
            self._let_go(group.chains)

    def _let_go(self, chains: Sequence[int]) -> None:
        self._table.forget(chains)
        self.served.group.forget_episodes([name_of(chain) for chain in chains])

    def _close(self, groups: Sequence[ChainGroup]) -> None:
        """Give the buffer what followed the last frames of groups."""
        if not groups:
            return
        slots = np.concatenate([group.slots for group in groups])
        shown = self._table.following(slots)
        cuts, start = [], 0
        for group in groups:
            cuts.append(slice(start, start + len(group.slots)))
            start += len(group.slots)
        env_rets = [
            self._env_ret(group, take(shown, cut)) for group, cut in zip(groups, cuts, strict=True)
        ]
        if not self.buffer.needs_bootstrap_response:
            replay: Any = self.buffer
            replay.finish_segments(BatchedData([group.name for group in groups], env_rets))
            return
        with self.served.group.memory_kept():
            fields = self.served.respond(self._table.env_ret("clients", slots, shown))
        for group, cut, env_ret in zip(groups, cuts, env_rets, strict=True):
            response = _response(group, take(fields, cut))
            self.buffer.add_transition(group.name, env_ret, response, truncated=True)

    # ---- learning ------------------------------------------------------------------------------

    def separate_learner(self) -> None:
        """Learner and actor are two instances anyway; where they are two processes, both draw."""
        self.served.group.split_random_stream()

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
        if self.buffer.needs_bootstrap_response:
            self._close(list(self._groups.values()))
        self._batch = None
        if self.buffer.has_batch(train.batch_size):
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
        self.served.group.random_stream.take_home()  # the trainer saves this process's
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
        group.random_stream.take_home()
        self.global_step = checkpoint.step
        if not self.config.learns or "group" not in meta:
            group.load_weights(checkpoint.model or {})
            return
        group.import_state({**meta["group"], "weights": checkpoint.model})
        self.buffer.load_state_dict(meta["buffer"])
        self.epoch = self._saved_epoch = int(meta["epoch"])


def _first(tree: Any) -> Any:
    return map_leaves(lambda leaf: leaf[0], tree)


def _response(group: ChainGroup, fields: dict[str, Any]) -> PolicyResponse:
    """Return a policy's answer to a row of a group; to one of one environment, without an axis."""
    if len(group.chains) == 1:
        fields = _first(fields)
    return PolicyResponse(group.name, **fields)
