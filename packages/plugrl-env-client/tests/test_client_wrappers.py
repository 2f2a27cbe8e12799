"""Time limits and statistics against numbers worked out by hand."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, VectorEnv

from plugrl_env_client.utils.registration import make_vec
from plugrl_env_client.utils.wrappers import (
    ActionBorderWrapper,
    TimeLimitWrapper,
    VectorEpisodeStatsWrapper,
    reset_rows,
)
from plugrl_envs import InvalidActionError


class Script(VectorEnv):
    """Plays back rewards, ends and infos, one entry per step."""

    def __init__(self, num_envs, script):
        self.metadata = {"autoreset_mode": AutoresetMode.DISABLED}
        self.num_envs = num_envs
        self.script = iter(script)
        self.resets = []

    def reset(self, *, seed=None, options=None):
        self.resets.append(options)
        return None, {}

    def step(self, actions):
        rewards, terminated, info = next(self.script)
        no = np.zeros(self.num_envs, np.bool_)
        return None, np.array(rewards, float), np.array(terminated, bool), no, info


def reset(env, rows):
    env.reset(options={"reset_indices": np.array(rows)})


def test_a_limit_truncates_each_row_at_its_own_time():
    no = [False, False]
    env = TimeLimitWrapper(Script(2, [([0, 0], no, {})] * 5), 3)
    env.reset()
    seen = []
    for step in range(5):
        if step == 1:
            reset(env, [1])
        seen.append(env.step(None)[3].tolist())
        reset(env, np.flatnonzero(seen[-1]))
    assert seen == [[False, False], [False, False], [True, False], [False, True], [False, False]]


def test_a_row_that_terminates_at_the_limit_is_not_truncated():
    env = TimeLimitWrapper(Script(1, [([0], [True], {})]), 1)
    env.reset()
    _, _, terminated, truncated, _ = env.step(None)
    assert (terminated.tolist(), truncated.tolist()) == ([True], [False])


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="expected at least 1"):
        TimeLimitWrapper(Script(1, []), 0)


def test_return_length_and_mask_are_reported_where_episodes_end():
    no = [False, False]
    env = VectorEpisodeStatsWrapper(
        Script(2, [([1, 10], no, {}), ([2, 20], [True, False], {}), ([4, 40], [False, True], {})])
    )
    env.reset()
    assert "episode" not in env.step(None)[4]
    first = env.step(None)[4]["episode"]
    assert first["mask"].tolist() == [True, False]
    assert (first["r"][0], first["l"][0]) == (3, 2)
    assert "s" not in first
    second = env.step(None)[4]["episode"]
    assert (second["r"][1], second["l"][1]) == (70, 3)


def test_success_is_read_from_the_info_and_averaged():
    ends = [True, True]
    script = [
        ([0, 0], ends, {"success": np.array([True, False])}),
        ([0, 0], ends, {"success": np.array([True, True])}),
    ]
    env = VectorEpisodeStatsWrapper(Script(2, script))
    env.reset()
    info = env.step(None)[4]
    assert info["episode"]["s"].tolist() == [True, False]
    assert info["is_step_success"].tolist() == [True, False]
    assert info["episode"]["mean_success_rate"].tolist() == [0.5, 0.5]
    assert env.step(None)[4]["episode"]["mean_success_rate"].tolist() == [0.75, 0.75]


def test_success_of_an_ended_row_is_its_own_and_not_the_next_episodes():
    """Where rows reset themselves, the info beside is the next episode's."""
    info = {
        "success": np.array([False]),
        "final_info": {"success": np.array([True]), "_success": np.array([True])},
    }
    env = VectorEpisodeStatsWrapper(Script(1, [([0], [True], info)]))
    env.reset()
    assert env.step(None)[4]["is_step_success"].tolist() == [True]


def test_success_may_be_a_reward_that_is_reached_once():
    no, ends = [False, False], [True, True]
    script = [([1, 0], no, {}), ([0, 0.5], ends, {}), ([0, 1], ends, {})]
    env = VectorEpisodeStatsWrapper(Script(2, script), best_reward_threshold_for_success=1.0)
    env.reset()
    assert env.step(None)[4]["is_step_success"].tolist() == [True, False]
    assert env.step(None)[4]["episode"]["s"].tolist() == [True, False]
    assert env.step(None)[4]["episode"]["s"].tolist() == [False, True]


def test_a_reset_forgets_the_running_episode_of_these_rows_alone():
    no = [False, False]
    env = VectorEpisodeStatsWrapper(Script(2, [([1, 1], no, {}), ([1, 1], [True, True], {})]))
    env.reset()
    env.step(None)
    reset(env, [0])
    assert env.step(None)[4]["episode"]["l"].tolist() == [1, 2]


def test_nan_actions_never_reach_an_environment():
    env = make_vec("probe-v1", 2)
    env.reset()
    with pytest.raises(InvalidActionError, match="environment 1 is not finite"):
        env.step(np.array([[0.0, 0, 0], [0, np.nan, 0]]))
    assert isinstance(env.env, ActionBorderWrapper)


def test_no_options_reset_all_rows():
    array = np.zeros(3)
    array[reset_rows(None)] = 1
    array[reset_rows({"reset_indices": [1]})] = 2
    assert array.tolist() == [1, 2, 1]
