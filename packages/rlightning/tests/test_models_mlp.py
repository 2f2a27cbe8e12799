"""MLPs have the asked shape, scale and activations."""

import pytest
import torch
from torch import nn

from rlightning.errors import ConfigError
from rlightning.models.mlp import ACTIVATIONS, MLP, activation, linear


def test_layers_and_widths():
    mlp = MLP(3, [8, 4], 2, activation_name="relu")
    assert [type(layer) for layer in mlp] == [nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear]
    assert mlp.out_features == 2
    assert mlp(torch.zeros(5, 3)).shape == (5, 2)


def test_without_hidden_layers_it_is_the_identity():
    mlp = MLP(3, [])
    assert mlp.out_features == 3
    x = torch.randn(2, 3)
    assert torch.equal(mlp(x), x)


@pytest.mark.parametrize("gain", [0.01, 1.0, 2.0])
def test_weights_are_orthogonal_with_the_gain_and_biases_zero(gain):
    layer = linear(16, 4, gain=gain)
    gram = layer.weight @ layer.weight.T
    assert torch.allclose(gram, gain**2 * torch.eye(4), atol=1e-5)
    assert torch.equal(layer.bias, torch.zeros(4))


def test_every_listed_activation_builds():
    assert all(isinstance(activation(name), nn.Module) for name in ACTIVATIONS)


def test_an_unknown_activation_suggests_a_close_one():
    with pytest.raises(ConfigError, match=r"'tahn' is unknown\. Did you mean 'tanh'"):
        MLP(3, [8], activation_name="tahn")
