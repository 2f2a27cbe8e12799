"""The real EnvPool, where it is installed: its ends of episodes are everybody's."""

import numpy as np
import pytest

from plugrl_envs import make_vec

pytest.importorskip("envpool")
pytestmark = pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")  # its own spaces


def play(env, steps):
    env.action_space.seed(0)
    for _ in range(steps):
        observation, _, terminated, truncated, info = env.step(env.action_space.sample())
        yield observation, terminated, truncated, info


def test_an_ended_row_starts_anew_in_the_same_step_and_shows_its_last_observation():
    env = make_vec("envpool:CartPole-v1", 4)
    env.reset(seed=3)
    ends = 0
    for observation, terminated, truncated, info in play(env, 200):
        assert not truncated.any()
        if terminated.any():
            ends += terminated.sum()
            np.testing.assert_array_equal(info["_final_obs"], terminated)
            last = np.asarray(info["final_obs"])[terminated]
            assert np.all((np.abs(last[:, 0]) > 2.4) | (np.abs(last[:, 2]) > 0.2))
            assert np.all(np.abs(observation[terminated]) <= 0.051), "a first observation"
    assert ends > 10
    env.close()


def test_a_time_limit_is_a_truncation():
    env = make_vec("envpool:Pendulum-v1", 2)
    env.reset(seed=3)
    *_, (_, terminated, truncated, info) = play(env, 200)
    assert truncated.all()
    assert not terminated.any()
    assert info["_final_obs"].all()
    env.close()


def test_one_seed_gives_the_same_episodes_twice():
    first, second = make_vec("envpool:CartPole-v1", 2), make_vec("envpool:CartPole-v1", 2)
    np.testing.assert_array_equal(first.reset(seed=7)[0], second.reset(seed=7)[0])
    for one, other in zip(play(first, 50), play(second, 50), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
    first.close()
    second.close()
