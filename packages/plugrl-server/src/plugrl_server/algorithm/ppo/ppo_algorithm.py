"""Proximal policy optimisation (Schulman et al. 2017) over frames from anywhere.

For any torch policy with ``evaluate_actions``, ``get_value`` and ``get_action_and_runtime_state``
whose runtime state has ``obs``, ``action``, ``logprob`` and ``value``.
"""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import nn

from plugrl_server.algorithm.base_algorithm import BaseAlgorithm
from plugrl_server.algorithm.ppo.targets import discounted_returns, frame_targets
from plugrl_server.algorithm.registration import register_algo
from plugrl_server.algorithm.torch_state import (
    as_module,
    learner_checkpoint,
    load_learner,
    publish,
    snapshot,
)
from plugrl_server.buffer.rollout_buffer import RolloutBuffer, Segments
from plugrl_server.common.outliers import usual_rows
from plugrl_server.common.trees import map_tree, take
from plugrl_server.errors import PolicyContractError
from plugrl_server.policy.state import pick_fields
from rlightning.ops import losses
from rlightning.ops.fused_ppo import FusedPPO, Minibatch, supports
from rlightning.ops.normalization import RunningMeanStd

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from plugrl_server.algorithm.base_algorithm import Checkpoint, FrameBatch, MetricDict
    from plugrl_server.policy.base_policy import PolicyRuntimeState
    from plugrl_server.policy.state import PolicyTrainState

__all__ = ["PPOAlgorithm"]

_FIELDS = ("obs", "action", "logprob", "value")
_BUFFER_SCHEMA = 1


_LOGGED = (
    "value_loss",
    "policy_loss",
    "entropy",
    "old_approx_kl",
    "approx_kl",
    "clipfrac",
    "grad_norm",
)


class _NotFiniteError(Exception):
    """A gradient is not finite: nothing may move."""


def _raise_not_finite(parameter: Tensor, gradient: Tensor) -> None:
    """Called for each parameter when the norm of the whole gradient is not finite."""
    del parameter, gradient
    raise _NotFiniteError


class _Rows(NamedTuple):
    """What gradient steps read, ``[n, ...]``."""

    obs: Any
    action: Tensor
    logprob: Tensor
    value: Tensor
    advantage: Tensor
    value_target: Tensor


