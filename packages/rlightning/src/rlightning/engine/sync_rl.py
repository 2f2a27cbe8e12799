"""`SyncRLEngine`, ``syncrl``: roll out, learn, sync weights, again; strictly on-policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from rlightning.engine.base_engine import BaseEngine
from rlightning.engine.evaluation import evaluate_episodes, summarise
from rlightning.errors import CheckpointError, ConfigError, NonFiniteError, StopRequested
from rlightning.types import BatchedData, EnvRet
from rlightning.utils.logger import get_logger, get_metrics_logger
from rlightning.utils.seeding import derive_seed, get_rng_state, set_rng_state

if TYPE_CHECKING:
    import pathlib

    from rlightning.buffer import DataBuffer
    from rlightning.config import MainConfig
    from rlightning.env import EnvGroup
    from rlightning.policy import PolicyGroup

__all__ = ["SyncRLEngine"]

_log = get_logger("engine.syncrl")


class SyncRLEngine(BaseEngine):
    """Alternates rollout and learning in one thread.

    Construction initialises everything: environments (seeded and reset), TRAIN and EVAL policies,
    buffer, and a first weight sync; with a checkpoint to resume from, all of their state.

    Raises:
        ConfigError: a rollout does not fit into the buffer.
        CheckpointError: the checkpoint is another policy's.
    """

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
        policy_group.set_dump_dir(run.run_dir / "nonfinite")
        self.buffer.init(self._env_metas, env_group.env_ids)
        self._env_rets: BatchedData[EnvRet] = env_group.first_env_rets
        self._eval_group: EnvGroup | None = None
        self._last_saved: tuple[str, int] | None = None
        self.sync_weights()
        if not policy_group.verify_eval_weight_consistency():
            raise ConfigError(
                "after the first weight sync, EVAL and TRAIN policies differ; does "
                "get_trainable_parameters return what load_state_dict loads?"
            )
        if run.resume_from is not None:
            self._resume(run.resume_from)
        elif config.train.warm_up:
            self.warm_up()

    def _rollout_steps(self) -> int:
        capacity, wanted = self.config.buffer.capacity, self.config.train.max_rollout_steps
        steps = capacity // self._rows if wanted == -1 else wanted
        if steps * self._rows > capacity or steps == 0:
            raise ConfigError(
                f"a rollout of {steps} steps of {self._rows} environments makes "
                f"{steps * self._rows} transitions; buffer.capacity is {capacity}. Raise "
                "buffer.capacity or lower train.max_rollout_steps"
            )
        return steps

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        """Train to ``train.max_epochs``, evaluate, and save ``epoch_last``.

        A stop request ends the loop early, with a checkpoint. So does an error, before it goes on
        to the caller, unless it says that numbers are not finite: then the last checkpoint stays
        the newest.
        """
        try:
            self._run_epochs()
        except StopRequested:
            total = self.config.train.max_epochs
            _log.warning("stopped after %d of %d epochs", self.epoch, total)
            self.save("epoch_last")
        except NonFiniteError:
            raise
        except BaseException:
            self.save("epoch_last")
            raise
        else:
            self.save("epoch_last")
        finally:
            self.close()
        if self.config.debug:
            self.print_timing_summary()

    def _run_epochs(self) -> None:
        train = self.config.train
        if train.eval_at_start and self.epoch == 0:
            self._evaluate()
        for epoch in self.iter_epochs(train.max_epochs):
            for _ in range(train.rollout_epoch):
                self._rollout()
            self._update_dataset()
            self._train()
            self._sync_weights()
            self.epoch = epoch + 1
            if _due(self.epoch, train.save_interval):
                self.save(f"epoch_{epoch}")
            if _due(self.epoch, train.eval_interval) and self.epoch < train.max_epochs:
                self._evaluate()
        self._evaluate()

    def rollout(self, obs_set: str = "train", prefix: str = "rollout") -> None:
        """Take ``train.max_rollout_steps`` steps in every environment and store them.

        Args:
            obs_set: handed to ``reset`` as the option ``obs_set`` where a rollout starts with one.
            prefix: of the metrics.
        """
        if self.config.train.reset_each_rollout:
            self._env_rets, _ = self.env_group.reset(options={"obj_set": obs_set})
        stop = self.run_context.stop
        for step in range(self._steps + 1):
            stop.raise_if_requested()
            env_rets = self._env_rets
            responses = self.policy_group.rollout_batch(env_rets)
            last = step == self._steps
            self.buffer.add_batched_transition(env_rets, responses, [last] * len(env_rets))
            if not last:
                self._env_rets, _ = self.env_group.step(responses)
                self.env_steps += self._rows
        self.log(self.env_group.get_env_stats(reset=True), prefix)

    def update_dataset(self) -> None:
        """Sample the buffer for the learner."""
        batch = self.buffer.sample(batch_size=self.config.train.batch_size)
        self.policy_group.update_dataset(batch)

    def train(self) -> dict[str, float]:
        """Update the policy and record its metrics."""
        metrics = self.policy_group.train()
        self.log(metrics, "train")
        return metrics

    def evaluate(self, obs_set: str = "train", prefix: str = "eval") -> dict[str, float]:
        """Play ``train.eval_episodes`` episodes in environments of their own; return the metrics.

        Neither the training environments nor the policy's statistics are touched, and the random
        state of training goes on as if nothing had happened.
        """
        train, run = self.config.train, self.run_context
        before = get_rng_state()
        seed = derive_seed(run.seed, "eval", "env")
        if self._eval_group is None:
            self._eval_group = self.env_group.for_evaluation()
            self._eval_group.init(seed=seed)
        tally = evaluate_episodes(
            self._eval_group,
            self.policy_group,
            episodes=train.eval_episodes,
            max_steps=train.max_eval_rollout_steps,
            options={"obj_set": obs_set},
            seed=seed,
            check_stop=run.stop.raise_if_requested,
        )
        set_rng_state(before)
        metrics = summarise(tally)
        self.log(metrics, prefix)
        return metrics

    def warm_up(self) -> None:
        """Run a short rollout and one update, then put everything back as it was."""
        before = self._training_state()
        steps, self._steps = self._steps, min(self._steps, self.config.train.warm_up_rollout_steps)
        self.rollout()
        self.update_dataset()
        self.policy_group.train()
        self._steps = steps
        self.buffer.clear()
        self._restore(before)

    def close(self) -> None:
        """Close the environments."""
        self.env_group.close()
        if self._eval_group is not None:
            self._eval_group.close()

    # ---- checkpoints ---------------------------------------------------------------------------

    def save(self, name: str) -> pathlib.Path:
        """Write a checkpoint of everything that a resumed run needs; return its directory."""
        checkpoint = Checkpoint(
            policy=self._policy_name(),
            epoch=self.epoch,
            env_steps=self.env_steps,
            weights=self.policy_group.train_list[0].export_weights(),
            training=self._training_state(),
            config_yaml=self.config.to_yaml(),
        )
        return save_checkpoint(
            self.run_context.checkpoint_dir,
            name,
            checkpoint,
            write_policy_file=self.policy_group.save_checkpoint,
        )

    def _policy_name(self) -> str:
        kind = type(self.policy_group.train_list[0])
        return f"{kind.__module__}:{kind.__qualname__}"

    def _training_state(self) -> dict[str, Any]:
        return {
            "policy": self.policy_group.export_state(),
            "buffer": self.buffer.state_dict(),
            "env": self.env_group.get_state(),
            "observations": [env_ret.observation for env_ret in self._env_rets.values()],
            "rng": get_rng_state(),
            "epoch": self.epoch,
            "env_steps": self.env_steps,
        }

    def _resume(self, path: pathlib.Path) -> None:
        checkpoint = load_checkpoint(path)
        if checkpoint.policy != self._policy_name():
            raise CheckpointError(
                f"{path} is a checkpoint of {checkpoint.policy}; this run trains "
                f"{self._policy_name()}"
            )
        self._restore(checkpoint.training)
        get_metrics_logger().resume(env_step=self.env_steps, epoch=self.epoch)
        _log.info("resumed from %s at epoch %d", path, self.epoch)

    def _restore(self, state: dict[str, Any]) -> None:
        self.policy_group.import_state(state["policy"])
        self.buffer.load_state_dict(state["buffer"])
        self.epoch, self.env_steps = int(state["epoch"]), int(state["env_steps"])
        if state["env"] is None:
            seed = derive_seed(self.run_context.seed, "env", "resumed", self.epoch)
            _log.warning(
                "these environments cannot be saved mid-episode: new episodes start, seed %d", seed
            )
            self._env_rets, _ = self.env_group.reset(seed=seed)
        else:
            self.env_group.set_state(state["env"])
            rets = [
                EnvRet(
                    env_id=env_id,
                    observation=observation,
                    last_terminated=done,
                    last_truncated=done,
                    last_reward=np.zeros(np.shape(done), np.float32),
                )
                for env_id, observation, done in zip(
                    self.env_group.env_ids, state["observations"], self._no_flags(), strict=True
                )
            ]
            self._env_rets = BatchedData(self.env_group.env_ids, rets)
        set_rng_state(state["rng"])

    def _no_flags(self) -> list[Any]:
        counts = [meta.num_envs or 1 for meta in self._env_metas]
        return [np.zeros(() if count == 1 else count, dtype=bool) for count in counts]


def _due(epoch: int, interval: int) -> bool:
    return interval > 0 and epoch % interval == 0
