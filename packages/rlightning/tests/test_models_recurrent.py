"""Recurrent actor-critics: one step at a time and in sequences they say the same."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlightning.models.actor_critic import ActorCriticOptions
from rlightning.models.encoders import ImageOptions
from rlightning.models.recurrent import (
    MemoryOptions,
    RecurrentActorCritic,
    RecurrentLayer,
    SequenceInput,
)

VECTOR = spaces.Box(-1, 1, (3,))


def make(kind="lstm", space=VECTOR, *, layers=1, shared=False, images=None):
    torch.manual_seed(0)
    options = ActorCriticOptions(
        hidden_sizes=(5,), shared_encoder=shared, images=images or ImageOptions()
    )
    memory = MemoryOptions(kind=kind, size=6, layers=layers)
    return RecurrentActorCritic(space, spaces.Discrete(3), options, memory)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_layer_equals_torch_s_cell_stepped_by_hand(kind, layers):
    layer = RecurrentLayer(4, MemoryOptions(kind=kind, size=6, layers=layers))
    features, memory = torch.randn(7, 2, 4), torch.randn(2, layer.memory_size)
    out, after = layer(features, memory)
    cells = [(torch.nn.LSTMCell if kind == "lstm" else torch.nn.GRUCell)(w, 6) for w in (4, 6)]
    for index, cell in enumerate(cells[:layers]):
        cell.load_state_dict(
            {
                name.removesuffix(f"_l{index}"): value
                for name, value in layer.core.state_dict().items()
                if name.endswith(f"_l{index}")
            }
        )
    parts = memory.split(6, dim=-1)
    hidden, cell_state = list(parts[:layers]), list(parts[layers:])
    for t in range(7):
        x = features[t]
        for index, cell in enumerate(cells[:layers]):
            if kind == "lstm":
                hidden[index], cell_state[index] = cell(x, (hidden[index], cell_state[index]))
            else:
                hidden[index] = cell(x, hidden[index])
            x = hidden[index]
        assert torch.allclose(out[t], x, atol=1e-6)
    assert torch.allclose(after, torch.cat(hidden + cell_state, -1), atol=1e-6)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_sequences_of_any_length_say_what_single_steps_say(kind, shared):
    network = make(kind, layers=2, shared=shared)
    lengths = torch.tensor([4, 1, 3])
    observation, start = torch.randn(8, 3), torch.randn(3, network.memory_size)
    distribution, value = network(SequenceInput(observation, start, lengths))
    row = 0
    for index, length in enumerate(lengths.tolist()):
        memory = start[index : index + 1]
        for _ in range(length):
            one = network.step(observation[row : row + 1], memory)
            seen = network.value_after(observation[row : row + 1], memory)
            assert torch.allclose(one.distribution.log_p[0], distribution.log_p[row], atol=1e-6)
            assert torch.allclose(one.value, value[row : row + 1], atol=1e-6)
            assert torch.equal(one.value, seen)
            memory = one.memory
            row += 1


def test_actor_and_critic_remember_apart_unless_they_share():
    apart, shared = make(), make(shared=True)
    assert apart.memory_size == 2 * shared.memory_size == 2 * 2 * 6
    critic = {id(parameter) for parameter in apart.critic_parameters()}
    observation, memory = torch.randn(4, 3), torch.zeros(4, apart.memory_size)
    rows = SequenceInput(observation, memory, torch.tensor([4]))
    apart(rows._replace(memory=memory[:1]))[1].sum().backward()
    moved = {id(p) for p in apart.parameters() if p.grad is not None}
    assert moved == critic


def test_images_and_vectors_go_through_a_memory():
    image = spaces.Box(0, 255, (36, 36, 3), np.uint8)
    space = spaces.Dict({"camera": image, "joints": VECTOR})
    network = make(space=space, shared=True, images=ImageOptions(size=(36, 36), features=8))
    observation = {
        "camera": torch.randint(0, 255, (5, 36, 36, 3), dtype=torch.uint8),
        "joints": torch.randn(5, 3),
    }
    memory = torch.zeros(2, network.memory_size)
    _, value = network(SequenceInput(observation, memory, torch.tensor([2, 3])))
    assert value.shape == (5,)
