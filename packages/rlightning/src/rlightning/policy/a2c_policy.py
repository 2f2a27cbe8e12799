"""Advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783), synchronous.

One gradient step over the whole rollout, along the policy gradient. That is PPO with a single pass
and a single minibatch, where every probability ratio is one and nothing is ever clipped (Huang et
al. 2022, "A2C is a special case of PPO", arXiv:2205.09123); so this file only says so.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field

from rlightning.config import Config, StrictConfig
from rlightning.policy.base_policy import BasePolicy
from rlightning.policy.ppo_config import PPOTrainConfig
from rlightning.policy.ppo_policy import PPOPolicy
from rlightning.utils.registry import POLICIES

if TYPE_CHECKING:
    from rlightning.ops.fused_ppo import Minibatch, StepOutputs

__all__ = ["A2COptimConfig", "A2CPolicy", "A2CTrainConfig"]


class A2COptimConfig(StrictConfig):
    """``policy.optim_cfg`` of A2C."""

    lr: float = Field(default=7e-4, gt=0)
    """Learning rate."""
    optimizer: Literal["rmsprop", "adam"] = "rmsprop"
    """RMSprop without momentum, or Adam."""
    alpha: float = Field(default=0.99, gt=0, lt=1)
    """Decay of RMSprop's squared gradient."""
    eps: float = Field(default=1e-5, gt=0)
    """Added to the root of the squared gradient's mean."""


class A2CTrainConfig(Config):
    """Keys of the ``train`` section that A2C reads."""

    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    value_coef: float = Field(default=0.5, ge=0)
    """Weight of the critic's mean squared error."""
    max_grad_norm: float = Field(default=0.5, gt=0, allow_inf_nan=True)
    """Norm the whole gradient is clipped to; ``.inf`` leaves it."""
    normalize_advantage: bool = False
    """Standardise the advantages of a rollout."""
    anneal_lr: bool = False
    """Lower the learning rate linearly to zero over `max_epochs`."""


@POLICIES.register("A2CPolicy")
class A2CPolicy(PPOPolicy):
    """A2C for the spaces, networks and normalisers that PPO takes.

    Rollouts are short (``train.max_rollout_steps: 5``) and advantages usually those of
    ``buffer.gae_lambda: 1``, the discounted rewards up to the rollout's end.
    """

    class TrainExtras(BasePolicy.TrainExtras, A2CTrainConfig):
        """Keys of the ``train`` section: those of `A2CTrainConfig`."""

    def _read_hyper(self, train: Any) -> PPOTrainConfig:
        keys = A2CTrainConfig.read(train).to_dict()
        return PPOTrainConfig.from_dict({"ppo_epochs": 1, "minibatch_size": sys.maxsize, **keys})

    def _make_optimizer(self, optim_cfg: Any) -> torch.optim.Optimizer:
        settings = A2COptimConfig.from_dict(optim_cfg, path="policy.optim_cfg")
        parameters = list(self.actor_critic.parameters())
        if settings.optimizer == "adam":
            return torch.optim.Adam(parameters, lr=settings.lr, eps=settings.eps, fused=True)
        return torch.optim.RMSprop(
            parameters, lr=settings.lr, alpha=settings.alpha, eps=settings.eps
        )

    def _metrics(
        self, data: dict[str, Any], rows: Minibatch, outputs: list[StepOutputs]
    ) -> dict[str, float]:
        """Summarise the step; at ratios of one there is neither a divergence nor clipping."""
        metrics = super()._metrics(data, rows, outputs)
        advantage = self._standardized(rows.advantage)
        metrics["policy_loss"] = float(-(outputs[0].log_prob * advantage).mean())
        del metrics["approx_kl"], metrics["clip_fraction"]
        return metrics
