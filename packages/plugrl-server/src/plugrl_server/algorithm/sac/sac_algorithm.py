"""Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv 1812.05905).

For any torch policy whose runtime state has ``obs`` and ``action``, and that offers
``sample_with_log_prob``, ``q_values``, ``update_targets``, ``actor_parameters``,
``critic_parameters`` and ``log_alpha``. A terminated transition bootstraps nothing, a truncated one
from its own last observation; a chunk of k steps discounts by ``gamma ** k``.
"""

from __future__ import annotations

import copy
import logging
import math
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch

from plugrl_server.algorithm.base_algorithm import BaseAlgorithm, EpisodeMetricWindow
from plugrl_server.algorithm.executed import executed_actions
from plugrl_server.algorithm.registration import register_algo
from plugrl_server.algorithm.torch_state import (
    as_module,
    learner_checkpoint,
    load_learner,
    publish,
)
from plugrl_server.buffer.replay_buffer import ReplayBuffer
from plugrl_server.common.outliers import usual_transitions
from plugrl_server.common.trees import map_tree, take
from plugrl_server.errors import PolicyContractError
from plugrl_server.policy.state import pick_fields
from rlightning.ops.q_learning import ensemble_loss, td_target
from rlightning.ops.soft_actor_critic import actor_loss, soft_value, temperature_loss

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from plugrl_server.algorithm.base_algorithm import Checkpoint, FrameBatch, MetricDict
    from plugrl_server.policy.base_policy import PolicyRuntimeState
    from plugrl_server.policy.state import PolicyTrainState

__all__ = ["SACAlgorithm"]

_log = logging.getLogger(__name__)

_OFFERS = (
    "sample_with_log_prob",
    "q_values",
    "update_targets",
    "actor_parameters",
    "critic_parameters",
    "log_alpha",
)
MAX_UPDATES_PER_LEARN = 256
"""In overlap mode a slow learner skips what it owes beyond this, and says so."""


