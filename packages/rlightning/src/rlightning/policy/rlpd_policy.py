"""RLPD (Ball et al. 2023, "Efficient Online Reinforcement Learning with Offline Data",
arXiv:2302.02948): SAC on batches that are half prior data, with many normalised critics.

What makes it different from `SACPolicy`: a large ensemble with LayerNorm, targets from the lowest
of a few critics drawn anew, a policy that follows the ensemble's mean. The other half, batches of
prior and of collected data, is the `PriorReplayBuffer`'s. Updates per environment step are
``train.batch_size / (train.minibatch_size * steps of an epoch)``; the paper takes 20, and one step
of the policy in as many (``train.actor_interval``).
"""  # noqa: D205 - the title does not fit on one line

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field

from rlightning.models.q_networks import CriticConfig
from rlightning.ops import soft_actor_critic as sac
from rlightning.policy.sac_policy import SACPolicy, SACTrainConfig
from rlightning.utils.registry import POLICIES

if TYPE_CHECKING:
    from torch import Tensor

    from rlightning.ops.fused_sac import FusedSAC

__all__ = ["RLPDModelConfig", "RLPDPolicy", "RLPDTrainConfig"]


class RLPDModelConfig(CriticConfig):
    """``policy.model_cfg`` of RLPD."""

    n_critics: int = Field(default=10, ge=1)
    """Critics of the ensemble."""
    layer_norm: bool = True
    """Normalise the critics' hidden layers, which keeps values of unseen actions bounded."""


class RLPDTrainConfig(SACTrainConfig):
    """Keys of the ``train`` section that RLPD reads."""

    target_critics: int = Field(default=2, ge=1)
    """Slow critics drawn for each step, of which the lowest gives the target."""
    backup_entropy: bool = True
    """Count the entropy of what follows in the target."""


@POLICIES.register("RLPDPolicy")
class RLPDPolicy(SACPolicy):
    """RLPD for bounded Box actions and any supported observation."""

    hyper: RLPDTrainConfig
    model_config: ClassVar[type[CriticConfig]] = RLPDModelConfig
    train_config: ClassVar[type[SACTrainConfig]] = RLPDTrainConfig

    class TrainExtras(SACPolicy.TrainExtras, RLPDTrainConfig):
        """Keys of the ``train`` section that RLPD reads: those of `RLPDTrainConfig`."""

    def _make_fused(self) -> FusedSAC | None:
        """Return none: that step has the lowest of two critics built in."""
        return None

    def _next_value(self, values: Tensor, log_prob: Tensor) -> Tensor:
        drawn = torch.randperm(len(values), device=values.device)[: self.hyper.target_critics]
        temperature = self.temperature
        if not self.hyper.backup_entropy:
            temperature = torch.zeros_like(temperature)
        return sac.soft_value(values[drawn], log_prob, temperature)

    def _judgement(self, values: Tensor) -> Tensor:
        return values.mean(0, keepdim=True)
