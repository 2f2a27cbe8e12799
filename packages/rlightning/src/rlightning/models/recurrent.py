"""Actor and critic that remember: a recurrent layer between the trunk and the heads.

A memory is one flat vector per environment, ``[rows, memory_size]``, zero when an episode starts.
Where it is kept between steps, and when it is forgotten, is the policy's affair.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlightning.models.actor_critic import ActorCritic, ActorCriticOptions
from rlightning.models.heads import ActionDistribution, make_action_head
from rlightning.models.mlp import linear
from rlightning.ops.plain_networks import PlainLayers
from rlightning.ops.sequences import pad_sequences, unpad_sequences

__all__ = ["MemoryOptions", "RecurrentActorCritic", "RecurrentLayer", "SequenceInput", "Step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """The shape of a recurrent layer."""

    kind: Literal["lstm", "gru"] = "lstm"
    """Long short-term memory (Hochreiter & Schmidhuber 1997), or gated units (Cho et al. 2014)."""
    size: int = 64
    """Width of the layer's output."""
    layers: int = 1
    """How many are stacked."""


class SequenceInput(NamedTuple):
    """Rows of whole sequences, one sequence after the other.

    Attributes:
        observation: B of them, in the form the encoders take.
        memory: what was remembered before each sequence's first row, [S, memory_size].
        lengths: of the sequences, int64 [S], with the sum B.
    """

    observation: Any
    memory: Tensor
    lengths: Tensor


class Step(NamedTuple):
    """What one step of every environment gives.

    Attributes:
        distribution: over actions.
        value: [B].
        memory: after the observation, [B, memory_size].
    """

    distribution: ActionDistribution
    value: Tensor
    memory: Tensor


class RecurrentLayer(nn.Module):
    """An LSTM or GRU whose state is one flat vector per row.

    Args:
        in_features: width of its input.
        options: kind, width and depth.

    Attributes:
        memory_size: length of the state.
    """

    def __init__(self, in_features: int, options: MemoryOptions) -> None:
        super().__init__()
        kind = nn.LSTM if options.kind == "lstm" else nn.GRU
        self.core = kind(in_features, options.size, options.layers)
        for name, parameter in self.core.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)
        self._is_lstm = options.kind == "lstm"
        self._size = options.size
        self.memory_size = options.size * options.layers * (2 if self._is_lstm else 1)

    def forward(self, features: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Read sequences in time.

        Args:
            features: [L, S, in_features].
            memory: the state before the first step, [S, memory_size].

        Returns:
            Outputs [L, S, size], and the state after the last step, [S, memory_size].
        """
        states = memory.reshape(len(memory), -1, self._size).transpose(0, 1).contiguous()
        if self._is_lstm:
            hidden, cell = states.chunk(2)
            out, after = self.core(features, (hidden.contiguous(), cell.contiguous()))
            states = torch.cat(after)
        else:
            out, states = self.core(features, states)
        return out, states.transpose(0, 1).reshape(len(memory), -1)


class RecurrentActorCritic(ActorCritic):
    """Encoder, hidden layers, a recurrent layer, heads; twice, unless actor and critic share them.

    Args:
        observation_space: of one environment.
        action_space: of one environment.
        options: encoder and hidden layers.
        memory: the recurrent layer.

    Attributes:
        memory_size: numbers remembered per environment, actor's and critic's together.
    """

    critic_memory: RecurrentLayer | None

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        options: ActorCriticOptions | None = None,
        memory: MemoryOptions | None = None,
    ) -> None:
        options, memory = options or ActorCriticOptions(), memory or MemoryOptions()
        super().__init__(observation_space, action_space, options)
        width, alone = self.value_head.in_features, self.critic_trunk is not None
        self.actor_memory = RecurrentLayer(width, memory)
        self.critic_memory = RecurrentLayer(width, memory) if alone else None
        self.memory_size = self.actor_memory.memory_size * (2 if alone else 1)
        # The heads read what the memory says, not what the trunk does.
        self.action_head = make_action_head(
            action_space, memory.size, log_std_init=options.log_std_init
        )
        self.value_head = linear(memory.size, 1, gain=1.0)

    def forward(self, observation: Any) -> tuple[ActionDistribution, Tensor]:
        """Compute both outputs for every row of some sequences.

        Args:
            observation: a `SequenceInput`.

        Returns:
            The distribution over actions, and values [B].
        """
        rows = cast("SequenceInput", observation)
        actor, critic = self._outputs(rows.observation, rows.memory, rows.lengths)[:2]
        distribution = self.masked(self.action_head(actor), rows.observation)
        return distribution, self.value_head(critic).squeeze(-1)

    @torch.no_grad()
    def step(self, observation: Any, memory: Tensor) -> Step:
        """Take one step in every environment, without gradients.

        Args:
            observation: B of them.
            memory: [B, memory_size].
        """
        actor, critic, memory = self._outputs(observation, memory)
        distribution = self.masked(self.action_head(actor), observation)
        return Step(distribution, self.value_head(critic).squeeze(-1), memory)

    @torch.no_grad()
    def value_after(self, observation: Any, memory: Tensor) -> Tensor:
        """Compute the values [B] of observations that follow `memory`, without gradients."""
        value: Tensor = self.value_head(self._outputs(observation, memory)[1]).squeeze(-1)
        return value

    def _outputs(
        self, observation: Any, memory: Tensor, lengths: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the heads of actor and critic read [B, size], and the memory after.

        Without `lengths` every row is a sequence of its own.
        """
        own, others = memory, memory[:, :0]
        if self.critic_memory is not None:
            own, others = memory.chunk(2, dim=-1)
        actor, own = _read(self.actor_trunk, self.actor_memory, observation, own, lengths)
        if self.critic_trunk is None or self.critic_memory is None:
            return actor, actor, own
        critic, others = _read(self.critic_trunk, self.critic_memory, observation, others, lengths)
        return actor, critic, torch.cat([own, others], -1)

    def _layers(self) -> PlainLayers | None:
        """Return None: a network with a memory is not plain."""
        return None

    def critic_parameters(self) -> Any:
        """Yield the parameters that only the critic uses."""
        yield from super().critic_parameters()
        if self.critic_memory is not None:
            yield from self.critic_memory.parameters()


def _read(
    trunk: nn.Module,
    layer: RecurrentLayer,
    observation: Any,
    memory: Tensor,
    lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    features = trunk(observation)
    if lengths is None:
        out, memory = layer(features.unsqueeze(0), memory)
        return out.squeeze(0), memory
    out, memory = layer(pad_sequences(features, lengths), memory)
    return unpad_sequences(out, lengths), memory
