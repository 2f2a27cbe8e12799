"""Hidden entries: what is left is observed, bounds and all; what is unknown is refused."""

import gymnasium as gym
import numpy as np
import pytest

import plugrl_envs
from plugrl_envs.errors import PlugrlEnvsError
from plugrl_envs.masking import KeepEntries, without_velocities

WRAPPER = "plugrl_envs.masking:without_velocities"


def test_cartpole_without_velocities_shows_the_cart_and_the_angle():
    whole, masked = gym.make("CartPole-v1"), without_velocities(gym.make("CartPole-v1"))
    seen, _ = masked.reset(seed=3)
    full, _ = whole.reset(seed=3)
    assert seen.tolist() == [full[0], full[2]]
    assert masked.observation_space.high.tolist() == whole.observation_space.high[[0, 2]].tolist()
    assert masked.step(1)[0].tolist() == whole.step(1)[0][[0, 2]].tolist()


def test_it_is_named_in_a_configuration_and_its_rows_can_be_saved():
    env = plugrl_envs.make_vec("Pendulum-v1", 2, vectorization="sync", wrappers=[WRAPPER])
    observation, _ = env.reset(seed=[0, 1])
    assert observation.shape == (2, 2)
    state = plugrl_envs.get_state(env)
    action = np.zeros((2, 1), dtype=np.float32)
    first = env.step(action)[0].copy()
    plugrl_envs.set_state(env, state)
    assert np.array_equal(env.step(action)[0], first)


def test_an_unknown_task_and_a_missing_entry_are_refused():
    with pytest.raises(PlugrlEnvsError, match="FrozenLake are not known; known: Acrobot"):
        without_velocities(gym.make("FrozenLake-v1"))
    with pytest.raises(PlugrlEnvsError, match="observes 4, from 0"):
        KeepEntries(gym.make("CartPole-v1"), [4])
    with pytest.raises(PlugrlEnvsError, match="only a vector has entries"):
        KeepEntries(gym.make("FrozenLake-v1"), [0])
