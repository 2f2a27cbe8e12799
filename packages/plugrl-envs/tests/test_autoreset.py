import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from plugrl_envs import AutoresetError, CanonicalVectorEnv, WorkerOptions, make_vec
from plugrl_envs.autoreset import same_step
from plugrl_envs.testing import CounterEnv, NativeCounterEnv, SelfResettingEnv, SpaceEnv

NUM_ENVS, STEPS = 3, 1000
MODES = list(AutoresetMode)


def transitions(env, steps=STEPS):
    """Return the set of (s, a, r, term, trunc, s') that a learner would be given."""
    observation, _ = env.reset(seed=0)
    found = []
    for step in range(steps):
        actions = (np.arange(env.num_envs) + step) % 10
        following, reward, terminated, truncated, info = env.step(actions)
        ended = terminated | truncated
        assert ("final_obs" in info) == ended.any() == ("_final_obs" in info)
        successor = following.copy()
        if ended.any():
            assert np.array_equal(info["_final_obs"], ended)
            assert info["final_obs"].shape == following.shape
            successor[ended] = info["final_obs"][ended]
        found.extend(
            (
                row,
                *observation[row],
                actions[row],
                reward[row],
                terminated[row],
                truncated[row],
                *successor[row],
            )
            for row in range(env.num_envs)
        )
        observation = following
    return found


@pytest.fixture(scope="module")
def expected():
    """The naive twin: single environments, stepped and reset by hand."""
    found = []
    envs = [CounterEnv() for _ in range(NUM_ENVS)]
    observations = [env.reset()[0] for env in envs]
    for step in range(STEPS):
        for row, env in enumerate(envs):
            action = (row + step) % 10
            following, reward, terminated, truncated, _ = env.step(action)
            found.append(
                (row, *observations[row], action, reward, terminated, truncated, *following)
            )
            observations[row] = env.reset()[0] if terminated or truncated else following
    return found


@pytest.mark.parametrize("mode", MODES)
def test_sync_vector_env_in_every_mode_gives_the_same_transitions(mode, expected):
    env = CanonicalVectorEnv(SyncVectorEnv([CounterEnv] * NUM_ENVS, autoreset_mode=mode))
    assert transitions(env) == expected


@pytest.mark.parametrize("mode", MODES)
def test_async_vector_env_in_every_mode_gives_the_same_transitions(mode, expected):
    env = CanonicalVectorEnv(AsyncVectorEnv([CounterEnv] * NUM_ENVS, autoreset_mode=mode))
    assert transitions(env, 100) == expected[: 100 * NUM_ENVS]
    env.close()


@pytest.mark.parametrize("mode", MODES)
def test_a_native_vector_env_in_every_mode_gives_the_same_transitions(mode, expected):
    env = CanonicalVectorEnv(NativeCounterEnv(NUM_ENVS, mode, reset_mask=True))
    assert transitions(env) == expected


def test_our_rows_in_this_process_give_the_same_transitions(expected):
    assert transitions(make_vec(CounterEnv, NUM_ENVS)) == expected


def test_our_rows_in_worker_processes_give_the_same_transitions(expected):
    env = make_vec(CounterEnv, NUM_ENVS, vectorization="async")
    assert transitions(env, 300) == expected[: 300 * NUM_ENVS]
    env.close()


def test_one_native_row_without_partial_reset_takes_the_dummy_step_inside(expected):
    env = CanonicalVectorEnv(NativeCounterEnv(1, AutoresetMode.NEXT_STEP))
    assert transitions(env) == [row for row in expected if row[0] == 0]


def test_an_env_that_declares_no_autoreset_mode_is_refused():
    with pytest.raises(AutoresetError, match="declares the autoreset mode None"):
        CanonicalVectorEnv(NativeCounterEnv(2, None))


def test_next_step_rows_that_cannot_be_reset_alone_are_refused():
    with pytest.raises(AutoresetError, match="cannot reset single rows"):
        CanonicalVectorEnv(NativeCounterEnv(2, AutoresetMode.NEXT_STEP))


def test_same_step_without_final_observations_is_refused_when_it_shows():
    vec_env = NativeCounterEnv(2, AutoresetMode.DISABLED)
    vec_env.metadata["autoreset_mode"] = AutoresetMode.SAME_STEP
    step = same_step(vec_env)
    vec_env.reset()
    for _ in range(2):
        step(np.zeros(2, dtype=np.int64))
    with pytest.raises(AutoresetError, match="has no 'final_obs'"):
        step(np.zeros(2, dtype=np.int64))


