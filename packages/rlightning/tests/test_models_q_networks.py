"""Networks of off-policy learning: shapes, unit actions, independent critics."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlightning.errors import ConfigError
from rlightning.models.q_networks import (
    LOG_STD_BOUNDS,
    ActionValues,
    CriticConfig,
    DeterministicActor,
    QEnsemble,
    SquashedGaussianActor,
    UnitActions,
    frozen_copy,
)

VECTOR = spaces.Box(-np.inf, np.inf, (3,))
IMAGE = spaces.Box(0, 255, (36, 38, 3), np.uint8)
SMALL = CriticConfig(hidden_sizes=[8], image_size=(36, 36), image_features=4)


def test_unit_actions_map_asymmetric_bounds_onto_minus_one_and_one():
    low, high = np.float32([[0.0], [-2.0]]), np.float32([[5.0], [0.0]])
    space = spaces.Box(low, high)
    actions = UnitActions(space)
    assert actions.size == 2
    unit = torch.tensor([[-1.0, 1.0], [0.0, 0.0]])
    assert actions.to_env(unit).tolist() == [[[0.0], [0.0]], [[2.5], [-1.0]]]
    assert torch.equal(actions.to_unit(actions.to_env(unit)), unit)


def test_random_unit_actions_are_uniform_over_the_whole_box():
    torch.manual_seed(0)
    actions = UnitActions(spaces.Box(-1, 1, (2,)))
    sample = actions.sample(20_000)
    assert sample.shape == (20_000, 2)
    assert sample.mean(0).tolist() == pytest.approx([0, 0], abs=0.02)
    assert sample.var(0).tolist() == pytest.approx([1 / 3, 1 / 3], abs=0.01)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Discrete(3), r"Discrete\(3\).*DQNPolicy"),
        (spaces.Box(-np.inf, np.inf, (2,)), r"not bounded on all sides.*PPOPolicy"),
        (spaces.Box(0, np.inf, (1,)), r"not bounded on all sides"),
    ],
    ids=str,
)
def test_other_spaces_are_refused_with_what_takes_them(space, message):
    with pytest.raises(ConfigError, match=message):
        UnitActions(space)


@pytest.mark.parametrize("space", [VECTOR, IMAGE, spaces.Dict({"a": VECTOR, "b": IMAGE})], ids=str)
def test_every_network_takes_every_kind_of_observation(space):
    samples = [space.sample() for _ in range(5)]
    if isinstance(space, spaces.Dict):
        observation = {k: torch.as_tensor(np.stack([s[k] for s in samples])) for k in space}
    else:
        observation = torch.as_tensor(np.stack(samples))
    action = torch.zeros(5, 2)
    three = CriticConfig(**SMALL.to_dict() | {"n_critics": 3})
    assert QEnsemble(space, 2, three)(observation, action).shape == (3, 5)
    mean, log_std = SquashedGaussianActor(space, 2, SMALL)(observation)
    assert mean.shape == log_std.shape == (5, 2)
    assert DeterministicActor(space, 2, SMALL)(observation).shape == (5, 2)
    assert ActionValues(space, 4, SMALL, dueling=True)(observation).shape == (5, 4)


def test_critics_start_apart_and_see_the_action():
    torch.manual_seed(0)
    ensemble = QEnsemble(VECTOR, 2, SMALL)
    observation = torch.randn(4, 3)
    first = ensemble(observation, torch.zeros(4, 2))
    assert not torch.allclose(first[0], first[1])
    assert not torch.allclose(first, ensemble(observation, torch.ones(4, 2)))


def test_the_spread_stays_within_its_bounds_with_a_living_gradient():
    actor = SquashedGaussianActor(VECTOR, 1, CriticConfig(hidden_sizes=[]))
    with torch.no_grad():
        actor.body[-1].bias.copy_(torch.tensor([0.0, 3.0]))
    _, log_std = actor(torch.zeros(1, 3))
    assert LOG_STD_BOUNDS[0] < log_std.item() < LOG_STD_BOUNDS[1]
    log_std.sum().backward()
    assert actor.body[-1].bias.grad[1] > 0


def test_a_new_squashed_gaussian_is_close_to_uniform_whatever_it_sees():
    torch.manual_seed(0)
    mean, log_std = SquashedGaussianActor(VECTOR, 2, SMALL)(torch.randn(64, 3))
    assert mean.abs().max() < 0.3
    assert log_std.abs().max() < 0.3


def test_dueling_advantages_have_mean_zero():
    network = ActionValues(VECTOR, 4, SMALL, dueling=True)
    observation = torch.randn(6, 3)
    value = network.body(observation)[:, 0]
    assert torch.allclose(network(observation).mean(-1), value, atol=1e-6)


def test_a_frozen_copy_is_equal_and_learns_nothing():
    network = ActionValues(VECTOR, 2, SMALL)
    copy = frozen_copy(network)
    observation = torch.randn(3, 3)
    assert torch.equal(network(observation), copy(observation))
    assert not any(parameter.requires_grad for parameter in copy.parameters())
    assert all(parameter.requires_grad for parameter in network.parameters())
    assert len({p.data_ptr() for n in (network, copy) for p in n.parameters()}) == 2 * len(
        list(network.parameters())
    )
