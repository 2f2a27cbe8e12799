"""Offloading: the device's memory is free in between, and learning goes on as if nothing was."""

import pytest
import torch
from torch import nn

from rlightning.weights import Offload

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.head.weight
        self.register_buffer("window", torch.arange(6.0))
        self.register_buffer("view", self.window[2:5])

    def forward(self, x):
        return self.tied(self.head(self.body(x))).sum() + self.view.sum()


def learner(device):
    torch.manual_seed(0)
    network = Network().to(device)
    network.view = network.window[2:5]
    return network, torch.optim.Adam(network.parameters(), lr=0.01)


def step(network, optimizer, seed):
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    network(x.to(network.window.device)).backward()
    optimizer.step()


def state(network):
    return {name: tensor.clone().cpu() for name, tensor in network.state_dict().items()}


@pytest.mark.parametrize("device", DEVICES)
def test_learning_goes_on_as_if_nothing_had_been_moved(device):
    plain, moved = learner(device), learner(device)
    offload = Offload(moved[0], [moved[1]])
    for seed in range(4):
        step(*plain, seed)
        step(*moved, seed)
        offload.offload()
        offload.offload()
        assert offload.size_bytes > 0
        offload.reload()
        offload.reload()
        assert offload.size_bytes == 0
    for name, tensor in state(plain[0]).items():
        assert torch.equal(tensor, state(moved[0])[name]), name


@pytest.mark.parametrize("device", DEVICES)
def test_everything_is_empty_in_between_and_the_same_object_with_the_same_memory_after(device):
    network, optimizer = learner(device)
    step(network, optimizer, 0)
    parameters, gradients = list(network.parameters()), [p.grad for p in network.parameters()]
    before, gradient = state(network), gradients[0].clone()
    offload = Offload(network, [optimizer])
    offload.offload()
    tensors = [*parameters, *network.buffers(), *gradients]
    tensors += [value for item in optimizer.state.values() for value in item.values()]
    assert {tensor.numel() for tensor in tensors} == {0}
    with pytest.raises(RuntimeError):
        network(torch.ones(2, 4, device=device))
    offload.reload()
    assert [id(p) for p in network.parameters()] == [id(p) for p in parameters]
    assert network.tied.weight is network.head.weight
    assert all(torch.equal(tensor, state(network)[name]) for name, tensor in before.items())
    assert torch.equal(gradients[0], gradient)
    network.window[3] = 99
    assert network.view[1] == 99
    assert {tensor.device.type for tensor in network.parameters()} == {device}


def test_gradients_can_be_dropped():
    network, optimizer = learner("cpu")
    step(network, optimizer, 0)
    with_gradients = Offload(network, [optimizer])
    with_gradients.offload()
    size = with_gradients.size_bytes
    with_gradients.reload()
    without = Offload(network, [optimizer], gradients=False)
    without.offload()
    assert 0 < without.size_bytes < size
    without.reload()
    assert all(parameter.grad is None for parameter in network.parameters())
    step(network, optimizer, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_memory_of_a_gpu_is_free_in_between():
    network = nn.Linear(4096, 4096, device="cuda")
    offload = Offload(network)
    before = torch.cuda.memory_allocated()
    offload.offload()
    assert torch.cuda.memory_allocated() <= before - 4096 * 4096 * 4
    offload.reload()
    assert torch.cuda.memory_allocated() == before