@register_algo("ppo")
@final
class PPOAlgorithm(BaseAlgorithm):
    """Collect a buffer of frames, then pass over it several times.

    A gradient that is not finite (a client's reward of 1e38) moves nothing and is counted.

    Args:
        config: see `PPOConfig`.
        policy: what acts and is trained.

    Raises:
        TypeError: the policy has no ``evaluate_actions``.
        ValueError: the policy is deterministic: it has no probabilities to learn from.
        PolicyContractError: it is no torch policy, or a flag needs a critic that it does not show.
    """

    on_policy = True
    supports_overlap = True
    most_learners = None

    def __init__(self, config: Any, policy: Any) -> None:
        super().__init__(config, policy)
        if not hasattr(policy, "evaluate_actions"):
            raise TypeError(
                f"{type(policy).__name__} has no evaluate_actions(obs, action); ppo needs it"
            )
        if getattr(policy.config, "deterministic", False):
            raise ValueError("policy.deterministic is set; ppo needs a policy that draws actions")
        as_module(policy, needed_by="ppo")
        self.train_itrs = 0
        self.return_stats = RunningMeanStd(clip=None)
        self.filling = RolloutBuffer(config.buffer_size, self.example_train_state(1))
        self._learning = self.filling
        self.skipped_steps = 0
        self._last_saved_itr = 0
        self._learned_obs: Any = None
        self._learned_last = False
        self._seed = int(torch.randint(2**31, ()))
        self.generator = torch.Generator().manual_seed(self._seed)

    # ---- collecting ----------------------------------------------------------------------------

    def infer(self, obs: dict[str, Any]) -> tuple[Any, PolicyRuntimeState]:
        """Draw actions."""
        return self.infer_with_policy(obs)

    def derive_train_state(self, runtime_state: PolicyRuntimeState) -> PolicyTrainState:
        """Keep the four fields that PPO learns from."""
        return pick_fields(runtime_state, _FIELDS, needed_by="ppo")

    def feedback(self, **frame: Any) -> Any:
        """Not used: `feedback_batch` stores whole batches."""
        raise NotImplementedError("ppo takes batches")

    def feedback_batch(self, batch: FrameBatch) -> MetricDict:
        """Store frames."""
        self.filling.add(
            train_state=batch.train_state,
            chains=batch.chains,
            rewards=batch.rewards,
            steps=batch.steps,
            terminated=batch.terminated,
            truncated=batch.truncated,
            next_obs=batch.next_obs,
        )
        self.global_step += int(batch.steps.sum())
        return {}

    @property
    def max_staleness(self) -> int:
        """As configured."""
        return int(self.config.max_staleness)

    def frames_before_control(self) -> int:
        """Until the buffer is full, or the run's last frame may be in."""
        room = int(self.config.buffer_size) - len(self.filling) - 1
        total = self.config.global_steps
        return room if total is None else min(room, self.frames_before_step(int(total)))

    def should_learn(self) -> bool:
        """When the buffer is full, or the run's last frames are in."""
        return self.filling.full() or (len(self.filling) > 0 and self._all_collected())

    def _all_collected(self) -> bool:
        total = self.config.global_steps
        return total is not None and self.global_step >= total

    def should_stop(self) -> bool:
        """After the run's steps, or learn steps, once all of it is learned."""
        if self.config.global_steps is not None:
            nothing_left = self._learned_last or len(self.filling) == 0
            return self._all_collected() and nothing_left
        return self.train_itrs >= int(self.config.train_itrs)

    def should_save(self) -> bool:
        """Every ``save_interval`` learn steps."""
        return self.train_itrs - self._last_saved_itr >= int(self.config.save_interval)

    # ---- learning ------------------------------------------------------------------------------

    def separate_learner(self) -> None:
        """Train a copy."""
        self.learner_policy = copy.deepcopy(self.policy)

    def init_optimizers(self) -> None:
        """Make Adam, the critic apart from the rest where it has a learning rate of its own."""
        config, policy = self.config, as_module(self.learner_policy, needed_by="ppo")
        special = config.critic_learning_rate is not None or config.n_critic_warmup_itrs > 0
        parameters = [p for p in policy.parameters() if p.requires_grad]
        self._critic_ids = self._find_critic() if special else set()
        critic = [p for p in parameters if id(p) in self._critic_ids]
        actor = [p for p in parameters if id(p) not in self._critic_ids]
        groups: list[dict[str, Any]] = [{"params": actor, "lr": config.learning_rate}]
        if critic:
            rate = config.critic_learning_rate
            rate = config.learning_rate if rate is None else rate
            groups.append({"params": critic, "lr": rate})
        self._initial_rates = [group["lr"] for group in groups]
        self.optimizer = torch.optim.Adam(groups, eps=config.adam_eps)
        self._fused = self._make_fused()

    def _find_critic(self) -> set[int]:
        critic = getattr(self.learner_policy, "critic_parameters", None)
        if critic is None:
            raise PolicyContractError(
                "--algo.critic-learning-rate and --algo.n-critic-warmup-itrs need a policy with "
                f"critic_parameters(); {type(self.policy).__name__} has none"
            )
        return {id(parameter) for parameter in critic()}

    def pre_learn(self) -> None:
        """Hand the buffer over; new frames go to another one if the policy goes on acting."""
        self._learning = self.filling
        self._learned_last = self._all_collected()
        if self.learner_policy is not self.policy:
            self.filling = RolloutBuffer(self.config.buffer_size, self.example_train_state(1))

    def hand_over(self) -> dict[str, Any]:
        """Give the frames."""
        frames = self._learning.state_dict()
        self._learning.reset()
        return frames

    def take_over(self, collected: dict[str, Any]) -> None:
        """Take the frames."""
        self._learning.load_state_dict(collected)

    def learn_impl(self) -> tuple[int, MetricDict]:
        """Estimate advantages, then take the gradient steps."""
        self._set_learning_rates()
        rows, metrics = self._prepare()
        warmup = self.train_itrs < int(self.config.n_critic_warmup_itrs)
        logged = self._passes(rows, warmup=warmup)
        self.train_itrs += 1
        explained = losses.explained_variance(rows.value, rows.value_target)
        rate = self.optimizer.param_groups[0]["lr"]
        return self.global_step, {
            "losses": logged,
            "models": {"learning_rate": rate},
            "train": {"train_itrs": self.train_itrs, "critic_warmup": warmup, **metrics},
            "rollout": {"explained_variance": explained},
        }

    def post_learn(self) -> None:
        """Learn the observations' statistics and let the acting policy have all that is new."""
        update = getattr(self.learner_policy, "update_obs_stats", None)
        if update is not None and self._learned_obs is not None:
            update(self._learned_obs)
        self._learned_obs = None
        self._learning.reset()
        if self.learner_policy is not self.policy:
            publish(
                as_module(self.learner_policy, needed_by="ppo"),
                as_module(self.policy, needed_by="ppo"),
            )
        super().post_learn()

    def _set_learning_rates(self) -> None:
        if not self.config.anneal_lr:
            return
        steps = self.config.global_steps
        share = self.train_itrs / self.config.train_itrs
        if steps is not None:
            share = (self.global_step - len(self._learning)) / steps
        left = min(max(1.0 - share, 0.0), 1.0)
        for group, rate in zip(self.optimizer.param_groups, self._initial_rates, strict=True):
            group["lr"] = left * rate

    @torch.no_grad()
    def _prepare(self) -> tuple[_Rows, MetricDict]:
        """Turn the buffer into rows for gradient steps."""
        config, buffer = self.config, self._learning
        frames = buffer.read()
        state = frames["state"]
        segments = Segments(frames["chain"].numpy())
        logprob, value, log_ratio = state["logprob"], state["value"], None
        if self.max_staleness > 0:
            now, _, value = self._evaluate(state["obs"], state["action"])
            value = value.cpu()
            log_ratio = now.cpu() - logprob
        reward = self._scaled_rewards(frames, segments)
        targets = frame_targets(
            buffer,
            segments,
            self.learner_policy,
            reward=reward,
            value=value,
            log_ratio=log_ratio,
            gamma=config.gamma,
            gae_lambda=config.gae_lambda,
        )
        self._learned_obs = map_tree(lambda leaf: leaf.clone(), state["obs"])
        rows = _Rows(self._learned_obs, state["action"], logprob, value, *targets)
        return rows, {"frames": len(buffer), "skipped_steps": self.skipped_steps}

    def _scaled_rewards(self, frames: dict[str, Any], segments: Segments) -> Tensor:
        config = self.config
        reward: Tensor = frames["reward"]
        if not config.normalize_rewards:
            return reward
        gamma = config.reward_scaling_gamma
        gamma = config.gamma if gamma is None else gamma
        returns = discounted_returns(frames, segments, gamma=gamma)
        self.return_stats.update(usual_rows(returns, self.return_stats))
        scaled = reward / self.return_stats.std.float()
        return scaled.clamp(-config.reward_clip, config.reward_clip)

    def _evaluate(self, obs: Any, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        policy: Any = self.learner_policy
        logprob, entropy, value = policy.evaluate_actions(obs, action)
        return logprob, entropy, value

    def _passes(self, rows: _Rows, *, warmup: bool) -> MetricDict:
        """Take the gradient steps; give the means over the last pass."""
        config, n = self.config, len(rows.logprob)
        total = int(config.update_epochs)
        with contextlib.ExitStack() as update:
            step = partial(self._gradient_step, warmup=warmup)
            if self._fused is not None:
                policy: Any = self.learner_policy
                obs, action = policy.plain_inputs(rows.obs, rows.action)
                rows, step = rows._replace(obs=obs, action=action), partial(self._fused_step)
                update.enter_context(self._fused.borrowed())
            for epoch in range(total):
                order = torch.randperm(n, generator=self.generator)
                logged: list[dict[str, float]] = []
                for start in range(0, n, int(config.batch_size)):
                    index = order[start : start + int(config.batch_size)]
                    logged.append(step(*self._minibatch(rows, index)))
                    self.report_learn_progress(epoch * n + start + len(index), total * n)
                if config.target_kl is not None and logged[-1]["approx_kl"] > config.target_kl:
                    break
        return {name: sum(row[name] for row in logged) / len(logged) for name in logged[0]}

    def _minibatch(self, rows: _Rows, index: Tensor) -> tuple[_Rows, float]:
        """Give this learner's part of the rows at `index`, and its share of them."""
        advantage = rows.advantage[index]
        if self.config.norm_adv:
            advantage = losses.standardize(advantage)
        part, share = self.ranks.part(len(index))
        taken = _Rows(*(take(column, index[part]) for column in rows))
        return taken._replace(advantage=advantage[part]), share

    def _make_fused(self) -> FusedPPO | None:
        """Give the short way through a gradient step where it computes what is asked for."""
        config, policy = self.config, self.learner_policy
        layers = getattr(policy, "plain_layers", lambda: None)()
        alone = self.ranks.count == 1
        if not alone or config.clip_vloss or layers is None:
            return None
        if not supports(layers, self.optimizer):
            return None
        limit = float("inf") if config.max_grad_norm is None else config.max_grad_norm
        return FusedPPO(
            layers,
            self.optimizer,
            clip_ratio=config.clip_coef,
            value_coef=0.5 * config.vf_coef,
            entropy_coef=config.ent_coef,
            max_grad_norm=limit,
            on_non_finite=_raise_not_finite,
        )

    def _fused_step(self, rows: _Rows, _: float) -> dict[str, float]:
        """Do what `_gradient_step` does for plain networks on a CPU, in a fraction of its time."""
        assert self._fused is not None  # whoever calls this has seen it
        advantage = rows.advantage
        minibatch = Minibatch(
            rows.obs, rows.action, rows.logprob, advantage, rows.value_target, rows.value
        )
        try:
            log_prob, value, entropy, norm = self._fused.step(minibatch)
        except _NotFiniteError:
            self.skipped_steps += 1
            return dict.fromkeys(_LOGGED, float("nan"))
        clip = self.config.clip_coef
        surrogate = losses.ppo_policy_loss(log_prob, rows.logprob, advantage, clip_ratio=clip)
        logged: tuple[Tensor | float, ...] = (
            0.5 * losses.value_loss(value, rows.value_target),
            surrogate.loss,
            entropy,
            (rows.logprob - log_prob).mean(),
            surrogate.approx_kl,
            surrogate.clip_fraction,
            norm,
        )
        return {name: float(number) for name, number in zip(_LOGGED, logged, strict=True)}

    def _gradient_step(self, rows: _Rows, share: float, *, warmup: bool) -> dict[str, float]:
        config, policy = self.config, as_module(self.learner_policy, needed_by="ppo")
        logprob, entropy, value = self._evaluate(rows.obs, rows.action)
        device = logprob.device
        advantage = rows.advantage.to(device)
        old_logprob = rows.logprob.to(device)
        surrogate = losses.ppo_policy_loss(
            logprob, old_logprob, advantage, clip_ratio=config.clip_coef
        )
        critic = 0.5 * losses.value_loss(
            value,
            rows.value_target.to(device),
            old_value_B=rows.value.to(device),
            clip_range=config.clip_coef if config.clip_vloss else None,
        )
        bonus = losses.entropy_loss(entropy)
        loss = config.vf_coef * critic
        if not warmup:
            loss = loss + surrogate.loss + config.ent_coef * bonus
        self.optimizer.zero_grad()
        loss.backward()
        numbers = (
            critic,
            surrogate.loss,
            -bonus,
            (old_logprob - logprob).mean(),
            surrogate.approx_kl,
            surrogate.clip_fraction,
        )
        means = self.ranks.join(policy.parameters(), numbers, share=share)
        limit = float("inf") if config.max_grad_norm is None else config.max_grad_norm
        norm = nn.utils.clip_grad_norm_(policy.parameters(), limit)
        self._freeze_actor(warmup=warmup)
        if bool(torch.isfinite(norm)):
            self.optimizer.step()
        else:
            self.skipped_steps += 1
        project = getattr(policy, "project", None)
        if project is not None:
            project()
        return {n: float(number) for n, number in zip(_LOGGED, (*means, norm), strict=True)}

    def _freeze_actor(self, *, warmup: bool) -> None:
        """Without a gradient Adam leaves a parameter alone, momentum included."""
        if warmup:
            for parameter in self.optimizer.param_groups[0]["params"]:
                parameter.grad = None

    # ---- progress and checkpoints --------------------------------------------------------------

    def get_total_training_steps(self) -> int:
        """The run's length in environment steps; learn steps times frames where none is given."""
        if self.config.global_steps is not None:
            return int(self.config.global_steps)
        return int(self.config.train_itrs) * int(self.config.buffer_size)

    def get_collect_progress_total(self) -> int:
        """Frames of a buffer."""
        return int(self.config.buffer_size)

    def get_collect_progress_completed(self) -> int:
        """Frames in the buffer."""
        return len(self.filling)

    def create_checkpoint(self) -> Checkpoint:
        """Give weights, Adam, normalisers, counters, the generator and the frames at hand."""
        self._last_saved_itr = self.train_itrs
        checkpoint = learner_checkpoint(self)
        checkpoint.meta |= {
            "last_saved_itr": self._last_saved_itr,
            "rollout_buffer": self.filling.state_dict(),
            "rollout_buffer_schema_version": _BUFFER_SCHEMA,
        }
        return checkpoint

    def named_optimizers(self) -> dict[str, torch.optim.Optimizer]:
        """Adam."""
        return {"adam": self.optimizer}

    def learner_meta(self) -> dict[str, Any]:
        """How many learn steps there were, the spread of returns, the generator of orders."""
        return {
            "train_itrs": self.train_itrs,
            "return_stats": snapshot(dict(self.return_stats.state_dict())),
            "generator": self.generator.get_state(),
        }

    def load_learner_meta(self, meta: Mapping[str, Any]) -> None:
        """Continue counting, dividing and drawing."""
        self.train_itrs = int(meta["train_itrs"])
        self.return_stats.load_state_dict(meta["return_stats"])
        self.generator.set_state(meta["generator"])

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Continue from all of it."""
        load_learner(self, checkpoint)
        meta = checkpoint.meta
        self.global_step = checkpoint.step
        self._last_saved_itr = int(meta["last_saved_itr"])
        self.filling.load_state_dict(meta["rollout_buffer"])
