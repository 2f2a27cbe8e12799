"""Soft actor-critic with a learned temperature (Haarnoja et al. 2018, arXiv:1812.05905).

Collecting: sample the squashed Gaussian. Learning, per minibatch: regress both critics on the soft
value of what followed, move the policy towards what the lower critic values, move the temperature
so that the policy's entropy meets its target, let the target critics follow.

Two steps compute the same thing: `SACPolicy.update` for every network, `ops.fused_sac` for plain
MLPs on a CPU, up to twice as fast.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from pydantic import Field
from torch import Tensor, nn

from rlightning.config import StrictConfig
from rlightning.models.action_mask import MASK
from rlightning.models.q_networks import (
    LOG_STD_BOUNDS,
    CriticConfig,
    QEnsemble,
    SquashedGaussianActor,
    UnitActions,
    frozen_copy,
    plain_layers,
)
from rlightning.ops import soft_actor_critic as sac
from rlightning.ops.distributions import (
    masked_squashed_gaussian_log_prob,
    squashed_gaussian_log_prob,
    squashed_gaussian_sample,
)
from rlightning.ops.fused_sac import (
    FusedSAC,
    SACLayers,
    SACOptimizers,
    SACSettings,
    supports,
)
from rlightning.ops.q_learning import ensemble_loss, polyak_update, td_target
from rlightning.policy.base_policy import BasePolicy
from rlightning.policy.off_policy import OffPolicy, OffPolicyTrainConfig, Transitions, plain_rows
from rlightning.policy.over_ranks import mean_over_ranks
from rlightning.policy.state import unwrap
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.registry import POLICIES

if TYPE_CHECKING:
    from rlightning.types import EnvMeta

__all__ = ["SACOptimConfig", "SACPolicy", "SACTrainConfig"]


class SACTrainConfig(OffPolicyTrainConfig):
    """Keys of the ``train`` section that SAC reads."""

    temperature: float = Field(default=1.0, gt=0)
    """Worth of one nat of entropy in units of reward, at the start where it is learned."""
    learn_temperature: bool = True
    """Move the temperature so that the policy's entropy meets `target_entropy`."""
    target_entropy: float | None = None
    """In nats, of actions scaled to [-1, 1]; unset: minus the number of action dimensions, of each
    row its own where actions are masked."""
    actor_interval: int = Field(default=1, ge=1)
    """Gradient steps of the critics between those of the policy and the temperature."""


class SACOptimConfig(StrictConfig):
    """``policy.optim_cfg`` of SAC: learning rates of Adam."""

    actor_lr: float = Field(default=3e-4, gt=0)
    """Of the policy."""
    critic_lr: float = Field(default=1e-3, gt=0)
    """Of the critics."""
    temperature_lr: float = Field(default=1e-3, gt=0)
    """Of the temperature's logarithm."""