@pytest.mark.parametrize("mode", MODES)
def test_nested_observations_have_dense_final_observations(mode):
    space = gym.spaces.Dict(
        {
            "image": gym.spaces.Box(0, 255, (4, 4, 3), np.uint8),
            "joint": gym.spaces.Tuple(
                (gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3, start=1))
            ),
        }
    )

    def make():
        return SpaceEnv(gym.spaces.Discrete(2), space)

    ours = make_vec(make, 2)
    theirs = CanonicalVectorEnv(SyncVectorEnv([make] * 2, autoreset_mode=mode))
    seeds = [3, 4]
    ours.reset(seed=seeds)
    theirs.reset(seed=seeds)
    for _ in range(9):
        mine, other = ours.step(np.zeros(2, int)), theirs.step(np.zeros(2, int))
        pairs = [(mine[0], other[0])]
        assert ("final_obs" in mine[4]) == ("final_obs" in other[4])
        if "final_obs" in mine[4]:
            pairs.append((mine[4]["final_obs"], other[4]["final_obs"]))
        for left, right in pairs:
            assert left["image"].dtype == np.uint8
            assert np.array_equal(left["image"], right["image"])
            assert np.array_equal(left["joint"][0], right["joint"][0])
            assert np.array_equal(left["joint"][1], right["joint"][1])


@pytest.mark.parametrize("vectorization", ["sync", "native"])
def test_cartpole_is_truncated_at_its_limit_whoever_steps_it(vectorization):
    """Native CartPole: balance by a controller until the limit of 20 steps cuts every row."""
    env = make_vec("CartPole-v1", 4, vectorization=vectorization, max_episode_steps=20)
    observation, _ = env.reset(seed=1)
    for step in range(1, 61):
        action = (observation[:, 2] + observation[:, 3] > 0).astype(int)
        observation, reward, terminated, truncated, info = env.step(action)
        assert not terminated.any()
        assert truncated.all() == (step % 20 == 0) == truncated.any()
        assert (reward == 1).all()
        if step % 20 == 0:
            assert (np.abs(observation) <= 0.05).all(), "the next episode's first observation"
            assert np.abs(info["final_obs"]).max() > 0.05


def test_native_cartpole_steps_its_live_rows_exactly_like_single_environments():
    """While some rows end and restart, every other row moves by one exact step of the physics."""
    env = make_vec("CartPole-v1", 5, vectorization="native")
    single = gym.make("CartPole-v1").unwrapped
    rng = np.random.default_rng(0)
    observation, _ = env.reset(seed=3)
    state = env.env.state.T.copy()
    ends = 0
    for _ in range(200):
        actions = rng.integers(0, 2, 5)
        observation, reward, terminated, _, info = env.step(actions)
        ends += terminated.sum()
        for row in range(5):
            single.reset()
            single.state = tuple(state[row])
            predicted, _, ended, _, _ = single.step(int(actions[row]))
            assert ended == terminated[row]
            successor = info["final_obs"][row] if ended else observation[row]
            np.testing.assert_allclose(successor, predicted, rtol=1e-5, atol=1e-6)
        assert (reward == 1).all()
        state = env.env.state.T.copy()
    assert ends > 5


def test_an_env_that_resets_itself_in_step_is_warned_about():
    env = make_vec(SelfResettingEnv, 1)
    env.reset(seed=0)
    for _ in range(2):
        env.step(np.zeros(1, int))
    with pytest.warns(RuntimeWarning, match="resets itself inside step"):
        env.step(np.zeros(1, int))
    for _ in range(8):
        env.step(np.zeros(1, int))  # once is enough


def test_resetting_twice_by_hand_is_no_mistake():
    env = make_vec(CounterEnv, 2)
    env.reset(seed=0)
    env.reset()
    for _ in range(10):
        env.step(np.zeros(2, int))


def test_rows_can_be_reset_by_mask():
    env = make_vec(CounterEnv, 3)
    env.reset(seed=0)
    env.step(np.zeros(3, int))
    observation, _ = env.reset(options={"reset_mask": np.array([False, True, False])})
    assert observation.tolist() == [[0, 1], [1, 0], [0, 1]]
    with pytest.raises(ValueError, match="expected a bool array"):
        env.reset(options={"reset_mask": np.array([0, 1, 0])})


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_the_options_of_a_reset_hold_for_the_episodes_after_it(vectorization):
    """So that an evaluation on the test set stays there when its first episodes end."""

    class Tasks(CounterEnv):
        def reset(self, *, seed=None, options=None):
            observation, _ = super().reset(seed=seed)
            return observation, {"task": (options or {}).get("obj_set", "none")}

    env = make_vec(
        Tasks, 2, vectorization=vectorization, workers=WorkerOptions(start_method="fork")
    )
    env.reset(seed=0)
    _, info = env.reset(options={"obj_set": "test"})
    assert info["task"].tolist() == ["test"] * 2
    infos = [env.step(np.zeros(2, int))[4] for _ in range(5)]
    assert infos[4]["task"].tolist() == ["test"] * 2
    env.reset()
    infos = [env.step(np.zeros(2, int))[4] for _ in range(5)]
    assert infos[4]["task"].tolist() == ["none"] * 2
    env.close()
