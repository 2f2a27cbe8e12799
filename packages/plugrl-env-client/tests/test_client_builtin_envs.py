"""The two environments without a simulator: the probe and the dummy."""

import numpy as np

from plugrl_env_client.envs.dummy_env import DummyEnvConfig
from plugrl_env_client.testing import check_env
from plugrl_env_client.utils.registration import make_vec

SMALL = DummyEnvConfig(img_size=4, wrist_img_size=2, terminated_prob=0.2)


def test_the_probe_keeps_the_contract():
    check_env(make_vec("probe-v1", 5))


def test_the_probe_lasts_three_to_seven_steps_and_shows_its_actions():
    env = make_vec("probe-v1", 4)
    env.reset()
    ends = []
    for step in range(1, 8):
        obs, rewards, terminated, truncated, _ = env.step(np.full((4, 3), step))
        assert obs.states["a"].tolist() == [[step] * 3] * 4
        assert rewards.tolist() == [1] * 4
        assert not truncated.any()
        ends.append(terminated.tolist())
    assert np.array(ends).argmax(0).tolist() == [2, 4, 6, 2]
    assert obs.states["t"].dtype == np.float64
    obs, _ = env.reset(options={"reset_indices": np.array([1])})
    assert obs.states["t"].ravel().tolist() == [7, 0, 7, 7]


def test_the_dummy_keeps_the_contract():
    check_env(make_vec("dummy-v1", 3, config=SMALL))


def test_the_dummy_has_the_documented_shapes():
    env = make_vec("dummy-v1", 2)
    obs, _ = env.reset(seed=0)
    assert obs.images["img"].shape == (2, 224, 224, 3)
    assert obs.images["wrist_img"].shape == (2, 112, 112, 3)
    assert obs.states["state"].shape == (2, 10)
    assert obs.text.tolist() == ["do something"] * 2
    assert env.single_action_space.shape == (7,)
    assert env.env.max_episode_steps == 200_000


def test_the_dummy_ends_as_often_as_it_is_told():
    env = make_vec("dummy-v1", 50, config=SMALL)
    env.reset(seed=0)
    ended = sum(env.step(np.zeros((50, 7)))[2].sum() for _ in range(40))
    assert 340 < ended < 460  # 2000 steps, 0.2 each: 400 +- 18


def test_the_dummys_rows_have_seeds_of_their_own():
    one = make_vec("dummy-v1", 3, config=SMALL).reset(seed=4)[0].images["img"]
    other = make_vec("dummy-v1", 2, config=SMALL).reset(seed=5)[0].images["img"]
    assert np.array_equal(one[1:], other)
    assert not np.array_equal(one[0], one[1])
