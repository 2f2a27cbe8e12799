import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from plugrl_envs import CanonicalVectorEnv, EpisodeStatistics, make_vec
from plugrl_envs.testing import CounterEnv

NO = np.zeros(2, bool)


def limited(limit):
    class Endless(CounterEnv):
        def step(self, action):
            observation, _, _, _, info = super().step(action)
            return observation, 1.0, False, False, info

    return lambda: gym.wrappers.TimeLimit(Endless(), limit)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_a_time_limit_of_3_gives_episodes_of_3_steps_in_every_mode(mode):
    env = CanonicalVectorEnv(SyncVectorEnv([limited(3)] * 2, autoreset_mode=mode))
    statistics = EpisodeStatistics(2)
    env.reset(seed=0)
    lengths, returns = [], []
    for _ in range(30):
        _, reward, terminated, truncated, info = env.step(np.zeros(2, int))
        finished = statistics.update(reward, terminated, truncated, info)
        if finished is not None:
            lengths += finished.lengths.tolist()
            returns += finished.returns.tolist()
    assert lengths == [3] * 20
    assert returns == [3.0] * 20


def test_rows_end_at_different_times():
    statistics = EpisodeStatistics(2)
    assert statistics.update([1.0, 10.0], NO, NO, {}) is None
    finished = statistics.update([2.0, 20.0], np.array([True, False]), NO, {})
    assert (finished.rows.tolist(), finished.returns.tolist()) == ([0], [3.0])
    assert finished.lengths.tolist() == [2]
    assert finished.success is None
    finished = statistics.update([5.0, 50.0], NO, np.array([True, True]), {})
    assert finished.returns.tolist() == [5.0, 80.0]
    assert finished.lengths.tolist() == [1, 3]


LAYOUTS = {
    "final_info as arrays": {"final_info": {"is_success": np.array([True, False])}},
    "final_info as dicts": {
        "final_info": np.array([{"is_success": 1}, {"is_success": 0}], dtype=object)
    },
    "beside, with a mask": {"success": np.array([1.0, 0.0]), "_success": np.array([True, True])},
    "beside": {"is_success": np.array([[True], [False]])},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_success_is_read_from_old_and_new_layouts(layout):
    statistics = EpisodeStatistics(2, require_success=True)
    finished = statistics.update([0.0, 0.0], ~NO, NO, LAYOUTS[layout])
    assert finished.success.tolist() == [True, False]


@pytest.mark.parametrize(
    "info",
    [
        {},
        {"final_info": {"reward_run": np.zeros(2)}},
        {"success": np.array([True, True]), "_success": np.array([True, False])},
        {"final_info": np.array([{"other": 1}, None], dtype=object)},
    ],
)
def test_missing_success_is_an_error_when_it_is_required_and_never_a_zero(info):
    with pytest.raises(KeyError, match="tells no success"):
        EpisodeStatistics(2, require_success=True).update([0.0, 0.0], ~NO, NO, info)
    assert EpisodeStatistics(2).update([0.0, 0.0], ~NO, NO, info).success is None


def test_success_of_an_env_reaches_the_statistics_through_the_vector_env():
    class Task(CounterEnv):
        def step(self, action):
            *result, _ = super().step(action)
            return (*result, {"is_success": self.episode % 2 == 0})

    env = make_vec(Task, 2)
    statistics = EpisodeStatistics(2, require_success=True)
    env.reset(seed=0)
    seen = []
    for _ in range(16):
        finished = statistics.update(*env.step(np.zeros(2, int))[1:])
        if finished is not None:
            seen.append((finished.lengths.tolist(), finished.success.tolist()))
    assert seen == [([3, 3], [True, True]), ([5, 5], [False, False])] * 2


def test_state_carries_running_episodes_over():
    first, second = EpisodeStatistics(2), EpisodeStatistics(2)
    first.update([1.0, 2.0], NO, NO, {})
    second.load_state_dict(first.state_dict())
    finished = second.update([1.0, 1.0], ~NO, NO, {})
    assert finished.returns.tolist() == [2.0, 3.0]
    with pytest.raises(ValueError, match="for 2 rows; these statistics have 3"):
        EpisodeStatistics(3).load_state_dict(first.state_dict())


def test_reset_forgets_running_episodes():
    statistics = EpisodeStatistics(2)
    statistics.update([1.0, 1.0], NO, NO, {})
    statistics.reset(np.array([True, False]))
    assert statistics.update([1.0, 1.0], ~NO, NO, {}).returns.tolist() == [1.0, 2.0]
    statistics.update([1.0, 1.0], NO, NO, {})
    statistics.reset()
    assert statistics.update([1.0, 1.0], ~NO, NO, {}).lengths.tolist() == [1, 1]
