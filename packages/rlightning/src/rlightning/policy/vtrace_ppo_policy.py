"""PPO for data from older policies: V-trace corrects what it learns from (Espeholt et al. 2018).

Where acting and learning overlap, a rollout comes from a policy some versions old, and so do the
values recorded with it: its returns and advantages are those of another policy, seen by another
critic. Here an update begins by asking its own policy and critic about every row. V-trace turns
their answers and the recorded log-probabilities into value targets for the policy as it is now,
and into advantages. The surrogate stays PPO's, its ratio that of the policy to the one that acted,
clipped around the latter: what is too far from the data is not learned from it. On data of the
policy's own all this is PPO with generalised advantage estimation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pydantic import Field

from rlightning.ops.returns import advantage_of_targets, vtrace
from rlightning.ops.sequences import pad_sequences, sequence_lengths, unpad_sequences
from rlightning.policy.episode_memory import EpisodeMemory
from rlightning.policy.minibatches import even_slices, require_columns, take_rows
from rlightning.policy.ppo_config import PPOTrainConfig
from rlightning.policy.ppo_policy import PPOPolicy
from rlightning.utils.registry import POLICIES

if TYPE_CHECKING:
    from torch import Tensor

    from rlightning.types import EnvMeta, EnvRet, PolicyResponse

__all__ = ["VTracePPOPolicy", "VTracePPOTrainConfig"]


class VTracePPOTrainConfig(PPOTrainConfig):
    """Keys of the ``train`` section that V-trace PPO reads."""

    gamma: float = Field(default=0.99, ge=0, le=1)
    """Discount per environment step; ``${buffer.gamma}`` says it once."""
    trace_lambda: float = Field(default=0.95, ge=0, le=1)
    """As ``buffer.gae_lambda``, which it replaces."""
    rho_bar: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """Cap of the probability ratio that weighs a row's own TD error."""
    c_bar: float = Field(default=1.0, gt=0, allow_inf_nan=True)
    """Cap of the ratio that carries later TD errors back."""


@POLICIES.register("VTracePPOPolicy")
class VTracePPOPolicy(PPOPolicy):
    """PPO that may learn from rows of older weights, as ``asyncrl`` collects them.

    Beside PPO's fields a response holds ``row_step``, which tells what rows follow each other.
    """

    class TrainExtras(PPOPolicy.TrainExtras, VTracePPOTrainConfig):
        """Keys of the ``train`` section: those of `VTracePPOTrainConfig`."""

    hyper: TrainExtras

    def construct_network(self, env_meta: EnvMeta, *args: Any, **kwargs: Any) -> None:
        """Build what PPO builds."""
        super().construct_network(env_meta, *args, **kwargs)
        self._steps = EpisodeMemory(0)

    def rollout_step(self, env_ret: EnvRet, **kwargs: Any) -> PolicyResponse:
        """Act as PPO does, and number the rows."""
        response = super().rollout_step(env_ret, **kwargs)
        nothing, response.row_step = self._steps.recall(env_ret)
        self._steps.keep(env_ret, nothing)
        return response

    def episode_memory(self) -> dict[str, Any]:
        """Return how many steps each environment has taken."""
        return self._steps.state_dict()

    def load_episode_memory(self, memory: dict[str, Any]) -> None:
        """Restore what `episode_memory` returned."""
        self._steps.load_state_dict(memory)

    # ---- learning ------------------------------------------------------------------------------

    def update_dataset(self, data: Any) -> None:
        """Keep a rollout: rows of one environment together, and in the order of time.

        Raises:
            ContractError: a column is missing.
        """
        super().update_dataset(data)
        names = ("next_observation", "reward", "terminated", "truncated", "row_step")
        hint = "V-trace learns from what its own rollout_step answered"
        self.dataset |= require_columns(data, names, hint=hint)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Correct advantages and value targets, then update as PPO does; return its metrics.

        ``behaviour_ratio`` is the mean probability of the actions now, relative to when they were
        taken, each capped at `rho_bar`: what is left of the data's worth.
        """
        ratio = self._correct(self.dataset)
        metrics: dict[str, float] = super().train(*args, **kwargs)
        return metrics | {"behaviour_ratio": ratio}

    @torch.no_grad()
    def _correct(self, data: dict[str, Any]) -> float:
        """Replace the columns that depend on which policy one asks; return the mean ratio."""
        hyper, lengths = self.hyper, sequence_lengths(data["row_step"]).to(self.device)
        last = torch.zeros(int(lengths.sum()), dtype=torch.bool, device=lengths.device)
        last[lengths.cumsum(0) - 1] = True
        alone = last | data["truncated"].bool()
        log_prob, value, value_after = self._asked(data, alone)
        next_value = value.roll(-1)
        next_value[alone] = value_after
        log_ratio = log_prob - data["log_prob"]

        def padded(column: Tensor) -> Tensor:
            return pad_sequences(column, lengths)

        # The recursion ends where the row after is another environment's.
        rows = (padded(data["reward"].float()), padded(value), padded(next_value))
        ends = (padded(data["terminated"].bool()), padded(alone))
        target = vtrace(
            *rows,
            *ends,
            padded(log_ratio),
            gamma=hyper.gamma,
            rho_bar=hyper.rho_bar,
            c_bar=hyper.c_bar,
            trace_lambda=hyper.trace_lambda,
        ).value_target_TN
        advantage = advantage_of_targets(
            *rows, target, *ends, gamma=hyper.gamma, trace_lambda=hyper.trace_lambda
        )
        data["return"] = unpad_sequences(target, lengths)
        data["advantage"] = unpad_sequences(advantage, lengths)
        data["value"] = value
        return float(log_ratio.exp().clamp(max=hyper.rho_bar).mean())

    def _asked(self, data: dict[str, Any], alone: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ask policy and critic as they are now, piece by piece, without any augmentation.

        Returns:
            Log-probabilities and values of all rows, and values of what followed the rows that
            stand `alone`, in units of reward.
        """
        log_probs, values, values_after = [], [], []
        self.actor_critic.eval()
        for part in self._pieces(len(alone)):
            observation = self._normalized(take_rows(data["observation"], part))
            distribution, value = self._network(observation)
            log_probs.append(distribution.log_prob(data["action"][part]))
            values.append(self._in_reward_units(value))
        after = take_rows(data["next_observation"], alone)
        for part in self._pieces(int(alone.sum())):
            value = self._network.value(self._normalized(take_rows(after, part)))
            values_after.append(self._in_reward_units(value))
        self.actor_critic.train()
        return torch.cat(log_probs), torch.cat(values), torch.cat(values_after)

    def _pieces(self, n_rows: int) -> list[slice]:
        """Cut rows into pieces no larger than the minibatches that must fit anyway."""
        return even_slices(n_rows, -(-n_rows // self.hyper.minibatch_size))
