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


class Later(Told):
    """Returns what it is told to from the third step on."""

    steps = 0

    def step(self, action):
        self.steps += 1
        return self.on_step if self.steps > 2 else step()


LATER = [
    (step(0, np.zeros((1, 4))), r"observation of Later.step\(\) is float64 of shape \(1, 4\); its"),
    (step(0, 1.0), r"is float 1.0; its space has the shape \(4,\)"),
    (step(1, "1.5"), r"the reward of Later.step\(\) is str '1.5'; expected a number"),
    (step(1, None), r"the reward of Later.step\(\) is NoneType None; expected a number"),
    (step(2, None), r"terminated of Later.step\(\) is NoneType None; expected a bool"),
    (step(4, None), r"the info of Later.step\(\) is NoneType None; expected a map"),
    (step()[:4], r"Later.step\(\) returned 4 values .*; expected the five"),
]


@pytest.mark.parametrize("vectorization", ["sync", "async"])
@pytest.mark.parametrize(("found", "complaint"), LATER, ids=[str(n) for n in range(len(LATER))])
def test_a_later_step_that_breaks_the_contract_is_named_too(found, complaint, vectorization):
    right = step()

    def made_there():  # a worker cannot import this file
        env = gym.make("CartPole-v1").unwrapped
        env.__class__ = type("Later", (type(env),), {})
        steps = iter([right, right])
        env.step = lambda action: next(steps, found)
        return env

    make = made_there if vectorization == "async" else functools.partial(Later, on_step=found)
    env = make_vec(make, 1, vectorization=vectorization)
    env.reset(seed=0)
    for _ in range(2):
        env.step([0])
    with pytest.raises(EnvWorkerError, match=f"environment 0 failed during step: .*{complaint}"):
        env.step([0])
    env.close()


def test_a_wrapper_that_breaks_the_contract_is_named():
    class Pair(gym.ObservationWrapper):
        observation_space = spaces.Box(-1, 1, (2,), np.float32)
        shows = slice(2)

        def observation(self, observation):
            return observation[self.shows]  # one number fits only by being repeated

    step_ends = (np.zeros(4), 1.0, True, False, {})
    for on_step, call in ((step(), "step"), (step_ends, "step"), (step(), "reset")):
        env = make_vec(functools.partial(Told, on_step=on_step), 1, wrappers=[Pair])
        env.reset(seed=0)
        env.step([0])
        env.env.envs[0].shows = slice(1)
        with pytest.raises(EnvWorkerError, match=rf"of Pair.{call}\(\) is float\d\d of shape \(1,"):
            env.step([0]) if call == "step" else env.reset()


@pytest.mark.parametrize(
    ("space", "value"),
    [
        (spaces.Dict(a=BOX, b=spaces.Discrete(3)), {"a": np.ones(4), "b": 2, "more": "x"}),
        (spaces.Tuple([BOX, BOX]), (np.ones(4), [0.0, 0.5, 1.0, 0.0])),
        (spaces.Discrete(3), np.array(2)),
        (spaces.Discrete(3), np.uint8(2)),
        (BOX, [0.0, 0.5, 1.0, 0.0]),
    ],
)
def test_what_fits_is_taken_at_every_step(space, value):
    found = (value, np.ones(1, np.float32), np.bool_(False), 0, {})
    env = make_vec(functools.partial(Told, [(value, {})], found, space), 1)
    env.reset(seed=0)
    for _ in range(3):
        assert env.step([0])[1].tolist() == [1.0]


def test_later_steps_are_the_environments_own():
    env = make_vec(functools.partial(Told, on_step=step()), 1)
    env.reset()
    env.step([0])
    base = env.env.envs[0].unwrapped
    assert base.step.__func__ is Told.step
