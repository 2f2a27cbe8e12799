"""One module for every pair of spaces; sharing, gradients and options do what they say."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlightning.errors import ConfigError
from rlightning.models.actor_critic import ActorCritic, ActorCriticOptions
from rlightning.models.encoders import ImageOptions

VECTOR = spaces.Box(-1, 1, (4,))
IMAGE = spaces.Box(0, 255, (36, 40, 3), np.uint8)
SMALL = ImageOptions(size=(36, 36), features=16)


@pytest.mark.parametrize(
    "action_space",
    [
        spaces.Box(-1, 1, (2,)),
        spaces.Discrete(3),
        spaces.MultiDiscrete([2, 3]),
        spaces.MultiBinary(4),
    ],
    ids=str,
)
@pytest.mark.parametrize("shared", [False, True])
def test_both_outputs_for_every_action_space(action_space, shared):
    model = ActorCritic(VECTOR, action_space, ActorCriticOptions(shared_encoder=shared))
    distribution, value = model(torch.randn(7, 4))
    assert value.shape == (7,)
    assert distribution.log_prob(distribution.sample()).shape == (7,)
    assert (model.critic_trunk is None) is shared
    observation = torch.randn(7, 4)
    assert torch.equal(model.value(observation), model(observation)[1])


def test_defaults_are_two_tanh_networks_of_two_layers_of_64():
    model = ActorCritic(VECTOR, spaces.Discrete(2))
    sizes = [tuple(p.shape) for p in model.parameters() if p.dim() == 2]
    assert sorted(sizes) == sorted([(64, 4), (64, 64), (2, 64), (64, 4), (64, 64), (1, 64)])
    assert {type(m) for m in model.modules()} >= {torch.nn.Tanh}


def test_images_share_one_encoder_and_need_no_hidden_layer():
    model = ActorCritic(IMAGE, spaces.Discrete(2), ActorCriticOptions(images=SMALL))
    assert model.critic_trunk is None
    assert model.value_head.in_features == 16
    assert model(torch.zeros(2, 36, 40, 3, dtype=torch.uint8))[1].shape == (2,)


def test_an_image_inside_a_dict_counts():
    space = spaces.Dict({"state": VECTOR, "views": spaces.Tuple([IMAGE])})
    model = ActorCritic(space, spaces.Discrete(2), ActorCriticOptions(images=SMALL))
    assert model.critic_trunk is None


def test_separate_networks_do_not_exchange_gradients():
    model = ActorCritic(VECTOR, spaces.Box(-1, 1, (2,)))
    model(torch.randn(3, 4))[1].sum().backward()
    touched = {n for n, p in model.named_parameters() if p.grad is not None}
    assert touched
    assert all(name.startswith(("critic_trunk", "value_head")) for name in touched)


def test_options_reach_the_layers():
    options = ActorCriticOptions(hidden_sizes=[5], activation="relu", log_std_init=-0.5)
    model = ActorCritic(VECTOR, spaces.Box(-1, 1, (2,)), options)
    assert model.value_head.in_features == 5
    assert model.action_head.log_std.tolist() == [-0.5, -0.5]
    with pytest.raises(ConfigError, match="'rulu' is unknown"):
        ActorCritic(VECTOR, spaces.Discrete(2), ActorCriticOptions(activation="rulu"))


def test_project_bounds_the_spread_and_leaves_discrete_policies_alone():
    model = ActorCritic(VECTOR, spaces.Box(-1, 1, (2,)))
    torch.nn.init.constant_(model.action_head.log_std, -1e9)
    model.project()
    assert model.action_head.log_std.tolist() == [-20.0, -20.0]
    ActorCritic(VECTOR, spaces.Discrete(2)).project()
