"""An environment that does not return what Gymnasium's contract says is told so, by its row."""

import functools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from plugrl_envs import EnvWorkerError, make_vec

BOX = spaces.Box(-1, 1, (4,), np.float32)


class Told(gym.Env):
    """Returns what it is told to."""

    def __init__(self, on_reset=None, on_step=None, space=BOX):
        self.observation_space, self.action_space = space, spaces.Discrete(2)
        self.on_reset, self.on_step = on_reset, on_step

    def reset(self, *, seed=None, options=None):
        if self.on_reset is not None:
            return self.on_reset[0]
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.on_step


def stepped(found):
    env = make_vec(functools.partial(Told, on_step=found), 2, max_episode_steps=5)
    env.reset(seed=0)
    return env.step([0, 1])


def step(position=None, value=None):
    right = [np.zeros(4, np.float32), 1.0, False, False, {}]
    if position is not None:
        right[position] = value
    return tuple(right)


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (np.zeros(4), r"Told.reset\(\) returned float64 of shape \(4,\); expected the two values"),
        ((np.zeros(4), {}, {}), r"returned 3 values \(ndarray, dict, dict\)"),
        ((np.zeros(3), {}), r"is float64 of shape \(3,\); its space has the shape \(4,\)"),
        ((np.zeros((1, 4)), {}), r"is float64 of shape \(1, 4\); its space"),
        (([[0, 0], [0]], {}), "is list .*; its space has the shape"),
        ((np.zeros(4), None), r"the info of Told.reset\(\) is NoneType None; expected a map"),
    ],
)
def test_a_reset_that_breaks_the_contract_is_named(found, complaint):
    env = make_vec(functools.partial(Told, [found]), 2)
    with pytest.raises(EnvWorkerError, match=f"environment 0 failed during reset: .*{complaint}"):
        env.reset(seed=0)


def test_a_row_in_a_process_of_its_own_says_the_same():
    def made_there():  # a worker cannot import this file
        env = gym.make("CartPole-v1").unwrapped
        env.reset = lambda **_: np.zeros(4)
        return env

    env = make_vec(made_there, 1, vectorization="async")
    with pytest.raises(EnvWorkerError, match=r"during reset: \w+.reset\(\) returned float64"):
        env.reset(seed=0)


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (None, r"Told.step\(\) returned NoneType None; expected the five values"),
        (step()[:4], r"returned 4 values .*; expected the five values .*terminated where the task"),
        (step(0, np.zeros((4, 1))), r"is float64 of shape \(4, 1\); its space has .* \(4,\)"),
        (step(1, None), r"the reward of Told.step\(\) is NoneType None; expected a number"),
        (step(1, np.ones((2, 2))), r"is float64 of shape \(2, 2\); expected a number"),
        (step(1, "much"), "is str 'much'; expected a number"),
        (step(2, None), "terminated of .* is NoneType None; expected a bool"),
        (step(3, np.zeros(1, bool)), r"truncated of .* is bool of shape \(1,\); expected a bool"),
        (step(4, []), "the info of .* is list"),
    ],
)
def test_a_step_that_breaks_the_contract_is_named(found, complaint):
    with pytest.raises(EnvWorkerError, match=complaint):
        stepped(found)


def test_numbers_and_flags_may_be_numpys():
    _, rewards, terminated, truncated, _ = stepped((np.zeros(4), np.ones(1), np.bool_(True), 0, {}))
    assert (rewards.tolist(), terminated.tolist(), truncated.tolist()) == (
        [1.0, 1.0], [True, True], [False, False],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("space", "found", "complaint"),
    [
        (spaces.Dict(a=BOX), {"b": np.zeros(4)}, r"its space has the keys \['a'\]"),
        (spaces.Dict(a=BOX), {"a": np.zeros(2)}, r"'a' in the observation .* shape \(2,\)"),
        (spaces.Tuple([BOX, BOX]), (np.zeros(4),), "1 values .*; its space has 2 parts"),
        (spaces.Tuple([BOX]), (np.zeros(2),), r"part 0 of the observation .* shape \(2,\)"),
    ],
)
def test_parts_of_observations_are_looked_at(space, found, complaint):
    env = make_vec(functools.partial(Told, [(found, {})], space=space), 1)
    with pytest.raises(EnvWorkerError, match=complaint):
        env.reset()


IMAGE = spaces.Box(0, 255, (2, 2), np.uint8)


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (IMAGE, np.full((2, 2), 0.5)),
        (IMAGE, np.full((2, 2), 300)),
        (IMAGE, np.full((2, 2), np.nan)),
        (spaces.Discrete(3), 1.5),
        (spaces.MultiBinary(2), np.array([0.2, 1.0])),
    ],
)
def test_values_that_the_dtype_of_the_space_would_change_are_refused(space, value):
    env = make_vec(functools.partial(Told, [(value, {})], space=space), 1)
    with pytest.raises(EnvWorkerError, match="where its values would be others"):
        env.reset()


@pytest.mark.parametrize(
    ("space", "value"),
    [(IMAGE, np.full((2, 2), 7.0)), (IMAGE, [[1, 2], [3, 255]]), (spaces.Discrete(3), np.int8(2))],
)
def test_whole_numbers_of_another_dtype_are_taken(space, value):
    env = make_vec(functools.partial(Told, [(value, {})], space=space), 1)
    assert np.array_equal(env.reset()[0][0], value)


def test_later_steps_are_the_environments_own():
    env = make_vec(functools.partial(Told, on_step=step()), 1)
    env.reset()
    env.step([0])
    base = env.env.envs[0].unwrapped
    assert base.step.__func__ is Told.step
