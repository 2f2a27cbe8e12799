"""Proximal policy optimisation (Schulman et al. 2017), readable from top to bottom.

Collecting: sample from the actor, record log-probability and value. The buffer turns rewards,
values and the two kinds of episode end into ``advantage`` and ``return``. Learning: several passes
over shuffled minibatches of clipped policy gradient and value regression.

Two steps compute the same thing: `_autograd_step` for every network, `ops.fused_ppo` for two plain
tanh MLPs on a CPU, several times faster.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from rlightning.models.actor_critic import ActorCritic
from rlightning.models.heads import GaussianHead
from rlightning.models.normalizer import ObservationNormalizer
from rlightning.ops import losses
from rlightning.ops.fused_ppo import FusedPPO, Minibatch, StepOutputs, supports
from rlightning.ops.normalization import RunningMeanStd, batch_moments
from rlightning.policy.base_policy import BasePolicy
from rlightning.policy.minibatches import even_slices, require_columns, take_rows
from rlightning.policy.over_ranks import least_over_ranks, mean_over_ranks, pooled_over_ranks
from rlightning.policy.ppo_config import PPOModelConfig, PPOOptimConfig, PPOTrainConfig
from rlightning.policy.state import unwrap
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.registry import POLICIES
from rlightning.utils.seeding import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlightning.types import EnvMeta

__all__ = ["PPOPolicy"]

_COLUMNS = ("observation", "action", "log_prob", "value", "advantage", "return")


@POLICIES.register("PPOPolicy")
class PPOPolicy(BasePolicy):
    """PPO for Box, Discrete, MultiDiscrete and MultiBinary actions and any supported observation.

    Normalisation statistics are learned on the TRAIN side after the gradient steps, and travel with
    the weights: the data of one epoch is collected and learned from under the same ones, so the
    first minibatch of an update sees probability ratios of exactly one.
    """

    batched_rollout = True
    uneven_batches = True
    reads_action_mask = True
    model_config: ClassVar[type[PPOModelConfig]] = PPOModelConfig
    """What ``policy.model_cfg`` may hold."""
    hyper: PPOTrainConfig

    class TrainExtras(BasePolicy.TrainExtras, PPOTrainConfig):
        """Keys of the ``train`` section that PPO reads: those of `PPOTrainConfig`."""

    # ---- construction --------------------------------------------------------------------------

    def construct_network(self, env_meta: EnvMeta, *args: Any, **kwargs: Any) -> None:
        """Build actor, critic and normalisers for the spaces of `env_meta`."""
        network = self.model_config.from_dict(self.config.model_cfg, path="policy.model_cfg")
        self.actor_critic = self._make_network(env_meta, network)
        self.observation_normalizer = None
        if network.normalize_observations:
            images = network.image_options()
            self.observation_normalizer = ObservationNormalizer(env_meta.observation_space, images)
        # The floor of the deviation, 0.01, keeps an environment without rewards learnable.
        self.return_scale = RunningMeanStd(eps=1e-4) if network.normalize_returns else None

    def _make_network(self, env_meta: EnvMeta, network: Any) -> ActorCritic:
        """Build the actor-critic; `network` is a `model_config`."""
        options = network.actor_critic_options()
        return ActorCritic(env_meta.observation_space, env_meta.action_space, options)

    def setup_optimizer(self, optim_cfg: Any) -> None:
        """Create the optimizer, and choose between the two gradient steps."""
        train = self.config.train_config
        self.hyper = self._read_hyper(train)
        self.n_updates = 0
        self.optimizer = self._make_optimizer(optim_cfg)
        self.learning_rates = [group["lr"] for group in self.optimizer.param_groups]
        rank = torch.distributed.get_rank(self.process_group) if self.process_group else 0
        seed = torch.initial_seed() if train.seed is None else train.seed
        self.shuffle_generator = torch.Generator()
        self.shuffle_generator.manual_seed(derive_seed(seed, "ppo shuffle", rank))
        self._fused = self._make_fused()

    def _read_hyper(self, train: Any) -> PPOTrainConfig:
        return self.TrainExtras.read(train)

    def _make_optimizer(self, optim_cfg: Any) -> torch.optim.Optimizer:
        settings = PPOOptimConfig.from_dict(optim_cfg, path="policy.optim_cfg")
        groups = self._parameter_groups(settings)
        return torch.optim.Adam(groups, eps=settings.eps, betas=settings.betas, fused=True)

    def _parameter_groups(self, settings: PPOOptimConfig) -> list[dict[str, Any]]:
        """Return one group, or two where the critic learns at a rate of its own."""
        if settings.critic_lr is None:
            return [{"params": list(self.actor_critic.parameters()), "lr": settings.lr}]
        critic = list(self._network.critic_parameters())
        inside = {id(parameter) for parameter in critic}
        actor = [item for item in self.actor_critic.parameters() if id(item) not in inside]
        return [
            {"params": actor, "lr": settings.lr},
            {"params": critic, "lr": settings.critic_lr},
        ]

    def _make_fused(self) -> FusedPPO | None:
        """Return the hand-written step where it computes what is asked for."""
        hyper, layers = self.hyper, self._network.plain_layers()
        if hyper.compile:
            self.actor_critic.compile()
        general = hyper.clip_value_loss or hyper.micro_batch_size or hyper.precision != "fp32"
        several = self.world_size > 1 or len(self.optimizer.param_groups) > 1
        if hyper.fused_update == "off" or hyper.compile or general or several:
            return None
        if layers is None or not supports(layers, self.optimizer):
            return None
        return FusedPPO(
            layers,
            self.optimizer,
            clip_ratio=hyper.clip_ratio,
            value_coef=hyper.value_coef,
            entropy_coef=hyper.entropy_coef,
            max_grad_norm=hyper.max_grad_norm,
            on_non_finite=self._check_gradient,
        )

    @property
    def _network(self) -> ActorCritic:
        """The actor-critic without its data-parallel wrapper."""
        # As `self.actor_critic`, without the search of nn.Module: this is read at every step.
        network: Any = self._modules["actor_critic"]
        bare: Any = network if isinstance(network, ActorCritic) else unwrap(network)
        return bare  # type: ignore[no-any-return]  # of another class only inside a wrapper

    # ---- acting --------------------------------------------------------------------------------

    def rollout_step(self, env_ret: EnvRet, **kwargs: Any) -> PolicyResponse:
        """Act on rows [N, ...]; answer action, log_prob, value and final_value, one per row.

        The action is the actor's own, before any clipping at the environment's border. Values are
        in units of reward. `final_value` is the value of a truncated episode's last observation,
        zero in all other rows.
        """
        distribution, value = self._network.act(self._normalized(env_ret.observation))
        if self.deterministic:
            action = distribution.mode()
            log_prob = distribution.log_prob(action)
        else:
            action, log_prob = distribution.sample_with_log_prob()
        return PolicyResponse(
            env_id=env_ret.env_id,
            action=action,
            log_prob=log_prob,
            value=self._in_reward_units(value),
            final_value=self._final_value(env_ret, value),
        )

    def _final_value(self, env_ret: EnvRet, like: Tensor) -> Tensor:
        final_value = torch.zeros_like(like)
        if env_ret.has_info("_final_obs"):
            rows = env_ret.info["_final_obs"].bool() & env_ret.last_truncated.bool()
            if rows.any():
                final_obs = take_rows(env_ret.info["final_obs"], rows)
                value = self.actor_critic.value(self._normalized(final_obs))
                final_value[rows] = self._in_reward_units(value)
        return final_value

    def postprocess(
        self, env_ret: EnvRet | None = None, policy_resp: PolicyResponse | None = None
    ) -> None:
        """Do nothing: the buffer computes advantages from what `rollout_step` answered."""

    def _normalized(self, observation: Any) -> Any:
        if self.observation_normalizer is None:
            return observation
        return self.observation_normalizer(observation)

    def _in_reward_units(self, value: Tensor) -> Tensor:
        return value if self.return_scale is None else self.return_scale.unscale(value)

    # ---- learning ------------------------------------------------------------------------------

    def update_dataset(self, data: Any) -> None:
        """Keep a rollout: flat rows with observation, action, log_prob, value, advantage, return.

        Raises:
            ContractError: a column is missing.
        """
        hint = "PPO learns from a RolloutBuffer, which computes advantage and return"
        self.dataset = require_columns(data, _COLUMNS, hint=hint)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Update actor and critic from the last dataset.

        Returns:
            Metrics by name, floats. Losses, KL and clip fraction are means over the last pass: they
            tell how far the update went.
        """
        data = self.dataset
        self._anneal()
        if self.return_scale is not None:
            moments = pooled_over_ranks([batch_moments(data["return"])], self.process_group)
            self.return_scale.merge(moments[0])
        rows = self._prepare(data)
        with contextlib.ExitStack() as update:
            step: Callable[[Minibatch], StepOutputs] = self._autograd_step
            if self._fused is not None:
                step = self._fused.step
                update.enter_context(self._fused.borrowed())
            for _ in range(self.hyper.ppo_epochs):
                shuffled, outputs, within_target = self._one_pass(rows, step)
                if not within_target:
                    break
        self.n_updates += 1
        if self.observation_normalizer is not None:
            moments = self.observation_normalizer.moments(data["observation"])
            self.observation_normalizer.merge(pooled_over_ranks(moments, self.process_group))
        return self._metrics(data, shuffled, outputs)

    def _one_pass(
        self, rows: Minibatch, step: Callable[[Minibatch], StepOutputs]
    ) -> tuple[Minibatch, list[StepOutputs], bool]:
        """Step through all rows once, in random order.

        Returns:
            The rows in that order, what each step gave, and whether the KL stayed within target.
        """
        n_rows, outputs = len(rows.log_prob), []
        order = torch.randperm(n_rows, generator=self.shuffle_generator).to(self.device)
        shuffled = Minibatch(*(take_rows(column, order) for column in rows))
        for part in self._minibatches(n_rows):
            minibatch = Minibatch(*(take_rows(column, part) for column in shuffled))
            minibatch = minibatch._replace(advantage=self._standardized(minibatch.advantage))
            outputs.append(step(minibatch))
            if self._exceeds_target_kl(outputs[-1], minibatch):
                return shuffled, outputs, False
        return shuffled, outputs, True

    def _standardized(self, advantage: Tensor) -> Tensor:
        return losses.standardize(advantage) if self.hyper.normalize_advantage else advantage

    @torch.no_grad()
    def _prepare(self, data: dict[str, Any]) -> Minibatch:
        """Return the dataset as the columns a gradient step reads, each computed once."""
        features, action = self._normalized(data["observation"]), data["action"]
        if self._fused is not None:
            features, action = self.actor_critic.plain_inputs(features, action)
        returns, value = data["return"], data["value"]
        if self.return_scale is not None:
            returns, value = self.return_scale.scale(returns), self.return_scale.scale(value)
        return Minibatch(features, action, data["log_prob"], data["advantage"], returns, value)

    def _autograd_step(self, minibatch: Minibatch) -> StepOutputs:
        """Take one gradient step through any network."""
        hyper, n_rows = self.hyper, len(minibatch.log_prob)
        n_parts = -(-n_rows // (hyper.micro_batch_size or n_rows))
        self.optimizer.zero_grad()
        outputs = []
        for part in even_slices(n_rows, n_parts):
            rows = Minibatch(*(take_rows(column, part) for column in minibatch))
            share = len(rows.log_prob) / n_rows
            outputs.append(self._accumulate_gradient(rows, share))
        norm = nn.utils.clip_grad_norm_(self.actor_critic.parameters(), hyper.max_grad_norm)
        self.optimizer.step()
        self._network.project()
        log_prob, value, entropy = zip(*outputs, strict=True)
        return StepOutputs(torch.cat(log_prob), torch.cat(value), sum(entropy), float(norm))

    def _accumulate_gradient(self, rows: Minibatch, share: float) -> tuple[Tensor, Tensor, float]:
        """Add the gradient of `rows`, which are that share of a minibatch."""
        hyper = self.hyper
        device = torch.device(self.device).type
        with torch.autocast(device, torch.bfloat16, enabled=hyper.precision == "bf16"):
            distribution, value = self.actor_critic(rows.features)
        log_prob = distribution.log_prob(rows.action)
        entropy = distribution.entropy().mean()
        policy = losses.ppo_policy_loss(
            log_prob, rows.log_prob, rows.advantage, clip_ratio=hyper.clip_ratio
        )
        critic_loss = losses.value_loss(
            value,
            rows.value_target,
            old_value_B=rows.old_value,
            clip_range=hyper.clip_ratio if hyper.clip_value_loss else None,
        )
        self.check_finite("policy loss", policy.loss)
        self.check_finite("value loss", critic_loss)
        loss = policy.loss + hyper.value_coef * critic_loss - hyper.entropy_coef * entropy
        (loss * share).backward()
        return log_prob.detach(), value.detach().float(), float(entropy.detach()) * share

    def _minibatches(self, n_rows: int) -> list[slice]:
        """Cut rows into nearly equal parts of at least `minibatch_size`; as many on every rank."""
        n_parts = least_over_ranks(n_rows, self.process_group) // self.hyper.minibatch_size
        return even_slices(n_rows, max(1, n_parts))

    def _exceeds_target_kl(self, outputs: StepOutputs, minibatch: Minibatch) -> bool:
        """Return whether the policy has moved too far; the same answer on every rank."""
        if self.hyper.target_kl is None:
            return False
        kl = losses.approx_kl(outputs.log_prob, minibatch.log_prob)
        return mean_over_ranks(float(kl), self.process_group) > 1.5 * self.hyper.target_kl

    def _anneal(self) -> None:
        if self.hyper.anneal_lr:
            left = 1.0 - self.n_updates / self.config.train_config.max_epochs
            for group, rate in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
                group["lr"] = rate * max(0.0, left)

    def _metrics(
        self, data: dict[str, Any], rows: Minibatch, outputs: list[StepOutputs]
    ) -> dict[str, float]:
        """Summarise the last pass; `rows` are in its order, of which an early stop read a part."""
        log_prob = torch.cat([output.log_prob for output in outputs])
        value = torch.cat([output.value for output in outputs])
        seen = Minibatch(*(take_rows(column, slice(len(value))) for column in rows))
        advantage = self._standardized(seen.advantage)
        policy = losses.ppo_policy_loss(
            log_prob, seen.log_prob, advantage, clip_ratio=self.hyper.clip_ratio
        )
        metrics = {
            "policy_loss": policy.loss,
            "value_loss": losses.value_loss(value, seen.value_target),
            "entropy": sum(output.entropy for output in outputs) / len(outputs),
            "approx_kl": policy.approx_kl,
            "clip_fraction": policy.clip_fraction,
            "explained_variance": losses.explained_variance(data["value"], data["return"]),
            "grad_norm": sum(output.grad_norm for output in outputs) / len(outputs),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }
        head = self._network.action_head
        if isinstance(head, GaussianHead):
            metrics["log_std"] = head.log_std.detach().mean()
        return {name: float(value) for name, value in metrics.items()}

    def _check_gradient(self, parameter: Tensor, gradient: Tensor) -> None:
        names = {id(tensor): name for name, tensor in self.named_parameters()}
        self.check_finite(f"gradient of {names[id(parameter)]}", gradient)

    # ---- resuming ------------------------------------------------------------------------------

    def training_state(self) -> dict[str, Any]:
        """Return how many updates have been made, which the annealed learning rate follows."""
        return {"n_updates": self.n_updates}

    def load_training_state(self, state: dict[str, Any]) -> None:
        """Restore what `training_state` returned."""
        self.n_updates = int(state["n_updates"])
