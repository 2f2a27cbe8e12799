"""The Gymnasium families: ends, limits, seeds, frames, extras."""

from importlib.util import find_spec

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from plugrl_env_client.envs import (
    AtariEnvConfig,
    ClassicEnvConfig,
    GymEnv,
    GymEnvConfig,
    MuJoCoEnvConfig,
)
from plugrl_env_client.errors import EnvContractError
from plugrl_env_client.testing import check_env
from plugrl_env_client.utils.registration import make_vec
from plugrl_envs import MissingExtraError, UnknownEnvError


def first_states(uid, seed, num_envs=3, **options):
    env = make_vec(uid, num_envs, **options)
    states = env.reset(seed=seed)[0].states["obs"].copy()
    env.close()
    return states


NEEDS_MUJOCO = pytest.mark.skipif(find_spec("mujoco") is None, reason="the extra [mujoco]")


@pytest.mark.parametrize(
    "uid", [pytest.param("mujoco-v1", marks=NEEDS_MUJOCO), "classic-v1", "gym-v1"]
)
def test_a_family_keeps_the_contract(uid):
    env = make_vec(uid, 2, max_episode_steps=20)
    check_env(env, steps=50)
    env.close()


@NEEDS_MUJOCO
def test_a_body_shows_a_float32_state():
    env = make_vec("mujoco-v1", 2, config=MuJoCoEnvConfig(name="Hopper-v5"))
    obs, _ = env.reset(seed=0)
    assert obs.states["obs"].dtype == np.float32
    assert obs.states["obs"].shape == (2, 11)
    assert env.single_action_space.shape == (3,)
    env.close()


def test_a_game_shows_stacked_frames_with_channels_last():
    pytest.importorskip("ale_py")
    env = make_vec("atari-v1", 1, config=AtariEnvConfig(), max_episode_steps=80)
    check_env(env, steps=25)
    obs, _ = env.reset(seed=0)
    assert obs.images["image"].shape == (1, 84, 84, 4)
    env.close()


def test_the_last_observation_of_an_episode_is_kept_beside_the_next_first():
    config = ClassicEnvConfig(name="Pendulum-v1")
    env = make_vec("classic-v1", 2, config=config, max_episode_steps=2)
    env.reset(seed=0)
    env.step(np.zeros((2, 1)))
    before = env.unwrapped.vec_env.call("unwrapped")
    obs, _, terminated, truncated, info = env.step(np.zeros((2, 1)))
    assert truncated.all()
    assert not terminated.any()
    assert not np.array_equal(info["final_obs"].states["obs"], obs.states["obs"])
    assert info["_final_obs"].all()
    theta = [np.arctan2(*row[[1, 0]]) for row in obs.states["obs"]]
    assert np.allclose(theta, [np.arctan2(np.sin(e.state[0]), np.cos(e.state[0])) for e in before])
    assert info["episode"]["l"].tolist() == [2, 2]
    env.close()


def test_rows_and_seeds_give_different_starts_and_the_same_ones_again():
    starts = first_states("classic-v1", 5)
    assert len({row.tobytes() for row in starts}) == 3
    assert np.array_equal(starts, first_states("classic-v1", 5))
    assert np.array_equal(starts[1:], first_states("classic-v1", 6, num_envs=2))


@pytest.mark.parametrize("vectorization", ["async", "native"])
def test_rows_may_run_elsewhere(vectorization):
    config = GymEnvConfig(vectorization=vectorization)
    env = make_vec("gym-v1", 2, config=config, max_episode_steps=5)
    env.reset(seed=0)
    for _ in range(12):
        _, _, terminated, truncated, info = env.step(np.ones(2, np.int64))
        done = terminated | truncated
        assert ("final_obs" in info) == done.any()
    env.close()


def test_frames_are_shown_where_asked_the_last_one_included():
    pytest.importorskip("pygame")
    env = make_vec("gym-v1", 1, config=GymEnvConfig(render=True), max_episode_steps=1)
    obs, _ = env.reset(seed=0)
    assert obs.images["render"].shape == (1, 400, 600, 3)
    assert obs.states["obs"].shape == (1, 4)
    info = env.step(np.array([0]))[4]
    assert info["final_obs"].images["render"].any()
    env.close()


def test_options_of_the_environment_are_json():
    config = GymEnvConfig(name="FrozenLake-v1", kwargs='{"is_slippery": false}')
    env = make_vec("gym-v1", 1, config=config)
    obs, _ = env.reset(seed=0)
    assert obs.states["obs"].tolist() == [[1.0] + [0.0] * 15]
    obs = env.step(np.array([1]))[0]
    assert obs.states["obs"][0].argmax() == 4
    env.close()
    for text, complaint in (("{", "no JSON"), ("[1]", "no JSON object")):
        with pytest.raises(EnvContractError, match=complaint):
            make_vec("gym-v1", 1, config=GymEnvConfig(kwargs=text))


def test_single_rows_cannot_be_reset_from_outside():
    env = make_vec("gym-v1", 2)
    env.reset()
    with pytest.raises(EnvContractError, match="reset themselves"):
        env.reset(options={"reset_indices": [0]})
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    env.close()


def test_an_unknown_id_and_a_missing_extra_say_what_to_do(monkeypatch):
    with pytest.raises(UnknownEnvError, match="Did you mean CartPole-v1"):
        make_vec("gym-v1", 1, config=GymEnvConfig(name="CartPoel-v1"))
    monkeypatch.setitem(__import__("sys").modules, "mujoco", None)
    with pytest.raises(MissingExtraError, match=r"plugrl-envs\[mujoco\]"):
        make_vec("mujoco-v1", 1)


def test_one_that_could_not_be_made_can_be_closed():
    """Gymnasium 1.1 does so when it is collected, and would print what that raises."""
    for wrong in (GymEnvConfig(name="NoSuchEnv-v9"), GymEnvConfig(kwargs="{")):
        half = GymEnv.__new__(GymEnv)
        with pytest.raises(ValueError, match=r"NoSuchEnv|no JSON"):
            half.__init__(wrong)
        half.close()
