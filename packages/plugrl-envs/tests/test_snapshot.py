import json

import gymnasium as gym
import numpy as np
import pytest

from plugrl_envs import CanonicalVectorEnv, get_state, make_vec, set_state
from plugrl_envs.testing import CounterEnv

EXACT = {
    "CartPole-v1": {},
    "Pendulum-v1": {},
    "MountainCarContinuous-v0": {},
    "Acrobot-v1": {},
    "FrozenLake-v1": {},  # holds bytes
    "Taxi-v4": {},
    "Blackjack-v1": {},  # holds text of numpy's
    "CliffWalking-v1": {"max_episode_steps": 30},
    "CartPole-v1 native": {"vectorization": "native"},
    "Ant-v5": {"max_episode_steps": 12},
    "HalfCheetah-v5": {"max_episode_steps": 12},
    "Hopper-v5": {},
    "ALE/Breakout-v5": {"max_episode_steps": 30},
    "ALE/Pong-v5": {},
    "ALE/Pong-v5 atari": {"wrappers": ("atari",)},
    "MinAtar/Breakout-v1": {},
    "CartPole-v1 wrapped": {
        "wrappers": (
            gym.wrappers.RecordEpisodeStatistics,
            lambda env: gym.wrappers.FrameStackObservation(env, 3),
        )
    },
}


def plain(value):
    """Return whether `value` is what a checkpoint may hold: no objects, no code."""
    if isinstance(value, dict):
        return all(type(key) is str and plain(part) for key, part in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    if isinstance(value, np.ndarray):
        return value.dtype.isnative and value.dtype.kind in "biufc" and value.dtype.itemsize <= 16
    return value is None or type(value) in (bool, int, float, str)


def follow(env, actions):
    return [env.step(action)[:4] for action in actions]


@pytest.mark.parametrize("name", EXACT)
def test_episodes_continue_bit_for_bit(name):
    """Over several resets, in the same environment and in one made anew."""
    first = make_vec(name.split()[0], 2, **EXACT[name])
    first.reset(seed=7)
    actions = [first.action_space.sample() for _ in range(75)]
    follow(first, actions[:25])
    state = get_state(first)
    assert plain(state)
    expected = follow(first, actions[25:])
    other = make_vec(name.split()[0], 2, **EXACT[name])
    other.reset(seed=99)
    follow(other, actions[:3])
    for env in (first, other):
        set_state(env, state)
        for left, right in zip(expected, follow(env, actions[25:]), strict=True):
            for one, two in zip(left, right, strict=True):
                assert np.array_equal(one, two)
    first.close()
    other.close()


def test_a_state_is_not_changed_by_what_happens_later():
    env = make_vec("Pendulum-v1", 1)
    env.reset(seed=0)
    state = get_state(env)
    dump = json.dumps(state, default=np.ndarray.tolist)
    follow(env, [np.ones((1, 1))] * 5)
    assert json.dumps(state, default=np.ndarray.tolist) == dump


@pytest.mark.parametrize("env_id", ["LunarLander-v3", "gym_pusht/PushT-v0"])
def test_a_simulator_that_cannot_be_captured_gives_none(env_id):
    pytest.importorskip("gym_pusht")
    env = make_vec(env_id, 1)
    env.reset(seed=0)
    assert get_state(env) is None
    env.close()


def test_an_unknown_kind_of_attribute_gives_none():
    class WithSocket(CounterEnv):
        def __init__(self):
            super().__init__()
            self.connection = object()

    env = make_vec(WithSocket, 2)
    env.reset(seed=0)
    assert get_state(env) is None


@pytest.mark.parametrize(
    "value",
    [
        np.array([[b"SF", b"H"]]),
        np.array(["ä", "xyz"]),
        np.array("text"),
        np.str_("hearts"),
        np.bytes_(b"S"),
        np.array(["2026-01-02"], dtype="datetime64[D]"),
        np.arange(3, dtype=">f4"),
        np.arange(3, dtype=np.longdouble),
        np.zeros((0, 2), dtype="S3"),
    ],
    ids=lambda value: value.dtype.str,
)
def test_arrays_of_any_dtype_come_back(value):
    class Holding(CounterEnv):
        def __init__(self):
            super().__init__()
            self.held = value
            self.again = self.held

    env = make_vec(Holding, 1)
    env.reset(seed=0)
    state = get_state(env)
    assert plain(state)
    base = env.call("unwrapped")[0]
    base.held = base.again = None
    set_state(env, state)
    assert type(base.held) is type(value)
    assert base.held.dtype == value.dtype
    assert base.held.shape == value.shape
    assert np.array_equal(base.held, value)
    if isinstance(value, np.ndarray):
        assert base.held is base.again


def test_a_record_array_gives_none():
    class Records(CounterEnv):
        def __init__(self):
            super().__init__()
            self.held = np.zeros(2, dtype=[("x", "f4"), ("y", "i4")])

    env = make_vec(Records, 1)
    env.reset(seed=0)
    assert get_state(env) is None


def test_two_names_of_one_array_stay_one_array():
    class Aliased(CounterEnv):
        def __init__(self):
            super().__init__()
            self.one = np.zeros(2)
            self.two = self.one

    env = make_vec(Aliased, 1)
    env.reset(seed=0)
    set_state(env, get_state(env))
    base = env.call("unwrapped")[0]
    base.one[0] = 5
    assert base.two[0] == 5


def test_random_actions_continue_too():
    env = make_vec("Pendulum-v1", 1)
    env.reset(seed=0)
    single = env.env.envs[0].action_space
    single.seed(3)
    state = get_state(env)
    expected = single.sample()
    set_state(env, state)
    assert np.array_equal(single.sample(), expected)


def test_a_state_of_another_shape_is_refused():
    env, other = make_vec(CounterEnv, 2), make_vec(CounterEnv, 3)
    env.reset(seed=0)
    other.reset(seed=0)
    with pytest.raises(ValueError, match="for 2 rows; the environment has 3"):
        set_state(other, get_state(env))
    wrapped = make_vec(CounterEnv, 2, max_episode_steps=5)
    with pytest.raises(ValueError, match="0 wrappers; this one has 1"):
        set_state(wrapped, get_state(env))


def test_gymnasiums_own_worker_processes_give_none():
    env = CanonicalVectorEnv(gym.vector.AsyncVectorEnv([CounterEnv]))
    assert get_state(env) is None
    env.close()