@POLICIES.register("SACPolicy")
class SACPolicy(OffPolicy):
    """SAC for bounded Box actions and any supported observation.

    Log-probabilities and entropies are those of unit actions, scaled to [-1, 1]: their numbers do
    not depend on the units of the environment's actions.
    """

    reads_action_mask = True
    hyper: SACTrainConfig
    model_config: ClassVar[type[CriticConfig]] = CriticConfig
    """What ``policy.model_cfg`` may hold."""
    train_config: ClassVar[type[SACTrainConfig]] = SACTrainConfig
    """What it reads of the ``train`` section."""

    class TrainExtras(BasePolicy.TrainExtras, SACTrainConfig):
        """Keys of the ``train`` section that SAC reads: those of `SACTrainConfig`."""

    # ---- construction --------------------------------------------------------------------------

    def construct_network(self, env_meta: EnvMeta, *args: Any, **kwargs: Any) -> None:
        """Build actor, critics, their slow copies and the temperature."""
        network = self.model_config.from_dict(self.config.model_cfg, path="policy.model_cfg")
        self.hyper = self.train_config.read(self.config.train_config)
        self._activation = network.activation
        self.unit_actions = UnitActions(env_meta.action_space)
        space, size = self.read_mask(env_meta), self.unit_actions.size
        self.actor = SquashedGaussianActor(space, size, network)
        self.critic = QEnsemble(space, size, network)
        self.target_critic = frozen_copy(self.critic)
        self.log_alpha = nn.Parameter(
            torch.tensor(math.log(self.hyper.temperature)),
            requires_grad=self.hyper.learn_temperature,
        )
        self.start_counting(env_meta, network)

    def setup_optimizer(self, optim_cfg: Any) -> None:
        """Create one Adam for actor, critics and temperature each."""
        self.check_batch_size()
        self.synchronize(self.target_critic, self.critic)
        rates = SACOptimConfig.from_dict(optim_cfg, path="policy.optim_cfg")
        target = self.hyper.target_entropy
        self.target_entropy = -float(self.unit_actions.size) if target is None else target
        learned = {
            "actor": (self.actor.parameters(), rates.actor_lr),
            "critic": (self.critic.parameters(), rates.critic_lr),
        }
        if self.hyper.learn_temperature:
            learned["temperature"] = (iter([self.log_alpha]), rates.temperature_lr)
        self.optimizers = {
            name: torch.optim.Adam(parameters, lr=lr, fused=True)
            for name, (parameters, lr) in learned.items()
        }
        self._fused = self._make_fused()

    def _make_fused(self) -> FusedSAC | None:
        """Return the fast step where the networks, the device and the optimizers allow it."""
        if self.process_group is not None:  # gradients must meet those of the other learners
            return None
        if self.is_masked:
            return None
        actor, critic, target = self.actor, self.critic, self.target_critic
        if [*actor.encoder.parameters(), *critic.encoder.parameters()]:
            return None
        layers = SACLayers(
            plain_layers(actor.body),
            [plain_layers(member) for member in critic.critics],
            [plain_layers(member) for member in target.critics],
            self._activation,
            self.log_alpha,
            LOG_STD_BOUNDS,
        )
        adam = self.optimizers
        adams = SACOptimizers(adam["actor"], adam["critic"], adam.get("temperature"))
        if not supports(layers, adams):
            return None
        settings = SACSettings(self.hyper.tau, self.target_entropy)
        return FusedSAC(layers, adams, settings, on_non_finite=self.check_gradient)

    # ---- acting --------------------------------------------------------------------------------

    def rollout_step(self, env_ret: EnvRet, **kwargs: Any) -> PolicyResponse:
        """Act on rows [N, ...]; answer one action per row, in the environment's units."""
        mean, log_std = self.actor(self.normalized(env_ret.observation))
        if self.acts_randomly:
            action = self.unit_actions.sample(len(mean))
        elif self.deterministic:
            action = mean.tanh()
        else:
            action, _ = squashed_gaussian_sample(mean, log_std)
        action = self.kept(env_ret.observation, action)
        return PolicyResponse(env_id=env_ret.env_id, action=self.unit_actions.to_env(action))

    # ---- learning ------------------------------------------------------------------------------

    @property
    def temperature(self) -> Tensor:
        """The worth of one nat of entropy, a positive scalar."""
        return self.log_alpha.detach().exp()

    def update(self, batch: Transitions, step: int) -> tuple[dict[str, Tensor], Tensor]:
        """Take a gradient step of the critics, and of actor and temperature where it is time."""
        learn_actor = step % self.hyper.actor_interval == 0
        move_targets = (step + 1) % self.hyper.target_interval == 0
        if self._fused is not None and self._fused.is_borrowed:
            rows = plain_rows(batch, self.critic, self.unit_actions)
            return self._fused.step(rows, learn_actor=learn_actor, move_targets=move_targets)
        target = self._target(batch)
        unit = self.kept(batch.observation, self.unit_actions.to_unit(batch.action))
        values = self.critic(batch.observation, unit)
        critic_loss = ensemble_loss(values, target, batch.weight)
        self.minimize("critic", critic_loss, self.critic.parameters())
        metrics = {"critic_loss": critic_loss.detach(), "q": values.detach().mean()}
        if learn_actor:
            metrics |= self._update_actor(batch.observation)
        if move_targets:
            slow, fast = self.target_critic.parameters(), self.critic.parameters()
            polyak_update(slow, fast, tau=self.hyper.tau)
        return metrics, (values.detach() - target).abs().mean(0)

    @torch.no_grad()
    def _target(self, batch: Transitions) -> Tensor:
        """Compute the soft value targets, [B]."""
        action, log_prob = self._sample(batch.next_observation)
        values = self.target_critic(batch.next_observation, action)
        return td_target(batch.reward, batch.discount, self._next_value(values, log_prob))

    def _next_value(self, values: Tensor, log_prob: Tensor) -> Tensor:
        """Return the soft value [B] of what followed, from the slow critics' [E, B]."""
        return sac.soft_value(values, log_prob, self.temperature)

    def _judgement(self, values: Tensor) -> Tensor:
        """Return the values of which the actor follows the lowest, from the critics' [E, B]."""
        return values

    def _update_actor(self, observation: Any) -> dict[str, Tensor]:
        action, log_prob = self._sample(observation)
        critic = cast("QEnsemble", unwrap(self.critic))  # its own gradients are not wanted here
        values = self._judgement(critic(observation, action))
        actor_loss = sac.actor_loss(values, log_prob, self.temperature)
        self.minimize("actor", actor_loss, self.actor.parameters())
        entropy = -log_prob.detach().mean()
        if self.hyper.learn_temperature:
            target = self.target_entropy
            if self.is_masked and self.hyper.target_entropy is None:
                own = -float(observation[MASK].sum(-1, dtype=torch.float32).mean())
                target = mean_over_ranks(own, self.process_group)
            mean_entropy = mean_over_ranks(float(entropy), self.process_group)
            loss = sac.temperature_loss(self.log_alpha, mean_entropy, target)
            self.minimize("temperature", loss, [self.log_alpha])
        return {
            "actor_loss": actor_loss.detach(),
            "entropy": entropy,
            "temperature": self.temperature,
        }

    def _sample(self, observation: Any) -> tuple[Tensor, Tensor]:
        """Draw unit actions [B, A], differentiably, and return their log-probabilities [B]."""
        mean, log_std = self.actor(observation)
        action, pre_tanh = squashed_gaussian_sample(mean, log_std)
        if not self.is_masked:
            return action, squashed_gaussian_log_prob(pre_tanh, mean, log_std)
        kept = observation[MASK].to(mean.dtype)
        log_prob = masked_squashed_gaussian_log_prob(pre_tanh, mean, log_std, kept)
        return action * kept, log_prob
