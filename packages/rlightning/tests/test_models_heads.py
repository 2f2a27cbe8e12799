"""Heads speak the action space's language and never produce an invalid distribution."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlightning.errors import ConfigError
from rlightning.models.heads import ValueHead, make_action_head

SPACES = [
    spaces.Box(-1, 1, (3,)),
    spaces.Box(-1, 1, (2, 3)),
    spaces.Box(-np.inf, np.inf, ()),
    spaces.Discrete(4),
    spaces.Discrete(3, start=-1),
    spaces.MultiDiscrete([2, 5, 3]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 0], [0, -2]]),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_samples_have_the_spaces_shape_and_their_own_log_prob(space):
    torch.manual_seed(0)
    head = make_action_head(space, 8)
    distribution = head(torch.randn(50, 8))
    action = distribution.sample(torch.Generator().manual_seed(1))
    assert action.shape == (50, *space.shape)
    assert distribution.mode().shape == (50, *space.shape)
    assert distribution.log_prob(action).shape == (50,)
    assert distribution.entropy().shape == (50,)
    best = distribution.log_prob(distribution.mode())
    assert (best >= distribution.log_prob(action) - 1e-6).all()
    if not isinstance(space, spaces.Box):
        for row in (*action, *distribution.mode()):
            assert space.contains(row.numpy().astype(space.dtype))


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_sampling_with_log_prob_is_sampling_and_log_prob(space):
    torch.manual_seed(0)
    distribution = make_action_head(space, 8, log_std_init=-0.7)(torch.randn(20, 8))
    action, log_prob = distribution.sample_with_log_prob(torch.Generator().manual_seed(3))
    assert torch.equal(action, distribution.sample(torch.Generator().manual_seed(3)))
    assert torch.allclose(log_prob, distribution.log_prob(action), atol=1e-5)


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_entropy_is_the_mean_of_minus_log_prob(space):
    """H = E[-log p], by Monte Carlo: entropies and log-probabilities are of one distribution."""
    torch.manual_seed(0)
    head = make_action_head(space, 4)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    distribution = head(torch.randn(1, 4).expand(20_000, 4))
    sample = distribution.sample(torch.Generator().manual_seed(2))
    estimate = -distribution.log_prob(sample).mean()
    assert estimate.item() == pytest.approx(distribution.entropy()[0].item(), abs=0.05)


def test_first_actions_hardly_depend_on_the_state():
    head = make_action_head(spaces.Box(-1, 1, (2,)), 64)
    assert head(torch.randn(100, 64)).mode().abs().max() < 0.1


def test_the_initial_spread_is_the_asked_one():
    head = make_action_head(spaces.Box(-1, 1, (2,)), 4, log_std_init=-1.0)
    expected = 2 * (-1 + 0.5 * math.log(2 * math.pi * math.e))
    assert head(torch.zeros(3, 4)).entropy().tolist() == pytest.approx([expected] * 3)


@pytest.mark.parametrize("direction", [-1.0, 1.0])
def test_no_learning_rate_makes_a_standard_deviation_invalid(direction):
    head = make_action_head(spaces.Box(-1, 1, (2,)), 4)
    optimizer = torch.optim.SGD(head.parameters(), lr=1e3)
    for _ in range(100):
        optimizer.zero_grad()
        distribution = head(torch.randn(8, 4))
        (direction * distribution.log_std.sum()).backward()
        optimizer.step()
        head.project()
        std = head(torch.zeros(1, 4)).log_std.exp()
        assert ((std > 0) & torch.isfinite(std)).all()


def test_a_projected_spread_can_come_back():
    head = make_action_head(spaces.Box(-1, 1, (1,)), 4)
    with torch.no_grad():
        head.log_std.fill_(100.0)
    head.project()
    head(torch.zeros(1, 4)).log_std.sum().backward()
    assert head.log_std.item() == 2.0
    assert head.log_std.grad.item() == 1.0


def test_an_unsupported_action_space_says_what_is_supported():
    with pytest.raises(ConfigError, match=r"Dict.*Box, Discrete"):
        make_action_head(spaces.Dict({"a": spaces.Discrete(2)}), 4)


def test_value_head_keeps_its_public_path_and_defaults():
    from rlightning.models.modules.value_head import ValueHead as Public

    assert Public is ValueHead
    head = ValueHead(16)
    assert [tuple(p.shape) for n, p in head.named_parameters() if "weight" in n] == [
        (512, 16),
        (128, 512),
        (1, 128),
    ]
    assert head.value.bias is None
    assert ValueHead(16, bias_last=True).value.bias is not None
    assert head(torch.zeros(2, 7, 16)).shape == (2, 7, 1)
