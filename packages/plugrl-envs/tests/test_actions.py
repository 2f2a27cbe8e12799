import gymnasium as gym
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from plugrl_envs import ActionBorder, InvalidActionError, UnsupportedSpaceError, make_vec
from plugrl_envs.testing import SpaceEnv

BOXES = [
    gym.spaces.Box(0, 5, (2,), np.float32),
    gym.spaces.Box(-2, 0, (2, 3), np.float64),
    gym.spaces.Box(-np.inf, np.inf, (1,), np.float32),
    gym.spaces.Box(np.array([-1, -np.inf], np.float32), np.array([np.inf, 0.1], np.float32)),
    gym.spaces.Box(-1, 1, (), np.float32),
]


@pytest.mark.parametrize("space", BOXES)
@given(data=st.data())
def test_box_actions_reach_the_environment_in_range(space, data):
    actions = data.draw(
        hnp.arrays(np.float64, (3, *space.shape), elements=st.floats(-1e6, 1e6, width=32))
    )
    before = actions.copy()
    converted = ActionBorder(space, 3).convert(actions)
    assert all(space.contains(np.asarray(row)) for row in converted)
    assert np.array_equal(actions, before), "what the policy sampled must not change"
    inside = (actions >= space.low) & (actions <= space.high)
    assert np.array_equal(converted[inside], actions[inside].astype(space.dtype))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_actions_that_are_not_finite_are_refused_and_the_row_named(bad):
    actions = np.zeros((4, 2))
    actions[2, 1] = bad
    with pytest.raises(InvalidActionError, match="environment 2 is not finite"):
        ActionBorder(BOXES[0], 4).convert(actions)


def test_discrete_actions_start_at_zero_and_reach_the_environment_shifted():
    env = make_vec(lambda: SpaceEnv(gym.spaces.Discrete(3, start=5)), 2)
    env.reset(seed=0)
    assert env.single_action_space == gym.spaces.Discrete(3)
    assert all(0 <= action < 3 for action in env.action_space.sample())
    env.step(np.array([0, 2]))
    assert [row.received for row in env.call("unwrapped")] == [[5], [7]]


def test_multi_discrete_actions_are_shifted_by_their_starts():
    space = gym.spaces.MultiDiscrete([3, 4], start=[10, -2])
    border = ActionBorder(space, 1)
    assert border.convert([[2, 0]]).tolist() == [[12, -2]]
    assert not np.any(border.policy_space.start)
    with pytest.raises(InvalidActionError, match="out of range"):
        border.convert([[2, 4]])


def test_multi_binary_takes_bools_and_ints():
    border = ActionBorder(gym.spaces.MultiBinary(3), 2)
    assert border.convert(np.array([[True, False, True]] * 2)).tolist() == [[1, 0, 1]] * 2
    with pytest.raises(InvalidActionError, match="out of range"):
        border.convert(np.full((2, 3), 2))


def test_discrete_takes_whole_floats_and_refuses_others():
    border = ActionBorder(gym.spaces.Discrete(4), 2)
    converted = border.convert(np.array([3.0, 0.0], np.float32))
    assert converted.tolist() == [3, 0]
    assert converted.dtype == np.int64
    for bad in ([0.5, 1.0], [np.nan, 1.0]):
        with pytest.raises(InvalidActionError, match="expected whole numbers"):
            border.convert(np.array(bad))
    for bad in ([-1, 0], [0, 4]):
        with pytest.raises(InvalidActionError, match="out of range"):
            border.convert(np.array(bad))


def test_a_wrong_shape_is_named_with_what_was_expected():
    with pytest.raises(InvalidActionError, match=r"has shape \(3, 2\); expected \(4, 2\)"):
        ActionBorder(BOXES[0], 4).convert(np.zeros((3, 2)))
    with pytest.raises(InvalidActionError, match=r"expected \(1, 2\) or \(2,\)"):
        ActionBorder(BOXES[0], 1).convert(np.zeros((2, 2)))
    with pytest.raises(InvalidActionError, match=r"has shape \(4, 1\); expected \(4,\)"):
        ActionBorder(gym.spaces.Discrete(2), 4).convert(np.zeros((4, 1), int))


def test_one_row_takes_actions_with_and_without_the_leading_axis():
    border = ActionBorder(BOXES[0], 1)
    assert border.convert(np.ones(2)).shape == (1, 2)
    assert border.convert(np.ones((1, 2))).shape == (1, 2)
    assert ActionBorder(gym.spaces.Discrete(2), 1).convert(1).tolist() == [1]


def test_a_box_of_integers_gets_integers():
    border = ActionBorder(gym.spaces.Box(0, 10, (2,), np.int32), 1)
    assert border.convert(np.array([[2.6, 99.0]])).tolist() == [[3, 10]]
    assert border.convert(np.array([[2.6, 99.0]])).dtype == np.int32


def test_spaces_without_an_action_distribution_are_refused_at_the_start():
    with pytest.raises(UnsupportedSpaceError, match="action_space is Dict"):
        ActionBorder(gym.spaces.Dict({"a": gym.spaces.Discrete(2)}), 1)


def test_observation_spaces_that_cannot_be_batched_are_refused_at_the_start():
    space = gym.spaces.Dict({"words": gym.spaces.Text(5), "x": gym.spaces.Box(0, 1)})
    with pytest.raises(UnsupportedSpaceError, match=r"observation_space\['words'\] is Text"):
        make_vec(lambda: SpaceEnv(gym.spaces.Discrete(2), space), 1)


class Recorder(gym.Env):
    """Keeps the type of its last action in the info."""

    observation_space = gym.spaces.Box(-1, 1, (1,))
    action_space = gym.spaces.Discrete(3, start=5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        kind = float(type(action) is int) + 10 * action
        return np.zeros(1, np.float32), kind, False, False, {}


def test_a_discrete_action_reaches_an_environment_as_an_integer_of_python():
    env = make_vec(Recorder, 2)
    env.reset(seed=0)
    assert env.step(np.array([0, 2]))[1].tolist() == [51.0, 71.0]
    env.close()


def test_bfloat16_actions_of_a_policy_in_mixed_precision_reach_the_environment():
    torch = pytest.importorskip("torch")
    border = ActionBorder(gym.spaces.Box(-1, 1, (2,), np.float32), 2)
    actions = torch.tensor([[0.5, -0.25], [1.0, 0.0]], dtype=torch.bfloat16)
    assert border.convert(actions).tolist() == actions.tolist()
