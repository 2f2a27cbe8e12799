"""`OffPolicy`: what SAC, TD3 and DQN share around their gradient step.

The engine hands over one batch of ``train.batch_size`` sampled transitions per epoch. It is cut
into minibatches of ``train.minibatch_size``, each other rows, and each makes one gradient step: the
updates per environment step are ``batch_size / minibatch_size`` over the steps of an epoch, and are
logged.

Exploration follows the number of gradient steps so far, which is part of the policy's state: it
reaches the acting instances with the weights and a resumed run with the checkpoint. Before the
first one all actions are random; ``buffer.min_size`` says how many transitions come before that.
"""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from pydantic import Field
from torch import nn

from rlightning.config import Config
from rlightning.errors import ConfigError
from rlightning.models.action_mask import MASK, has_action_mask, without_action_mask
from rlightning.models.normalizer import ObservationNormalizer
from rlightning.ops.fused_critics import FusedStep, Rows
from rlightning.ops.q_learning import bootstrap_discount, polyak_update
from rlightning.policy.base_policy import BasePolicy
from rlightning.policy.minibatches import even_slices, require_columns, take_rows
from rlightning.policy.over_ranks import least_over_ranks, pooled_over_ranks
from rlightning.utils.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from rlightning.models.q_networks import QEnsemble, QNetworkConfig, UnitActions
    from rlightning.types import EnvMeta, EnvRet, PolicyResponse

__all__ = ["OffPolicy", "OffPolicyTrainConfig", "Priorities", "Transitions", "plain_rows"]

_log = get_logger("policy")
_COLUMNS = ("observation", "action", "reward", "terminated", "next_observation")


