"""`TrainingEngine`: what every training loop shares: its start, evaluation, checkpoints, its end.

A subclass says how rollout and learning alternate (`_run_epochs`).
"""

from __future__ import annotations

import contextlib
import copy
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.checkpoint import (
    Checkpoint,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
    save_offender,
)
from rlightning.engine.base_engine import BaseEngine
from rlightning.engine.recording import record_episodes
from rlightning.engine.resuming import (
    check_saved_rows,
    differences,
    same_environments,
    without_rows,
)
from rlightning.engine.turn_taking import taking_turns
from rlightning.errors import CheckpointError, ConfigError, NonFiniteError, StopRequested
from rlightning.types import BatchedData, EnvRet
from rlightning.utils.logger import get_logger, get_metrics_logger
from rlightning.utils.seeding import derive_seed, get_rng_state

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    from rlightning.buffer import DataBuffer
    from rlightning.config import MainConfig
    from rlightning.env import EnvGroup
    from rlightning.policy import PolicyGroup
    from rlightning.runtime.turns import Turns
    from rlightning.types import PolicyResponse

__all__ = ["TrainingEngine"]

_log = get_logger("engine")


class TrainingEngine(BaseEngine):
    """Base of the loops that learn.

    Construction initialises everything: environments (seeded and reset), TRAIN and EVAL policies,
    buffer, and a first weight sync; with a checkpoint to resume from, all of their state.

    Raises:
        ConfigError: a rollout does not fit into the buffer.
        CheckpointError: the checkpoint is another policy's.
    """

    rollout_prefix = "rollout"
    train_prefix = "train"
    marks_rows = False
    """Whether every row collected tells the version of the weights that acted."""

    def __init__(
        self,
        config: MainConfig,
        env_group: EnvGroup,
        policy_group: PolicyGroup,
        buffer: DataBuffer | None = None,
    ) -> None:
        super().__init__(config, env_group, policy_group, buffer)
        run = self.run_context
        self._env_metas = env_group.init(seed=derive_seed(run.seed, "env"))
        self._rows = sum(meta.num_envs or 1 for meta in self._env_metas)
        self._steps = self._rollout_steps()
        policy_group.init_train(config.train, self._env_metas[0])
        policy_group.init_eval(env_meta=self._env_metas[0])
        policy_group.set_addresses({env.env_id: env.address for env in env_group.env_list})
        policy_group.set_dump_dir(run.run_dir / "nonfinite")
        self.buffer.init(
            self._env_metas,
            env_group.env_ids,
            train_worker_num=len(policy_group.train_list),
        )
        self._env_rets: BatchedData[EnvRet] = env_group.first_env_rets
        self._eval_group: EnvGroup | None = None
        self._best_return = -np.inf
        self._owes_evaluation = config.train.eval_at_start
        self._lost_eval_workers = 0
        self.lost_episodes = 0
        """Episodes that ended because the worker that played them died."""
        policy_group.sync_weights()
        if not policy_group.verify_eval_weight_consistency():
            norms = policy_group.train_list[0].get_param_fingerprint()
            broken = sorted(name for name, norm in norms.items() if np.isnan(norm))
            if broken:
                raise ConfigError(
                    f"the first weights are NaN: {', '.join(broken)}. Look at how "
                    f"{self._policy_name()} initialises them in construct_network"
                )
            raise ConfigError(
                "after the first weight sync, EVAL and TRAIN policies differ; does "
                "get_trainable_parameters return what load_state_dict loads?"
            )
        if run.resume_from is not None:
            self._resume(run.resume_from)
        elif config.train.warm_up:
            self.warm_up()

    def _rollout_steps(self) -> int:
        capacity, train = self.config.buffer.capacity, self.config.train
        wanted, rollouts = train.max_rollout_steps, train.rollout_epoch
        steps = capacity // (self._rows * rollouts) if wanted == -1 else wanted
        rows = steps * self._rows * rollouts
        if rows > capacity or steps == 0:
            raise ConfigError(
                f"{rollouts} rollout(s) of {steps} steps of {self._rows} environments make {rows} "
                f"transitions per epoch; buffer.capacity is {capacity}. Raise buffer.capacity, or "
                "lower train.max_rollout_steps or train.rollout_epoch"
            )
        return steps

    # ---- the run -------------------------------------------------------------------------------

    @abstractmethod
    def _run_epochs(self) -> None:
        """Run the epochs that are left; call `_end_epoch` after each."""

    def run(self) -> None:
        """Train to ``train.max_epochs``, evaluate, and save ``epoch_last``.

        A stop request ends the loop early, with the checkpoint ``epoch_last``. An error ends it
        with one called ``crashed``, which may be from the middle of an update, before it goes on to
        the caller; unless it says that numbers are not finite: then the last checkpoint stays the
        newest.
        """
        total = self.config.train.max_epochs
        try:
            if self._owes_evaluation and self.epoch < total:
                self._evaluate_all()
            self._run_epochs()
            self._evaluate_all()
        except StopRequested:
            _log.warning("stopped after %d of %d epochs", self.epoch, total)
            self.save("epoch_last")
        except NonFiniteError as error:
            self._save_offender(error)
            raise
        except BaseException:
            self._save_after_an_error()
            raise
        else:
            self.save("epoch_last")
        finally:
            if self.config.debug:
                self.print_timing_summary()
            self.close()

    def _save_after_an_error(self) -> None:
        try:
            try:
                self.save("crashed")
            except Exception:  # noqa: BLE001  # a dead environment cannot tell where it is
                self.save("crashed", episodes=False)
        except Exception:  # noqa: BLE001  # what broke the run may break this too; the first error is the news
            _log.exception("after an error, the state could not be saved")

    def _save_offender(self, error: NonFiniteError) -> None:
        """Save what an environment returned, and the batch of observations that was acted on."""
        if error.dump is not None or error.value is None:
            return
        batch = {env_id: env_ret.observation for env_id, env_ret in self._env_rets}
        path = self.run_context.run_dir / "nonfinite" / f"step_{self.env_steps}.pt"
        error.dump = save_offender(path, name=error.tensor, tensor=error.value, batch=batch)

    def _end_epoch(self, index: int) -> None:
        """Count epoch `index` as done; save and evaluate where it is time to."""
        train = self.config.train
        self.epoch = index + 1
        if _due(self.epoch, train.save_interval):
            self.save(f"epoch_{index}")
            prune_checkpoints(self.run_context.checkpoint_dir, keep=train.keep_checkpoints)
        if _due(self.epoch, train.eval_interval) and self.epoch < train.max_epochs:
            self._owes_evaluation = True
            self._evaluate_all()
        if self.config.debug and self.config.verbose:
            self.log({name: entry["total"] for name, entry in self.timing_raw.items()}, "time_s")

    def act(self, env_rets: BatchedData[EnvRet]) -> BatchedData[PolicyResponse]:
        """Return the policy's answers, which go to the environments and into the buffer."""
        return self.policy_group.rollout_batch(env_rets)

    def collect(self, steps: int) -> None:
        """Take `steps` steps in every environment and store them.

        A buffer that needs the policy's answer to the last observation, to bootstrap from it, gets
        it and ends a segment there; for another one the next rollout goes on where this one ended.
        """
        with self._turns(steps) as turns:
            for _ in range(steps):
                if turns is None or not self.run_context.stop.requested or turns.all_taken():
                    self._check_stop()
                with self._exclusive():
                    responses = self._act_and_store(ends=False)
                    self._env_rets, _ = self.env_group.step(responses)
                    self.env_steps += self._rows
                    self._count_lost_workers()
        if self.buffer.needs_bootstrap_response:
            with self._exclusive(), self.policy_group.memory_kept():
                self._act_and_store(ends=True)

    def _turns(self, steps: int) -> contextlib.AbstractContextManager[Turns | None]:
        """Let workers step and answer by themselves, where this loop only looks on."""
        kind = type(self)
        if kind.act is not TrainingEngine.act or kind._exclusive is not TrainingEngine._exclusive:
            return contextlib.nullcontext()
        return taking_turns(self.env_group, self.policy_group, self._env_rets, steps)

    def _count_lost_workers(self) -> None:
        """Take note of workers that died; the buffer leaves out what it has of their episodes."""
        lost = self.env_group.take_lost_episodes()
        if lost:
            self.policy_group.forget_episodes(list(lost))
            self.lost_episodes += sum(lost.values())
            self.log({"lost_episodes": self.lost_episodes}, "workers")
        if self.policy_group.lost_eval_workers > self._lost_eval_workers:
            self._lost_eval_workers = self.policy_group.lost_eval_workers
            self.log({"lost_eval_workers": self._lost_eval_workers}, "workers")

    def _act_and_store(self, *, ends: bool) -> BatchedData[PolicyResponse]:
        env_rets = self._env_rets
        responses = self.act(env_rets)
        if not ends:
            self.env_group.begin_step(responses)  # those elsewhere step while rows are stored
        self.buffer.add_batched_transition(env_rets, responses, [ends] * len(env_rets))
        return responses

    def _exclusive(self) -> contextlib.AbstractContextManager[Any]:
        """Keep rollouts from running meanwhile; there is nothing to keep in one thread."""
        return contextlib.nullcontext()

    def rollout(
        self,
        obj_set: str = "train",
        prefix: str = "",
        is_eval: bool = False,  # noqa: FBT001, FBT002  # the documented signature
    ) -> None:
        """Take ``train.max_rollout_steps`` steps in every environment and store them.

        Args:
            obj_set: an option of ``reset``, where a rollout starts with one.
            prefix: of the metrics; empty takes the engine's own.
            is_eval: evaluate instead; nothing is stored.
        """
        if is_eval:
            self.evaluate(obj_set, prefix or "eval")
            return
        if self.config.train.reset_each_rollout:
            self.buffer.truncate_episodes(self.env_group.env_ids)
            self._env_rets, _ = self.env_group.reset(options={"obj_set": obj_set})
            self.policy_group.forget_episodes()
        self.collect(self._steps)
        self.log(self.env_group.get_env_stats(reset=True), prefix or self.rollout_prefix)

    def update_dataset(self) -> None:
        """Sample the buffer for the learner."""
        batch = self.buffer.sample(batch_size=self.config.train.batch_size, shuffle=self._shuffles)
        self.policy_group.update_dataset(batch)

    @property
    def _shuffles(self) -> bool:
        """Whether batches come in random order; everything there is comes in its own order."""
        sampler = self.config.buffer.sampler
        return sampler is not None and sampler.type == "batch"

    def train(self) -> dict[str, float]:
        """Update the policy and record its metrics."""
        metrics = self.policy_group.train()
        buffer: Any = self.buffer  # a policy reports priorities to a buffer that has asked for them
        for index, priority in self.policy_group.priorities():
            buffer.update_priorities(index, priority)
        self.log(metrics, self.train_prefix)
        return metrics

    def warm_up(self) -> None:
        """Run a short rollout and one update, then put everything back as it was."""
        before = copy.deepcopy(self._training_state())  # training changes the tensors it holds
        self.collect(min(self._steps, self.config.train.warm_up_rollout_steps))
        self.policy_group.update_dataset(self.buffer.sample(shuffle=self._shuffles))
        self.policy_group.train()
        self.buffer.clear()
        self.env_group.get_env_stats(reset=True)
        self._restore(before)

    def close(self) -> None:
        """Close the environments, and the run's logs where this engine opened them."""
        if self._eval_group is not None:
            self._eval_group.close()
        super().close()

    # ---- evaluation ----------------------------------------------------------------------------

    def _evaluate_all(self) -> None:
        metrics = self._evaluate("train", "eval")
        self._owes_evaluation = False
        if self.env_group.has_test_set:
            self._evaluate("test", "eval_ood")
        if self.config.train.record_episodes:
            self._record()
        score = metrics.get("episode_return", -np.inf)
        if score > self._best_return:
            self._best_return = score
            if self.config.train.save_best:
                self.save("best")

    def evaluate(self, obj_set: str = "train", prefix: str = "eval") -> dict[str, float]:
        """Play ``train.eval_episodes`` episodes in environments of their own; return the metrics.

        Neither the training environments nor the policy's statistics are touched, and the random
        state of training goes on as if nothing had happened.
        """
        seed = derive_seed(self.run_context.seed, "eval", "env")
        with self._exclusive(), self._random_state_kept():
            if self._eval_group is None:
                self._eval_group = self.env_group.for_evaluation()
                self._eval_group.init(seed=seed)
            return self._measure(self._eval_group, obj_set, prefix, seed)

    def _record(self) -> None:
        """Write a video of the policy as it is now, or one of each task."""
        tasks = dict.fromkeys(self.env_group.tasks)
        for task in tasks:
            name = f"step_{self.env_steps}" + (f"_{task}" if len(tasks) > 1 else "")
            self._record_task(task, self.run_context.run_dir / "videos" / f"{name}.mp4")

    def _record_task(self, task: str, path: pathlib.Path) -> None:
        seed = derive_seed(self.run_context.seed, "eval", "video")
        group = self.env_group.for_recording("rgb_array", task)
        try:
            with self._exclusive(), self._random_state_kept():
                group.init(seed=seed)
                record_episodes(
                    group,
                    self.policy_group,
                    path,
                    episodes=self.config.train.record_episodes,
                    seed=seed,
                )
        finally:
            group.close()

    # ---- checkpoints ---------------------------------------------------------------------------

    def save(self, name: str, *, episodes: bool = True) -> pathlib.Path:
        """Write a checkpoint of everything that a resumed run needs; return its directory.

        Args:
            name: of the checkpoint.
            episodes: whether a resumed run goes on in the middle of the episodes under way, where
                the environments can; otherwise it starts new ones.
        """
        with self._exclusive():
            checkpoint = Checkpoint(
                policy=self._policy_name(),
                epoch=self.epoch,
                env_steps=self.env_steps,
                weights=self.policy_group.train_list[0].export_weights(),
                training=self._training_state(episodes=episodes),
                config_yaml=self.config.to_yaml(),
            )
            return save_checkpoint(
                self.run_context.checkpoint_dir,
                name,
                checkpoint,
                write_policy_file=self.policy_group.save_checkpoint,
            )

    def _policy_name(self) -> str:
        kind = self.policy_group.policy_class
        return f"{kind.__module__}:{kind.__qualname__}"

    def _training_state(self, *, episodes: bool = True) -> dict[str, Any]:
        return {
            "policy": self.policy_group.export_state(),
            "buffer": self.buffer.state_dict(),
            "env": self.env_group.get_state() if episodes else None,
            "memory": self.policy_group.episode_memories(self.env_group.env_ids),
            "rows": [_plain_row(env_ret) for env_ret in self._env_rets.values()],
            "rng": self._random_state(),
            "epoch": self.epoch,
            "env_steps": self.env_steps,
            "best_return": float(self._best_return),
            "owes_evaluation": self._owes_evaluation,
        }

    def _resume(self, path: pathlib.Path) -> None:
        checkpoint = load_checkpoint(path)
        if checkpoint.policy != self._policy_name():
            raise CheckpointError(
                f"{path} is a checkpoint of {checkpoint.policy}; this run trains "
                f"{self._policy_name()}"
            )
        state, saved, now = checkpoint.training, checkpoint.config_yaml, self.config.to_yaml()
        if not same_environments(saved, now):
            state = state | {"env": None}  # theirs would bring their settings back, too
        if self.config.buffer.get("save_contents") is False:  # not where it is no key
            state = state | {"buffer": without_rows(state["buffer"])}
        try:
            check_saved_rows(state["buffer"], marked=self.marks_rows)
            self._restore(state)
        except (RuntimeError, KeyError, ValueError) as error:
            changed = differences(saved, now) or " nothing in their configurations"
            raise CheckpointError(
                f"{path} does not fit this run: {error}\nWhat differs from the run that wrote it:"
                f"{changed}\nSet it back, or start a new run; to go on with an empty buffer, set "
                "buffer.save_contents: false."
            ) from error
        self.run_context.record_config(self.config)
        get_metrics_logger().resume(env_step=self.env_steps, epoch=self.epoch)
        _log.info("resumed from %s at epoch %d", path, self.epoch)

    def _restore(self, state: dict[str, Any]) -> None:
        self.policy_group.import_state(state["policy"])
        goes_on = state["env"] is not None and not self.config.train.reset_each_rollout
        self.buffer.load_state_dict(state["buffer"], continue_episodes=goes_on)
        self.epoch, self.env_steps = int(state["epoch"]), int(state["env_steps"])
        self._best_return = float(state["best_return"])
        self._owes_evaluation = bool(state.get("owes_evaluation", False))
        if state["env"] is None:
            seed = derive_seed(self.run_context.seed, "env", "resumed", self.epoch)
            _log.warning(
                "the checkpoint is not from the middle of these environments' episodes: new ones "
                "start, seed %d",
                seed,
            )
            self._env_rets, _ = self.env_group.reset(seed=seed)
            self.policy_group.forget_episodes()
        else:
            self.env_group.set_state(state["env"])
            ids = self.env_group.env_ids
            rows = [EnvRet(env_id, **row) for env_id, row in zip(ids, state["rows"], strict=True)]
            self._env_rets = BatchedData(ids, rows)
            self.policy_group.load_episode_memories(state.get("memory", []), self._env_rets)
        self._go_on_with(state["rng"])

    def _random_state(self) -> dict[str, Any]:
        self.policy_group.random_stream.take_home()
        return get_rng_state() | {"acting": self.policy_group.acting_generators()}

    def _go_on_with(self, state: dict[str, Any]) -> None:
        self.policy_group.random_stream.is_home_with(state)
        self.policy_group.load_acting_generators(state.get("acting", []))

    @contextlib.contextmanager
    def _random_state_kept(self) -> Iterator[None]:
        before = self._random_state()
        try:
            yield
        finally:
            self._go_on_with(before)


def _plain_row(env_ret: EnvRet) -> dict[str, Any]:
    """Return what the next rollout starts from, with what completes the transition before it."""
    fields = {name: getattr(env_ret, name) for name in env_ret.fields() if name != "info"}
    finals = {key: env_ret.info[key] for key in ("final_obs", "_final_obs") if key in env_ret.info}
    return {**fields, "info": finals}


def _due(epoch: int, interval: int) -> bool:
    return interval > 0 and epoch % interval == 0
