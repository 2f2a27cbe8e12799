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


# ---- acting ------------------------------------------------------------------------------------

NESTED = spaces.Dict({"a": VECTOR, "b": spaces.Discrete(3)})


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        (ActorCriticOptions(), True),
        (ActorCriticOptions(hidden_sizes=[32]), True),
        (ActorCriticOptions(hidden_sizes=[8, 300, 16]), True),
        (ActorCriticOptions(activation="relu"), False),
        (ActorCriticOptions(shared_encoder=True), False),
        (ActorCriticOptions(hidden_sizes=[]), False),
    ],
)
@pytest.mark.parametrize(
    "action_space", [spaces.Box(-1, 1, (2,)), spaces.Discrete(3, start=1)], ids=str
)
def test_acting_equals_forward_for_batches_of_any_size(options, plain, action_space):
    model = ActorCritic(VECTOR, action_space, options)
    for n_rows in (1, 5, 300):
        observation = torch.randn(n_rows, 4)
        fast, value = model.act(observation)
        slow, slow_value = model(observation)
        assert torch.allclose(value, slow_value, atol=1e-5)
        action = slow.sample()
        assert torch.allclose(fast.log_prob(action), slow.log_prob(action), atol=1e-5)
        assert not value.requires_grad
    assert (model._plain is not None) is plain


def test_acting_on_nested_vectors_is_plain_too():
    model = ActorCritic(NESTED, spaces.Discrete(2))
    observation = {"a": torch.randn(6, 4), "b": torch.randint(3, (6,))}
    assert torch.allclose(model.act(observation)[1], model(observation)[1], atol=1e-5)
    assert model._plain is not None


def test_acting_falls_back_where_the_head_or_the_encoder_is_another():
    for space, action_space in [(VECTOR, spaces.MultiBinary(2)), (IMAGE, spaces.Discrete(2))]:
        model = ActorCritic(space, action_space, ActorCriticOptions(images=SMALL))
        observation = torch.as_tensor(np.stack([space.sample() for _ in range(3)]))
        assert torch.equal(model.act(observation)[1], model(observation)[1])


def test_acting_follows_every_way_of_changing_the_weights():
    """In place, by an optimizer, by loading a state: the flat copy is never stale."""
    torch.manual_seed(0)
    model, other = (ActorCritic(VECTOR, spaces.Box(-1, 1, (2,))) for _ in range(2))
    observation = torch.randn(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def descend():
        model(observation)[1].square().sum().backward()
        optimizer.step()

    def edit():
        with torch.no_grad():
            model.value_head.bias.add_(1.0)

    def edit_in_inference_mode():
        with torch.inference_mode():
            model.value_head.bias.add_(1.0)

    for change in (
        descend,
        edit,
        edit_in_inference_mode,
        lambda: model.load_state_dict(other.state_dict()),
    ):
        before = model.act(observation)[1]
        change()
        after = model.act(observation)[1]
        assert not torch.allclose(before, after, atol=1e-3)
        assert torch.allclose(after, model(observation)[1], atol=1e-5)


def test_answers_stay_what_they_were_when_the_next_batch_comes():
    model = ActorCritic(VECTOR, spaces.Box(-1, 1, (2,)))
    distribution, value = model.act(torch.zeros(3, 4))
    mean, kept = distribution.mean.clone(), value.clone()
    model.act(torch.ones(3, 4))
    assert torch.equal(distribution.mean, mean)
    assert torch.equal(value, kept)


def test_many_batch_sizes_do_not_pile_up_memory():
    model = ActorCritic(VECTOR, spaces.Discrete(2))
    for n_rows in range(1, 200):
        model.act(torch.zeros(n_rows, 4))
    assert len(model._plain._workspaces) <= 64