class OffPolicyTrainConfig(Config):
    """Keys of the ``train`` section that every off-policy algorithm reads."""

    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount per environment step; with ``buffer.n_step`` above 1 also ``buffer.gamma``."""
    minibatch_size: int | None = Field(default=None, ge=1)
    """Rows of one gradient step, of which ``train.batch_size`` is a multiple; unset: one step for
    the whole batch."""
    tau: float = Field(default=0.005, gt=0, le=1)
    """How far the target networks move towards the learning ones; 1 copies them."""
    target_interval: int = Field(default=1, ge=1)
    """Gradient steps between moves of the target networks."""
    anneal_lr: bool = False
    """Lower the learning rates linearly to zero over `max_epochs`."""


class Transitions(NamedTuple):
    """A minibatch, on the policy's device.

    Attributes:
        observation: B of them, in the form the encoders take.
        action: [B, *A], as the environment counts.
        reward: float32 [B]; over n steps their discounted sum.
        discount: of the value of what followed, zero after a termination, float32 [B].
        next_observation: what followed the last step, B of them.
        weight: importance-sampling weights of prioritised replay, [B]; None without.
    """

    observation: Any
    action: Tensor
    reward: Tensor
    discount: Tensor
    next_observation: Any
    weight: Tensor | None

    def part(self, rows: slice) -> Transitions:
        """Return some of the rows."""
        columns: list[Any] = [None if item is None else take_rows(item, rows) for item in self]
        return Transitions(*columns)


class Priorities(NamedTuple):
    """What ``ReplayBuffer.update_priorities`` takes, for the rows learned from.

    Attributes:
        names: the batch's column ``index``, int64 [rows].
        errors: the size of their TD errors before the step, float32 [rows].
    """

    names: Tensor
    errors: Tensor


def plain_rows(batch: Transitions, critic: QEnsemble, unit_actions: UnitActions) -> Rows:
    """Return a minibatch as fused steps read it."""
    return Rows(
        critic.encoder(batch.observation),
        unit_actions.to_unit(batch.action),
        batch.reward,
        batch.discount,
        critic.encoder(batch.next_observation),
        batch.weight,
    )


class OffPolicy(BasePolicy):
    """Base of the algorithms that learn from a `ReplayBuffer`.

    A subclass reads `hyper`, builds its networks and calls `start_counting` in `construct_network`,
    creates `optimizers` by name and calls `check_batch_size` and `synchronize` in
    `setup_optimizer`, and takes one gradient step in `update`.
    """

    batched_rollout = True
    uneven_batches = True
    hyper: OffPolicyTrainConfig
    n_updates: Tensor
    optimizers: dict[str, torch.optim.Optimizer]
    _fused: FusedStep | None = None  # a faster gradient step; `update` takes it while it borrows

    def start_counting(self, env_meta: EnvMeta, network: QNetworkConfig | None = None) -> None:
        """Create the count of gradient steps, and the normaliser that `network` asks for.

        Call it in `construct_network`.
        """
        self.observation_normalizer: ObservationNormalizer | None = None
        if network is not None and network.normalize_observations:
            self.observation_normalizer = ObservationNormalizer(
                env_meta.observation_space, network.image_options()
            )
        self.register_buffer("n_updates", torch.zeros((), dtype=torch.int64))
        self._rows = env_meta.num_envs or 1
        self._priorities: Priorities | None = None
        self._warned = False
        self._gamma_agrees = False

    def read_mask(self, env_meta: EnvMeta) -> Any:
        """Note whether unit actions are masked; return the space that networks observe.

        Call it in `construct_network`, of policies for a Box.
        """
        space = env_meta.observation_space
        self.is_masked = has_action_mask(space, env_meta.action_space)
        return without_action_mask(space) if self.is_masked else space

    def kept(self, observation: Any, unit: Tensor) -> Tensor:
        """Return unit actions [B, A] with zeros in place of what a row has not got."""
        return unit * observation[MASK] if self.is_masked else unit

    @abstractmethod
    def update(self, batch: Transitions, step: int) -> tuple[dict[str, Tensor], Tensor]:
        """Take one gradient step.

        Args:
            batch: the minibatch.
            step: how many gradient steps came before, over the whole run.

        Returns:
            Metrics, detached scalars; and TD errors from before the step, detached [B].
        """

    # ---- acting --------------------------------------------------------------------------------

    @property
    def acts_randomly(self) -> bool:
        """Whether nothing has been learned yet, here or before, so that actions are uniform."""
        new = self.config.get("init_from") is None and int(self.n_updates) == 0
        return new and not self.deterministic

    def normalized(self, observation: Any) -> Any:
        """Return observations as the networks take them; those of a replay buffer are raw.

        So rows collected under other statistics are learned from, and acted on, under today's.
        """
        if self.observation_normalizer is None:
            return observation
        return self.observation_normalizer(observation)

    def postprocess(
        self, env_ret: EnvRet | None = None, policy_resp: PolicyResponse | None = None
    ) -> None:
        """Do nothing: a transition needs no more than the action."""

    # ---- learning ------------------------------------------------------------------------------

    def check_batch_size(self) -> None:
        """Refuse a batch that minibatches do not divide; call it in `setup_optimizer`.

        Raises:
            ConfigError: ``train.batch_size`` is no multiple of ``train.minibatch_size``.
        """
        minibatch_size = self.hyper.minibatch_size
        batch_size = int(self.config.train_config.batch_size)
        if batch_size % (minibatch_size or batch_size):
            raise ConfigError(
                f"train.batch_size is {batch_size}, train.minibatch_size {minibatch_size}; "
                "expected batch_size = gradient steps per epoch * minibatch_size"
            )

    @staticmethod
    def synchronize(target: nn.Module, network: nn.Module) -> None:
        """Start a target network at its network's weights; call it in `setup_optimizer`.

        By then several learners start from one of them's weights, not from their own.
        """
        polyak_update(target.parameters(), network.parameters(), tau=1.0)

    def update_dataset(self, data: Any) -> None:
        """Keep sampled transitions: flat rows of a `ReplayBuffer`.

        Raises:
            ContractError: a column is missing.
            ConfigError: the buffer discounts by another gamma.
        """
        have = [str(name) for name in data.keys()]  # noqa: SIM118  # iterating a TensorDict gives rows
        further = [name for name in ("discount", "weight", "index", "steps") if name in have]
        hint = f"{type(self).__name__} learns from a ReplayBuffer"
        self.dataset = require_columns(data, (*_COLUMNS, *further), hint=hint)
        if "discount" in further and not self._gamma_agrees:
            self._check_gamma(float(self.dataset["discount"].max()))

    def _check_gamma(self, highest: float) -> None:
        """Refuse discounts that are no power of ``train.gamma``; the first that are settle it."""
        gamma = self.hyper.gamma
        if not 0.0 < gamma < 1.0 or highest <= 0.0:
            return
        steps = max(1, round(math.log(highest) / math.log(gamma)))
        if abs(gamma**steps - highest) > 1e-5:
            raise ConfigError(
                f"train.gamma is {gamma:g}, and the batch's discounts go up to {highest:g}, which "
                "is no power of it; set buffer.gamma and train.gamma to the same"
            )
        self._gamma_agrees = True

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Take one gradient step per minibatch of the last dataset.

        Returns:
            Metrics by name: means over the steps; ``updates`` so far, and ``updates_per_step``, the
            gradient steps per environment step as configured: over the steps that a rollout of one
            worker takes. An overlapping engine collects at its own pace, and its ratio is
            ``updates`` over the environment steps logged beside. With ``train.anneal_lr`` also the
            learning rates, ``<optimizer>_learning_rate``.
        """
        with contextlib.nullcontext() if self._fused is None else self._fused.borrowed():
            return self._learn(self.dataset)

    def _learn(self, data: dict[str, Any]) -> dict[str, float]:
        if self.observation_normalizer is not None:
            moments = self.observation_normalizer.moments(data["observation"])
            self.observation_normalizer.merge(pooled_over_ranks(moments, self.process_group))
        done, rows = int(self.n_updates), self._transitions(data)
        logged: dict[str, list[Tensor]] = {}
        errors: list[Tensor] = []
        parts = self._minibatches(len(rows.reward))
        rates = self._anneal(done / len(parts)) if self.hyper.anneal_lr else {}
        for step, part in enumerate(parts, start=done):
            metrics, td_error = self.update(rows.part(part), step)
            errors.append(td_error)
            for name, value in metrics.items():
                logged.setdefault(name, []).append(value)
        self.n_updates.add_(len(parts))
        self._keep_priorities(data, torch.cat(errors).abs())
        means = {name: float(torch.stack(values).mean()) for name, values in logged.items()}
        return means | rates | self._counts(len(parts))

    def _anneal(self, updates: float) -> dict[str, float]:
        """Set the learning rates after so many updates; return them for the log."""
        left = max(0.0, 1.0 - updates / self.config.train_config.max_epochs)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:  # the first rate is kept where checkpoints have it
                group["lr"] = group.setdefault("initial_lr", group["lr"]) * left
        return {
            f"{name}_learning_rate": float(optimizer.param_groups[0]["lr"])
            for name, optimizer in self.optimizers.items()
        }

    def minimize(
        self,
        name: str,
        loss: Tensor,
        parameters: Iterable[nn.Parameter],
        *,
        max_grad_norm: float | None = None,
    ) -> None:
        """Take one step of the optimizer `name`; nothing but `parameters` gets a gradient."""
        optimizer, learned = self.optimizers[name], list(parameters)
        optimizer.zero_grad()
        torch.autograd.backward(loss, inputs=learned)
        if max_grad_norm is not None:
            nn.utils.clip_grad_norm_(learned, max_grad_norm)
        optimizer.step()

    def check_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        """Name a parameter whose gradient is not finite; see `check_finite`."""
        names = {id(tensor): name for name, tensor in self.named_parameters()}
        self.check_finite(f"gradient of {names[id(parameter)]}", gradient)

    def _minibatches(self, n_rows: int) -> list[slice]:
        """Cut rows into as many parts on every rank."""
        size = self.hyper.minibatch_size or n_rows
        return even_slices(n_rows, max(1, least_over_ranks(n_rows, self.process_group) // size))

    def _transitions(self, data: dict[str, Any]) -> Transitions:
        discount = data.get("discount")
        if discount is None:
            discount = bootstrap_discount(data["terminated"], gamma=self.hyper.gamma)
            if "steps" in data:  # of a chunk of actions
                discount = discount * self.hyper.gamma ** (data["steps"] - 1)
        return Transitions(
            self.normalized(data["observation"]),
            data["action"],
            data["reward"].to(torch.float32),
            discount.to(torch.float32),
            self.normalized(data["next_observation"]),
            data.get("weight"),
        )

    def _counts(self, updates: int) -> dict[str, float]:
        train = self.config.train_config
        counts = {"updates": float(self.n_updates)}
        if train.max_rollout_steps != -1:
            steps = train.max_rollout_steps * train.rollout_epoch * self._rows
            counts["updates_per_step"] = updates / steps
        return counts

    # ---- prioritised replay --------------------------------------------------------------------

    def _keep_priorities(self, data: dict[str, Any], error: Tensor) -> None:
        if "index" not in data:
            return
        if self._priorities is not None and not self._warned:
            self._warned = True
            _log.warning(
                "the buffer is prioritised, but nobody took the priorities of the last update: "
                "call buffer.update_priorities(*policy.priorities()) after policy.train, or all "
                "transitions stay equally likely"
            )
        self._priorities = Priorities(data["index"].cpu(), error.detach().cpu())

    def priorities(self) -> Priorities | None:
        """Return index and TD error of the rows of the last `train`, once; None if there are none.

        For ``buffer.update_priorities(*priorities)`` of a prioritised `ReplayBuffer`.
        """
        taken, self._priorities = self._priorities, None
        return taken
