"""TD3 (Fujimoto et al. 2018, arXiv:1802.09477): a deterministic policy and two critics.

Collecting: the policy's action plus Gaussian noise. Learning, per minibatch: regress both critics
on the lower slow critic's value of a slow, smoothed action; every few steps move the policy towards
what the first critic values, and let the slow networks follow.

Two steps compute the same thing: `TD3Policy.update` for every network, `ops.fused_td3` for plain
MLPs on a CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from pydantic import Field
from torch import Tensor

from rlightning.config import StrictConfig
from rlightning.models.q_networks import (
    CriticConfig,
    DeterministicActor,
    QEnsemble,
    UnitActions,
    frozen_copy,
    plain_layers,
)
from rlightning.ops import td3
from rlightning.ops.fused_td3 import FusedTD3, TD3Layers, TD3Optimizers, TD3Settings, supports
from rlightning.ops.q_learning import ensemble_loss, polyak_update, td_target
from rlightning.policy.base_policy import BasePolicy
from rlightning.policy.off_policy import OffPolicy, OffPolicyTrainConfig, Transitions, plain_rows
from rlightning.policy.state import unwrap
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.registry import POLICIES

if TYPE_CHECKING:
    from rlightning.types import EnvMeta

__all__ = ["TD3OptimConfig", "TD3Policy", "TD3TrainConfig"]


class TD3TrainConfig(OffPolicyTrainConfig):
    """Keys of the ``train`` section that TD3 reads; noise is in units of [-1, 1] actions."""

    exploration_noise: float = Field(default=0.1, ge=0)
    """Standard deviation of the noise on actions taken."""
    target_noise: float = Field(default=0.2, ge=0)
    """Standard deviation of the noise on actions that targets are computed from."""
    target_noise_clip: float = Field(default=0.5, ge=0, allow_inf_nan=True)
    """Most that the latter may move an action."""
    actor_interval: int = Field(default=2, ge=1)
    """Gradient steps of the critics between those of the policy."""
    target_interval: int = Field(default=2, ge=1)
    """Gradient steps between moves of the target networks."""


class TD3OptimConfig(StrictConfig):
    """``policy.optim_cfg`` of TD3: learning rates of Adam."""

    actor_lr: float = Field(default=3e-4, gt=0)
    """Of the policy."""
    critic_lr: float = Field(default=1e-3, gt=0)
    """Of the critics."""


@POLICIES.register("TD3Policy")
class TD3Policy(OffPolicy):
    """TD3 for bounded Box actions and any supported observation."""

    reads_action_mask = True
    hyper: TD3TrainConfig

    class TrainExtras(BasePolicy.TrainExtras, TD3TrainConfig):
        """Keys of the ``train`` section that TD3 reads: those of `TD3TrainConfig`."""

    # ---- construction --------------------------------------------------------------------------

    def construct_network(self, env_meta: EnvMeta, *args: Any, **kwargs: Any) -> None:
        """Build actor, critics and the slow copies of both."""
        network = CriticConfig.from_dict(self.config.model_cfg, path="policy.model_cfg")
        self.hyper = TD3TrainConfig.read(self.config.train_config)
        self._activation = network.activation
        self.unit_actions = UnitActions(env_meta.action_space)
        space, size = self.read_mask(env_meta), self.unit_actions.size
        self.actor = DeterministicActor(space, size, network)
        self.critic = QEnsemble(space, size, network)
        self.target_actor = frozen_copy(self.actor)
        self.target_critic = frozen_copy(self.critic)
        self.start_counting(env_meta, network)

    def setup_optimizer(self, optim_cfg: Any) -> None:
        """Create one Adam for the actor and one for the critics."""
        self.check_batch_size()
        self.synchronize(self.target_actor, self.actor)
        self.synchronize(self.target_critic, self.critic)
        rates = TD3OptimConfig.from_dict(optim_cfg, path="policy.optim_cfg")
        adam = torch.optim.Adam
        self.optimizers = {
            "actor": adam(self.actor.parameters(), lr=rates.actor_lr, fused=True),
            "critic": adam(self.critic.parameters(), lr=rates.critic_lr, fused=True),
        }
        self._fused = self._make_fused()

    def _make_fused(self) -> FusedTD3 | None:
        """Return the fast step where the networks, the device and the optimizers allow it."""
        if self.process_group is not None:  # gradients must meet those of the other learners
            return None
        if self.is_masked:
            return None
        if [*self.actor.encoder.parameters(), *self.critic.encoder.parameters()]:
            return None
        layers = TD3Layers(
            plain_layers(self.actor.body),
            plain_layers(self.target_actor.body),
            [plain_layers(member) for member in self.critic.critics],
            [plain_layers(member) for member in self.target_critic.critics],
            self._activation,
        )
        adams = TD3Optimizers(self.optimizers["actor"], self.optimizers["critic"])
        if not supports(layers, adams):
            return None
        hyper = self.hyper
        settings = TD3Settings(hyper.tau, hyper.target_noise, hyper.target_noise_clip)
        return FusedTD3(layers, adams, settings, on_non_finite=self.check_gradient)

    # ---- acting --------------------------------------------------------------------------------

    def rollout_step(self, env_ret: EnvRet, **kwargs: Any) -> PolicyResponse:
        """Act on rows [N, ...]; answer one action per row, in the environment's units."""
        action = self.actor(self.normalized(env_ret.observation))
        if self.acts_randomly:
            action = self.unit_actions.sample(len(action))
        elif not self.deterministic:
            action = td3.noisy_action(action, std=self.hyper.exploration_noise)
        action = self.kept(env_ret.observation, action)
        return PolicyResponse(env_id=env_ret.env_id, action=self.unit_actions.to_env(action))

    # ---- learning ------------------------------------------------------------------------------

    def update(self, batch: Transitions, step: int) -> tuple[dict[str, Tensor], Tensor]:
        """Take a gradient step of the critics, and of the actor where it is time."""
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
            metrics["actor_loss"] = self._update_actor(batch.observation)
        if move_targets:
            for slow, fast in ((self.target_actor, self.actor), (self.target_critic, self.critic)):
                polyak_update(slow.parameters(), fast.parameters(), tau=self.hyper.tau)
        return metrics, (values.detach() - target).abs().mean(0)

    @torch.no_grad()
    def _target(self, batch: Transitions) -> Tensor:
        """Compute the smoothed double-critic targets, [B]."""
        action = td3.noisy_action(
            self.target_actor(batch.next_observation),
            std=self.hyper.target_noise,
            noise_clip=self.hyper.target_noise_clip,
        )
        action = self.kept(batch.next_observation, action)
        value = td3.clipped_double_value(self.target_critic(batch.next_observation, action))
        return td_target(batch.reward, batch.discount, value)

    def _update_actor(self, observation: Any) -> Tensor:
        critic = cast("QEnsemble", unwrap(self.critic))  # its own gradients are not wanted here
        action = self.kept(observation, self.actor(observation))
        loss = td3.actor_loss(critic(observation, action))
        self.minimize("actor", loss, self.actor.parameters())
        return loss.detach()
