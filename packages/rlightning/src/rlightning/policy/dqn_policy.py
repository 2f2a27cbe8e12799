"""Deep Q-learning: double, dueling, n-step and prioritised, each on its own.

Mnih et al. 2015, "Human-level control through deep reinforcement learning"; the parts as in Hessel
et al. 2018, "Rainbow", arXiv:1710.02298. Collecting: the action with the highest value, or with
probability epsilon any. Learning, per minibatch: regress the value of the action taken on the
reward plus what a slow copy of the network thinks of what followed.

``buffer.n_step`` and ``buffer.prioritized`` belong to the buffer; whoever runs the loop hands
`priorities` back to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from gymnasium import spaces
from pydantic import Field
from torch import Tensor

from rlightning.config import StrictConfig
from rlightning.errors import ConfigError
from rlightning.models.q_networks import ActionValues, QNetworkConfig, frozen_copy
from rlightning.ops import q_learning
from rlightning.policy.base_policy import BasePolicy
from rlightning.policy.off_policy import OffPolicy, OffPolicyTrainConfig, Transitions
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.registry import POLICIES

if TYPE_CHECKING:
    from rlightning.types import EnvMeta

__all__ = ["DQNModelConfig", "DQNOptimConfig", "DQNPolicy", "DQNTrainConfig"]


class DQNTrainConfig(OffPolicyTrainConfig):
    """Keys of the ``train`` section that DQN reads."""

    double: bool = True
    """Let the learning network choose the next action and the slow one judge it."""
    tau: float = Field(default=1.0, gt=0, le=1)
    """How far the target network moves towards the learning one; 1 copies it."""
    target_interval: int = Field(default=500, ge=1)
    """Gradient steps between moves of the target network."""
    epsilon_start: float = Field(default=1.0, ge=0, le=1)
    """Share of random actions once learning has started; before, all are."""
    epsilon_end: float = Field(default=0.05, ge=0, le=1)
    """Share of random actions in the end."""
    epsilon_updates: int = Field(default=10_000, ge=1)
    """Gradient steps over which the share falls linearly."""
    max_grad_norm: float = Field(default=10.0, gt=0, allow_inf_nan=True)
    """Norm the gradient is clipped to; ``.inf`` leaves it."""


class DQNModelConfig(QNetworkConfig):
    """``policy.model_cfg`` of DQN."""

    dueling: bool = False
    """Predict a state's value and its actions' advantages separately."""


class DQNOptimConfig(StrictConfig):
    """``policy.optim_cfg`` of DQN: the settings of Adam."""

    lr: float = Field(default=1e-3, gt=0)
    """Learning rate."""


@POLICIES.register("DQNPolicy")
class DQNPolicy(OffPolicy):
    """DQN for Discrete actions and any supported observation."""

    reads_action_mask = True
    hyper: DQNTrainConfig

    class TrainExtras(BasePolicy.TrainExtras, DQNTrainConfig):
        """Keys of the ``train`` section that DQN reads: those of `DQNTrainConfig`."""

    # ---- construction --------------------------------------------------------------------------

    def construct_network(self, env_meta: EnvMeta, *args: Any, **kwargs: Any) -> None:
        """Build the network and its slow copy.

        Raises:
            ConfigError: the action space is not Discrete.
        """
        space = env_meta.action_space
        if not isinstance(space, spaces.Discrete):
            raise ConfigError(
                f"the action space is {space}; DQNPolicy takes a Discrete one. SACPolicy and "
                "TD3Policy take a bounded Box, PPOPolicy both"
            )
        network = DQNModelConfig.from_dict(self.config.model_cfg, path="policy.model_cfg")
        self.hyper = DQNTrainConfig.read(self.config.train_config)
        self.first_action = int(space.start)
        self.q_network = ActionValues(
            env_meta.observation_space, int(space.n), network, dueling=network.dueling
        )
        self.target_network = frozen_copy(self.q_network)
        self.start_counting(env_meta, network)

    def setup_optimizer(self, optim_cfg: Any) -> None:
        """Create Adam."""
        self.check_batch_size()
        self.synchronize(self.target_network, self.q_network)
        settings = DQNOptimConfig.from_dict(optim_cfg, path="policy.optim_cfg")
        parameters = self.q_network.parameters()
        self.optimizers = {"q": torch.optim.Adam(parameters, lr=settings.lr, fused=True)}

    # ---- acting --------------------------------------------------------------------------------

    @property
    def epsilon(self) -> float:
        """The share of random actions, from the gradient steps made so far."""
        if self.deterministic:
            return 0.0
        hyper, done = self.hyper, int(self.n_updates)
        if done == 0:
            return 1.0
        return q_learning.linear_schedule(
            done, start=hyper.epsilon_start, end=hyper.epsilon_end, duration=hyper.epsilon_updates
        )

    def rollout_step(self, env_ret: EnvRet, **kwargs: Any) -> PolicyResponse:
        """Act on rows [N, ...]; answer one action per row, int64."""
        index = q_learning.epsilon_greedy(
            self.q_network(self.normalized(env_ret.observation)), self.epsilon
        )
        return PolicyResponse(env_id=env_ret.env_id, action=index + self.first_action)

    # ---- learning ------------------------------------------------------------------------------

    def update(self, batch: Transitions, step: int) -> tuple[dict[str, Tensor], Tensor]:
        """Take a gradient step, and move the target network where it is time."""
        target = self._target(batch)
        index = batch.action.reshape(-1, 1).long() - self.first_action
        q = self.q_network(batch.observation).gather(-1, index).squeeze(-1)
        loss = q_learning.huber_loss(q, target, batch.weight)
        parameters, limit = list(self.q_network.parameters()), self.hyper.max_grad_norm
        self.minimize("q", loss, parameters, max_grad_norm=limit)
        if (step + 1) % self.hyper.target_interval == 0:
            q_learning.polyak_update(
                self.target_network.parameters(), self.q_network.parameters(), tau=self.hyper.tau
            )
        td_error = q.detach() - target
        return {"q_loss": loss.detach(), "q": q.detach().mean()}, td_error

    @torch.no_grad()
    def _target(self, batch: Transitions) -> Tensor:
        """Compute the targets, [B]."""
        chooser = self.q_network(batch.next_observation) if self.hyper.double else None
        value = q_learning.greedy_value(self.target_network(batch.next_observation), chooser)
        return q_learning.td_target(batch.reward, batch.discount, value)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Take the gradient steps, and report the share of random actions that follows them."""
        return super().train(*args, **kwargs) | {"epsilon": self.epsilon}
