"""Behaviour cloning: imitate the actions of a dataset (Pomerleau 1988, "ALVINN").

For the engine ``supervised`` with a `DatasetBuffer`. The network is PPO's or SAC's, under the same
name, so that a run of one of them goes on from the checkpoint: ``policy.init_from``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
from gymnasium import spaces
from pydantic import Field
from torch import Tensor, nn

from rlightning.config import Config, StrictConfig
from rlightning.errors import ConfigError
from rlightning.models.actor_critic import ActorCritic
from rlightning.models.network_config import NetworkConfig
from rlightning.models.normalizer import ObservationNormalizer
from rlightning.models.q_networks import QNetworkConfig, SquashedGaussianActor, UnitActions
from rlightning.ops.distributions import squashed_gaussian_log_prob, squashed_gaussian_sample
from rlightning.policy.base_policy import BasePolicy
from rlightning.policy.minibatches import even_slices, require_columns, take_rows
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.registry import POLICIES

if TYPE_CHECKING:
    from rlightning.types import EnvMeta

__all__ = [
    "SimpleSupervisedPolicy",
    "SupervisedModelConfig",
    "SupervisedOptimConfig",
    "SupervisedTrainConfig",
]

_EDGE = 1.0 - 1e-4  # unit actions beyond it have no finite Gaussian sample behind their tanh


class SupervisedModelConfig(NetworkConfig):
    """``policy.model_cfg`` of behaviour cloning with PPO's network."""

    network: Literal["actor_critic", "squashed"] = "actor_critic"
    """``actor_critic`` is PPO's network, ``squashed`` SAC's actor, whose keys are then SAC's."""
    normalize_observations: bool = False
    """Shift and scale vector observations by everything seen so far, as PPO does."""


class SupervisedOptimConfig(StrictConfig):
    """``policy.optim_cfg`` of behaviour cloning: the settings of AdamW."""

    lr: float = Field(default=1e-3, gt=0)
    """Learning rate."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decay of the weights per step, times the learning rate."""


class SupervisedTrainConfig(Config):
    """Keys of the ``train`` section that behaviour cloning reads."""

    loss: Literal["auto", "mse", "nll", "cross_entropy"] = "auto"
    """``mse`` of the mean action, ``nll`` of the Gaussian (its spread is learned too), or
    ``cross_entropy`` of discrete actions; ``auto``: ``mse`` of a Box, else ``cross_entropy``."""
    minibatch_size: int | None = Field(default=None, ge=1)
    """Rows of one gradient step; unset: the whole batch."""
    max_grad_norm: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """Norm the gradient is clipped to; ``.inf`` leaves it."""


