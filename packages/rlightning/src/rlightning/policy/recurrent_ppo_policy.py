"""PPO with a memory: an LSTM or GRU between the trunk and the heads of actor and critic.

Collecting: the policy carries a memory per environment, empties it where an episode ends, and
stores with every row what it remembered before that row. Learning: rows become sequences again,
each replayed from the memory stored with its first row. A sequence ends with its episode or the
rollout, so that nothing is ever replayed from a memory that was not there: before the first
gradient step the replayed log-probabilities are the rollout's. Minibatches are whole sequences.

See Ni et al. 2022, "Recurrent Model-Free RL Can Be a Strong Baseline for Many POMDPs"
(arXiv:2110.05038), on keeping the memories of actor and critic apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from pydantic import Field
from torch import Tensor

from rlightning.errors import ConfigError, ContractError
from rlightning.models.recurrent import MemoryOptions, RecurrentActorCritic, SequenceInput
from rlightning.ops.fused_ppo import Minibatch, StepOutputs
from rlightning.ops.sequences import sequence_lengths, sequence_rows
from rlightning.policy.episode_memory import EpisodeMemory
from rlightning.policy.minibatches import even_slices, require_columns, take_rows
from rlightning.policy.over_ranks import least_over_ranks
from rlightning.policy.ppo_config import PPOModelConfig, PPOTrainConfig
from rlightning.policy.ppo_policy import PPOPolicy
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.registry import POLICIES

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlightning.models.actor_critic import ActorCritic
    from rlightning.types import EnvMeta

__all__ = ["RecurrentPPOModelConfig", "RecurrentPPOPolicy", "RecurrentPPOTrainConfig"]


class RecurrentPPOModelConfig(PPOModelConfig):
    """``policy.model_cfg`` of recurrent PPO."""

    memory: Literal["lstm", "gru"] = "lstm"
    """The recurrent layer behind the hidden layers."""
    memory_size: int = Field(default=64, ge=1)
    """Its width."""
    memory_layers: int = Field(default=1, ge=1)
    """How many are stacked."""


class RecurrentPPOTrainConfig(PPOTrainConfig):
    """Keys of the ``train`` section that recurrent PPO reads."""

    sequence_length: int | None = Field(default=None, ge=1)
    """Steps that gradients flow back through; unset: to the start of the episode or rollout."""


@POLICIES.register("RecurrentPPOPolicy")
class RecurrentPPOPolicy(PPOPolicy):
    """PPO that remembers the episode so far.

    Beside PPO's fields a response holds ``memory``, what was remembered before the observation
    (float32 ``[rows, memory_size]``), and ``row_step``, which tells what rows follow each other.

    Raises:
        ConfigError: ``micro_batch_size`` is set; sequences are not cut further.
    """

    model_config = RecurrentPPOModelConfig

    class TrainExtras(PPOPolicy.TrainExtras, RecurrentPPOTrainConfig):
        """Keys of the ``train`` section: those of `RecurrentPPOTrainConfig`."""

    hyper: TrainExtras

    # ---- construction --------------------------------------------------------------------------

    def _make_network(self, env_meta: EnvMeta, network: Any) -> ActorCritic:
        memory = MemoryOptions(
            kind=network.memory, size=network.memory_size, layers=network.memory_layers
        )
        options = network.actor_critic_options()
        recurrent = RecurrentActorCritic(
            env_meta.observation_space, env_meta.action_space, options, memory
        )
        self._memory = EpisodeMemory(recurrent.memory_size)
        return recurrent

    def setup_optimizer(self, optim_cfg: Any) -> None:
        """Create Adam."""
        super().setup_optimizer(optim_cfg)
        if self.hyper.micro_batch_size is not None:
            raise ConfigError(
                "train.micro_batch_size is set, but a recurrent policy learns from whole "
                "sequences; lower train.minibatch_size or train.sequence_length instead"
            )

    @property
    def _recurrent(self) -> RecurrentActorCritic:
        return cast("RecurrentActorCritic", self._network)

    # ---- acting --------------------------------------------------------------------------------

    def rollout_step(self, env_ret: EnvRet, **kwargs: Any) -> PolicyResponse:
        """Act on rows [N, ...] with what is remembered of them, and remember them.

        A row whose episode ended starts with an empty memory; its `final_value` is that of the
        last observation after what was remembered of its own episode.
        """
        before, step = self._memory.recall(env_ret)
        ended = env_ret.last_terminated.bool() | env_ret.last_truncated.bool()
        start = before.masked_fill(ended.unsqueeze(-1), 0.0)
        out = self._recurrent.step(self._normalized(env_ret.observation), start)
        self._memory.keep(env_ret, out.memory)
        if self.deterministic:
            action = out.distribution.mode()
            log_prob = out.distribution.log_prob(action)
        else:
            action, log_prob = out.distribution.sample_with_log_prob()
        return PolicyResponse(
            env_id=env_ret.env_id,
            action=action,
            log_prob=log_prob,
            value=self._in_reward_units(out.value),
            final_value=self._final_value_after(before, env_ret, out.value),
            memory=start,
            row_step=step,
        )

    def _final_value_after(self, before: Tensor, env_ret: EnvRet, like: Tensor) -> Tensor:
        final_value = torch.zeros_like(like)
        if env_ret.has_info("_final_obs"):
            rows = env_ret.info["_final_obs"].bool() & env_ret.last_truncated.bool()
            if rows.any():
                final_obs = self._normalized(take_rows(env_ret.info["final_obs"], rows))
                value = self._recurrent.value_after(final_obs, before[rows])
                final_value[rows] = self._in_reward_units(value)
        return final_value

    def episode_memory(self) -> dict[str, Any]:
        """Return the memories of all environments, by environment id."""
        return self._memory.state_dict()

    def load_episode_memory(self, memory: dict[str, Any]) -> None:
        """Replace them; ``{}`` makes every environment start with an empty one."""
        self._memory.load_state_dict(memory)

    # ---- learning ------------------------------------------------------------------------------

    def update_dataset(self, data: Any) -> None:
        """Keep a rollout: rows of one environment together, and in the order of time.

        Beside PPO's columns they have ``memory``, ``row_step``, ``terminated`` and
        ``truncated``.

        Raises:
            ContractError: a column is missing, or no two rows follow each other.
        """
        super().update_dataset(data)
        names = ("memory", "row_step", "terminated", "truncated")
        hint = "Recurrent PPO learns from what its own rollout_step answered"
        columns = require_columns(data, names, hint=hint)
        ended = columns["terminated"].bool() | columns["truncated"].bool()
        lengths = sequence_lengths(
            columns["row_step"], ended, max_length=self.hyper.sequence_length
        )
        together = sequence_lengths(columns["row_step"])
        later = torch.isin(columns["row_step"] + 1, columns["row_step"])
        if len(together) == len(ended) and later.any():
            raise ContractError(
                f"no two of the {len(ended)} rows follow each other in time; a recurrent policy "
                "learns from sequences. Use a RolloutBuffer with the sampler `all`, which hands "
                "rows out unshuffled"
            )
        self._lengths = lengths.to(self.device)
        self._first_rows = self._lengths.cumsum(0) - self._lengths
        self.dataset["memory"] = columns["memory"]

    def _one_pass(
        self, rows: Minibatch, step: Callable[[Minibatch], StepOutputs]
    ) -> tuple[Minibatch, list[StepOutputs], bool]:
        """Step through all sequences once, in random order; otherwise as PPO's."""
        order = torch.randperm(len(self._lengths), generator=self.shuffle_generator)
        order = order.to(self.device)
        index = sequence_rows(self._lengths, order)
        shuffled = Minibatch(*(take_rows(column, index) for column in rows))
        lengths = self._lengths[order]
        memory = self.dataset["memory"][self._first_rows[order]]
        outputs, start = [], 0
        for part in self._parts(len(index)):
            n_rows = int(lengths[part].sum())
            taken = slice(start, start + n_rows)
            start += n_rows
            minibatch = Minibatch(*(take_rows(column, taken) for column in shuffled))
            sequences: Any = SequenceInput(minibatch.features, memory[part], lengths[part])
            minibatch = minibatch._replace(
                features=sequences, advantage=self._standardized(minibatch.advantage)
            )
            outputs.append(step(minibatch))
            if self._exceeds_target_kl(outputs[-1], minibatch):
                return shuffled, outputs, False
        return shuffled, outputs, True

    def _parts(self, n_rows: int) -> list[slice]:
        """Cut sequences into minibatches of about as many rows as wanted; same on every rank."""
        group, n_sequences = self.process_group, len(self._lengths)
        wanted = least_over_ranks(n_rows, group) // self.hyper.minibatch_size
        most = least_over_ranks(n_sequences, group)
        return even_slices(n_sequences, max(1, min(wanted, most)))

    def _metrics(
        self, data: dict[str, Any], rows: Minibatch, outputs: list[StepOutputs]
    ) -> dict[str, float]:
        length = float(self._lengths.double().mean())
        return super()._metrics(data, rows, outputs) | {"sequence_length": length}