@register_algo("sac")
@final
class SACAlgorithm(BaseAlgorithm):
    """Store every transition; update from random ones.

    Args:
        config: see `SACConfig`.
        policy: networks and acting.

    Raises:
        PolicyContractError: the policy is no torch policy, or lacks one of the methods.
    """

    on_policy = False
    supports_overlap = True
    most_learners = None

    def __init__(self, config: Any, policy: Any) -> None:
        super().__init__(config, policy)
        as_module(policy, needed_by="sac")
        missing = [name for name in _OFFERS if not hasattr(policy, name)]
        if missing:
            raise PolicyContractError(
                f"{type(policy).__name__} lacks {', '.join(missing)}, which sac calls"
            )
        example: Any = self.example_train_state(1)
        transitions = ReplayBuffer.example(example["obs"], example["action"])
        seed = int(np.random.randint(2**31))
        self.replay = ReplayBuffer(config.buffer_size, transitions, seed=seed)
        self.target_entropy = -float(np.prod(example["action"].shape[1:]))
        self.updates = 0
        self.skipped_updates = 0
        self._steps_at_learn = 0
        self._steps_when_empty = 0
        self._owed = 0.0
        self._last_saved_step = 0
        self._batches: list[Any] = []
        self._episodes = EpisodeMetricWindow(length=100)

    # ---- collecting ----------------------------------------------------------------------------

    def infer(self, obs: dict[str, Any]) -> tuple[Any, PolicyRuntimeState]:
        """Draw actions."""
        return self.infer_with_policy(obs)

    def derive_train_state(self, runtime_state: PolicyRuntimeState) -> PolicyTrainState:
        """Keep the observation and the action."""
        return pick_fields(runtime_state, ("obs", "action"), needed_by="sac")

    def feedback(self, **frame: Any) -> Any:
        """Not used: `feedback_batch` stores whole batches."""
        raise NotImplementedError("sac takes batches")

    def feedback_batch(self, batch: FrameBatch) -> MetricDict:
        """Store transitions, with the actions that were executed where the client reports them.

        Raises:
            ObservationError: those have another shape than the policy's.
        """
        state: Any = batch.train_state
        discount = np.where(batch.terminated, 0.0, self.config.gamma**batch.steps)
        self.replay.add(
            {
                "obs": state["obs"],
                "action": executed_actions(batch, state["action"]),
                "reward": batch.rewards.astype(np.float32),
                "discount": discount.astype(np.float32),
                "next_obs": self.policy.prepare_observation(batch.next_obs),
            }
        )
        self.global_step += int(batch.steps.sum())
        return {}

    @property
    def _learning_starts(self) -> int:
        """The step of the first update; again later where a run goes on without its transitions."""
        return self._steps_when_empty + int(self.config.learning_starts)

    def frames_before_control(self) -> int:
        """Until a learn step, a checkpoint or the run's end may be due."""
        config = self.config
        learning = max(self._learning_starts, self._steps_at_learn + int(config.update_every))
        due = [learning, self._last_saved_step + int(config.save_interval)]
        if config.global_steps is not None:
            due.append(int(config.global_steps))
        return self.frames_before_step(min(due))

    def should_learn(self) -> bool:
        """Once enough is stored, every ``update_every`` steps."""
        if self.global_step < self._learning_starts:
            return False
        return self.global_step - self._steps_at_learn >= int(self.config.update_every)

    def should_stop(self) -> bool:
        """At ``global_steps``."""
        total = self.config.global_steps
        return total is not None and self.global_step >= total

    def should_save(self) -> bool:
        """Every ``save_interval`` steps."""
        return self.global_step - self._last_saved_step >= int(self.config.save_interval)

    # ---- learning ------------------------------------------------------------------------------

    def separate_learner(self) -> None:
        """Train a copy."""
        self.learner_policy = copy.deepcopy(self.policy)

    def init_optimizers(self) -> None:
        """Make one Adam each for the critics, the policy and the temperature."""
        policy: Any = self.learner_policy
        self.optimizers: dict[str, torch.optim.Optimizer] = {
            "q": torch.optim.Adam(policy.critic_parameters(), lr=self.config.q_lr),
            "policy": torch.optim.Adam(policy.actor_parameters(), lr=self.config.policy_lr),
        }
        if policy.log_alpha.requires_grad:
            self.optimizers["alpha"] = torch.optim.Adam([policy.log_alpha], lr=self.config.q_lr)

    def pre_learn(self) -> None:
        """Draw the batches of the updates that are due, so that the learner needs no buffer."""
        start = max(self._steps_at_learn, self._learning_starts - 1)
        self._owed += (self.global_step - start) * float(self.config.update_to_data_ratio)
        self._steps_at_learn = self.global_step
        due = int(self._owed)
        self._owed -= due
        if self.learner_policy is not self.policy and due > MAX_UPDATES_PER_LEARN:
            self.skipped_updates += due - MAX_UPDATES_PER_LEARN
            due = MAX_UPDATES_PER_LEARN
        self._batches = [self.replay.sample(int(self.config.batch_size)) for _ in range(due)]

    def hand_over(self) -> dict[str, Any]:
        """Give the batches."""
        batches, self._batches = self._batches, []
        return {"batches": batches, "skipped_updates": self.skipped_updates}

    def take_over(self, collected: dict[str, Any]) -> None:
        """Take the batches."""
        self._batches = collected["batches"]
        self.skipped_updates = collected["skipped_updates"]

    def learn_impl(self) -> tuple[int, MetricDict]:
        """Update once per batch."""
        logged: dict[str, float] = {}
        batches, self._batches = self._batches, []
        for done, batch in enumerate(batches, start=1):
            logged |= self._update(usual_transitions(batch))
            self.report_learn_progress(done, len(batches))
        counters = {"updates": self.updates, "skipped_updates": self.skipped_updates}
        return self.global_step, {"losses": logged, "train": counters}

    def post_learn(self) -> None:
        """Let the acting policy have the weights. Episode metrics go on: updates are many."""
        if self.learner_policy is not self.policy:
            publish(
                as_module(self.learner_policy, needed_by="sac"),
                as_module(self.policy, needed_by="sac"),
            )

    def _update(self, batch: Any) -> dict[str, float]:
        config, policy = self.config, self._learner()
        part, share = self.ranks.part(len(batch["reward"]))
        batch = map_tree(lambda leaf: leaf.to(policy.device), take(batch, part))
        obs = batch["obs"]
        (q_loss,) = self._step("q", share, self._critic_loss(batch))
        logged = {"q_loss": q_loss}
        self.updates += 1
        counted = getattr(policy, "n_updates", None)
        if counted is not None:  # the policy keeps the number with its weights
            counted += 1
        if self.updates % int(config.policy_frequency) == 0:
            for _ in range(int(config.policy_frequency)):
                losses = self._actor_loss(obs)
                logged["policy_loss"], logged["entropy"] = self._step("policy", share, *losses)
                if "alpha" in self.optimizers:
                    loss = temperature_loss(policy.log_alpha, losses[1], self.target_entropy)
                    (logged["alpha_loss"],) = self._step("alpha", share, loss)
            logged["alpha"] = float(policy.log_alpha.detach().exp())
        if self.updates % int(config.target_network_frequency) == 0:
            policy.update_targets(config.tau)
        return logged

    def _learner(self) -> Any:
        return self.learner_policy

    def _critic_loss(self, batch: Any) -> Tensor:
        policy = self._learner()
        with torch.no_grad():
            action, logprob = policy.sample_with_log_prob(batch["next_obs"])
            values = policy.q_values(batch["next_obs"], action, target=True)
            value = soft_value(values, logprob, policy.log_alpha.exp())
            target = td_target(batch["reward"], batch["discount"], value)
        return ensemble_loss(policy.q_values(batch["obs"], batch["action"]), target)

    def _actor_loss(self, obs: Any) -> tuple[Tensor, Tensor]:
        """Give the loss and the entropy of the batch, the latter detached."""
        policy = self._learner()
        action, logprob = policy.sample_with_log_prob(obs)
        loss = actor_loss(policy.q_values(obs, action), logprob, policy.log_alpha.exp())
        return loss, -logprob.mean().detach()

    def _step(self, name: str, share: float, loss: Tensor, *numbers: Tensor) -> list[float]:
        """Take a gradient step; give the loss and the numbers, as means over the batch."""
        optimizer = self.optimizers[name]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch declares no types here
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        values = [float(n) for n in self.ranks.join(parameters, (loss, *numbers), share=share)]
        if math.isfinite(values[0]):
            optimizer.step()
        return values

    # ---- progress and checkpoints --------------------------------------------------------------

    def get_collect_progress_total(self) -> int:
        """Steps before the first update, then between two."""
        if self.global_step < self._learning_starts:
            return self._learning_starts - self._steps_at_learn
        return int(self.config.update_every)

    def get_collect_progress_completed(self) -> int:
        """How many of them there are."""
        return self.global_step - self._steps_at_learn

    def create_checkpoint(self) -> Checkpoint:
        """Give weights, optimizers, counters and the replay buffer."""
        self._last_saved_step = self.global_step
        contents = bool(self.config.save_replay_buffer)
        checkpoint = learner_checkpoint(self)
        checkpoint.meta |= {
            "skipped_updates": self.skipped_updates,
            "steps_at_learn": self._steps_at_learn,
            "steps_when_empty": self._steps_when_empty,
            "owed": self._owed,
            "last_saved_step": self._last_saved_step,
            "replay": self.replay.state_dict(contents=contents),
        }
        return checkpoint

    def named_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Those of the critics, the policy and the temperature."""
        return self.optimizers

    def learner_meta(self) -> dict[str, Any]:
        """How many updates there were."""
        return {"updates": self.updates}

    def load_learner_meta(self, meta: Mapping[str, Any]) -> None:
        """Continue counting."""
        self.updates = int(meta["updates"])

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Continue from all of it."""
        load_learner(self, checkpoint)
        meta = checkpoint.meta
        self.global_step = checkpoint.step
        self.skipped_updates = int(meta["skipped_updates"])
        self._steps_at_learn, self._owed = int(meta["steps_at_learn"]), float(meta["owed"])
        self._last_saved_step = int(meta["last_saved_step"])
        self._steps_when_empty = int(meta.get("steps_when_empty", 0))
        self.replay.load_state_dict(meta["replay"])
        if len(self.replay) == 0 and self.global_step > 0:
            self._steps_when_empty = self.global_step
            _log.warning(
                "the checkpoint holds no transitions (--algo.save-replay-buffer): learning goes on "
                "at step %d, after %d new steps",
                self._learning_starts,
                int(self.config.learning_starts),
            )