@POLICIES.register("SimpleSupervisedPolicy")
class SimpleSupervisedPolicy(BasePolicy):
    """Behaviour cloning for every action space that PPO, or with ``squashed`` SAC, takes."""

    batched_rollout = True

    class TrainExtras(BasePolicy.TrainExtras, SupervisedTrainConfig):
        """Keys of the ``train`` section: those of `SupervisedTrainConfig`."""

    # ---- construction --------------------------------------------------------------------------

    def construct_network(self, env_meta: EnvMeta, *args: Any, **kwargs: Any) -> None:
        """Build the network that `model_cfg` names."""
        given = {} if self.config.model_cfg is None else self.config.model_cfg.to_dict()
        self.observation_normalizer: ObservationNormalizer | None = None
        self.unit_actions: UnitActions | None = None
        self.is_box = isinstance(env_meta.action_space, spaces.Box)
        space = env_meta.observation_space
        if given.get("network") == "squashed":
            options = {key: value for key, value in given.items() if key != "network"}
            self.unit_actions = UnitActions(env_meta.action_space)
            config = QNetworkConfig.from_dict(options, path="policy.model_cfg")
            self.actor = SquashedGaussianActor(space, self.unit_actions.size, config)
            self._normalize(space, config)
            return
        network = SupervisedModelConfig.from_dict(given, path="policy.model_cfg")
        self.actor_critic = ActorCritic(
            space, env_meta.action_space, network.actor_critic_options()
        )
        self._normalize(space, network)

    def _normalize(self, space: Any, network: SupervisedModelConfig | QNetworkConfig) -> None:
        if network.normalize_observations:
            self.observation_normalizer = ObservationNormalizer(space, network.image_options())

    def setup_optimizer(self, optim_cfg: Any) -> None:
        """Create AdamW.

        Raises:
            ConfigError: the loss does not go with the action space.
        """
        self.hyper = SupervisedTrainConfig.read(self.config.train_config)
        settings = SupervisedOptimConfig.from_dict(optim_cfg, path="policy.optim_cfg")
        wanted = self.hyper.loss
        self.loss = ("mse" if self.is_box else "cross_entropy") if wanted == "auto" else wanted
        if (self.loss == "cross_entropy") is self.is_box:
            fitting = "mse or nll" if self.is_box else "cross_entropy"
            raise ConfigError(
                f"train.loss is {self.loss}; actions of "
                f"{'a Box' if self.is_box else 'this space'} take {fitting}"
            )
        self.optimizer = torch.optim.AdamW(
            self._network.parameters(), lr=settings.lr, weight_decay=settings.weight_decay
        )

    @property
    def _network(self) -> nn.Module:
        return self.actor_critic if self.unit_actions is None else self.actor

    # ---- acting --------------------------------------------------------------------------------

    def rollout_step(self, env_ret: EnvRet, **kwargs: Any) -> PolicyResponse:
        """Act on rows [N, ...]; answer one action per row: in evaluation the likeliest."""
        observation = self._normalized(env_ret.observation)
        if self.unit_actions is None:
            distribution, _ = self.actor_critic(observation)
            action = distribution.mode() if self.deterministic else distribution.sample()
        else:
            mean, log_std = self.actor(observation)
            unit = mean.tanh()
            if not self.deterministic:
                unit, _ = squashed_gaussian_sample(mean, log_std)
            action = self.unit_actions.to_env(unit)
        return PolicyResponse(env_id=env_ret.env_id, action=action)

    def postprocess(
        self, env_ret: EnvRet | None = None, policy_resp: PolicyResponse | None = None
    ) -> None:
        """Do nothing."""

    def _normalized(self, observation: Any) -> Any:
        if self.observation_normalizer is None:
            return observation
        return self.observation_normalizer(observation)

    # ---- learning ------------------------------------------------------------------------------

    def update_dataset(self, data: Any) -> None:
        """Keep rows of a dataset: observation and action.

        Raises:
            ContractError: a column is missing.
        """
        hint = "behaviour cloning learns from a DatasetBuffer"
        self.dataset = require_columns(data, ("observation", "action"), hint=hint)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Take one gradient step per minibatch of the last dataset; return means over them.

        ``loss``; and ``action_error``, the root mean squared error of the likeliest action, or for
        other spaces than a Box ``accuracy``, the share of actions that are the likeliest one.
        """
        data, rows = self.dataset, len(self.dataset["action"])
        if self.observation_normalizer is not None:
            self.observation_normalizer.update(data["observation"])
        observation = self._normalized(data["observation"])
        size = self.hyper.minibatch_size or rows
        logged: dict[str, list[Tensor]] = {}
        for part in even_slices(rows, max(1, rows // size)):
            loss, error = self._loss(take_rows(observation, part), data["action"][part])
            self.check_finite("the loss", loss)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch declares no types here
            nn.utils.clip_grad_norm_(self._network.parameters(), self.hyper.max_grad_norm)
            self.optimizer.step()
            logged.setdefault("loss", []).append(loss.detach())
            logged.setdefault("action_error" if self.is_box else "accuracy", []).append(error)
        means = {name: float(torch.stack(values).mean()) for name, values in logged.items()}
        if self.is_box:
            means["action_error"] **= 0.5
        return means

    def _loss(self, observation: Any, action: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and detached the squared error (or the accuracy) of the mode."""
        if self.unit_actions is not None:
            return self._squashed_loss(observation, self.unit_actions.to_unit(action))
        distribution, _ = self.actor_critic(observation)
        mode = distribution.mode()
        if not self.is_box:
            equal = (mode == action).reshape(len(action), -1).all(-1)
            return -distribution.log_prob(action).mean(), equal.to(torch.float32).mean()
        error = (mode - action).square().mean()
        loss = error if self.loss == "mse" else -distribution.log_prob(action).mean()
        return loss, error.detach()

    def _squashed_loss(self, observation: Any, unit: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.actor(observation)
        error = (mean.tanh() - unit).square().mean()
        if self.loss == "mse":
            return error, error.detach()
        pre_tanh = unit.clamp(-_EDGE, _EDGE).atanh()
        return -squashed_gaussian_log_prob(pre_tanh, mean, log_std).mean(), error.detach()
