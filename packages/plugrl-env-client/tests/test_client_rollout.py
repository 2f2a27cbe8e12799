"""The rollout against a naive twin, in every autoreset mode, and through every loss."""

import logging

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector import AutoresetMode

from plugrl_env_client.agent import ConnectionReplaced, ServerStopped
from plugrl_env_client.envs.base_env import BaseEnv, BaseEnvConfig, Observation
from plugrl_env_client.errors import ActionShapeError
from plugrl_env_client.runner.rollout import RolloutLoop, RolloutOptions, rollout
from plugrl_env_client.testing import NotingAgent
from plugrl_env_client.utils.registration import make_vec
from plugrl_env_client.utils.wrappers import VectorEpisodeStatsWrapper
from plugrl_protocol.errors import CLOSE_RESYNC, CLOSE_STOP

LENGTHS = [3, 5, 2, 4]


class CounterEnv(BaseEnv[BaseEnvConfig]):
    """Shows ``[episode, step]``; earns ``action + step``; odd episodes truncate, even terminate.

    Args:
        mode: how ended rows are reset; SAME_STEP resets them here.
        whole: a partial reset shows all rows, not only those that were reset.
    """

    def __init__(self, num_envs, mode=AutoresetMode.DISABLED, *, whole=False):
        super().__init__(BaseEnvConfig(), num_envs)
        self.metadata = {"autoreset_mode": mode}
        self.mode, self.whole = mode, whole
        self.single_action_space = spaces.Box(-np.inf, np.inf, (), np.float64)
        self.episode = np.full(num_envs, -1)
        self.time = np.zeros(num_envs, np.int64)
        self.stepped = []
        self.seeds = []

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        rows = (options or {}).get("reset_indices", np.arange(self.num_envs))
        assert not options or len(rows)
        self._restart(rows)
        obs = self.observe()
        return (obs if self.whole or options is None else obs.rows(rows)), {}

    def _restart(self, rows):
        self.episode[rows] += 1
        self.time[rows] = 0

    def step(self, actions):
        self.stepped.append(np.array(actions))
        self.time += 1
        ended = self.time >= np.array(LENGTHS)[np.arange(self.num_envs) % 4]
        odd = self.episode % 2 == 1
        rewards = actions + self.time
        info = {}
        obs = self.observe()
        if self.mode is AutoresetMode.SAME_STEP and ended.any():
            info = {"final_obs": obs, "_final_obs": ended}
            self._restart(np.flatnonzero(ended))
            obs = self.observe()
        return obs, rewards, ended & ~odd, ended & odd, info

    def observe(self):
        return Observation(states={"x": np.stack([self.episode, self.time], 1).astype(float)})


def counter(num_envs=4, mode=AutoresetMode.DISABLED, *, whole=False):
    return VectorEpisodeStatsWrapper(CounterEnv(num_envs, mode, whole=whole))


def act(horizon=3):
    """Actions that tell the step of the chunk and the row: 100 k + j."""

    def actions(obs, rows):
        return 100.0 * np.arange(horizon)[:, None] + rows[None]

    return actions


def naive(num_envs, episodes_per_row, use_steps):
    """What each row reports, by a loop per row: (step_id, reward, steps, state, ends)."""
    reports = {row: [] for row in range(num_envs)}
    for row in range(num_envs):
        for episode in range(episodes_per_row):
            time = chunk = 0
            while time < LENGTHS[row % 4]:
                steps, reward = 0, 0.0
                while steps < use_steps and time < LENGTHS[row % 4]:
                    time += 1
                    reward += 100 * steps + row + time
                    steps += 1
                end = time == LENGTHS[row % 4]
                odd = episode % 2 == 1
                reports[row].append(
                    (chunk, reward, steps, [episode, time], end and not odd, end and odd)
                )
                chunk += 1
    return reports


def reported(agent, num_envs):
    reports = {row: [] for row in range(num_envs)}
    for report in agent.reports:
        columns = zip(
            report["env_indices"].tolist(), report["step_ids"].tolist(),
            report["rewards"].tolist(), report["steps"].tolist(),
            report["obs"].states["x"].tolist(), report["terminated"].tolist(),
            report["truncated"].tolist(), strict=True,
        )  # fmt: skip
        for row, *rest in columns:
            reports[row].append(tuple(rest))
    return reports


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize(("horizon", "replan"), [(1, None), (3, None), (3, 2), (7, None)])
def test_every_row_reports_what_a_loop_per_row_would(mode, whole, horizon, replan):
    """Sums of rewards, steps really run, terminal observations and flags, in all three modes."""
    agent = NotingAgent(act(horizon))
    result = rollout(
        counter(mode=mode, whole=whole), agent, num_episodes=16, replan_steps=replan, num_envs=4
    )
    expected, found = naive(4, 4, replan or horizon), reported(agent, 4)
    for row in range(4):
        assert found[row][: len(expected[row])] == expected[row]
    assert result.episodes == 16


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_rows_ask_where_their_report_left_them(mode):
    agent = NotingAgent(act(2))
    rollout(counter(mode=mode), agent, num_episodes=12)
    left, chunks = {}, {}
    notes = iter(agent.reports)
    for obs, rows, step_ids in agent.requests:
        for place, row in enumerate(rows.tolist()):
            state = obs.states["x"][place].tolist()
            assert state == left.get(row, [0, 0])
            assert step_ids[place] == chunks.get(row, 0)
        report = next(notes)
        done = report["terminated"] | report["truncated"]
        for place, row in enumerate(report["env_indices"].tolist()):
            episode, time = report["obs"].states["x"][place].tolist()
            left[row] = [episode + 1, 0] if done[place] else [episode, time]
            chunks[row] = 0 if done[place] else chunks.get(row, 0) + 1


def test_only_rows_that_are_due_are_in_a_message():
    agent = NotingAgent(act(5))
    rollout(counter(), agent, num_episodes=4)
    assert agent.requests[0][1].tolist() == [0, 1, 2, 3]
    assert agent.reports[0]["env_indices"].tolist() == [2]  # the shortest episode
    assert agent.requests[1][1].tolist() == [2]


def test_statistics_travel_with_the_report_of_an_episodes_end():
    agent = NotingAgent(act(1))
    rollout(counter(2), agent, num_episodes=2)
    ends = [r for r in agent.reports if (r["terminated"] | r["truncated"]).any()]
    assert ends[0]["info"]["episode"]["r"].tolist() == [1 + 2 + 3, 0]
    assert ends[0]["info"]["episode"]["l"].tolist() == [3, 0]
    assert ends[0]["info"]["episode"]["mask"].tolist() == [True, False]
    assert agent.reports[0]["info"] == {}


def test_episodes_beyond_a_rows_share_do_not_count():
    """Row 2 is done twice before row 1 is once; each counts as often as it should."""
    agent = NotingAgent(act(1))
    result = rollout(counter(4), agent, num_episodes=4)
    counted = np.zeros(4, int)
    ended = np.zeros(4, int)
    for report in agent.reports:
        done = report["terminated"] | report["truncated"]
        if done.any():
            mask = report["info"]["episode"]["mask"]
            np.add.at(counted, report["env_indices"][mask], 1)
            np.add.at(ended, report["env_indices"][done], 1)
    assert counted.tolist() == [1, 1, 1, 1]
    assert ended[2] == 2
    assert result.episodes == len(result.returns) == 4


class LosingAgent(NotingAgent):
    """Loses its connection in the given infers and feedbacks, counted together from 0."""

    def __init__(self, act, lost, error=None):
        super().__init__(act)
        self.calls = -1
        self.lost = lost
        self.asked_before_losses = []
        self.error = error or ConnectionReplaced(CLOSE_RESYNC)

    def _maybe_lose(self):
        self.calls += 1
        if self.calls in self.lost:
            self.asked_before_losses.append(len(self.requests))
            raise self.error

    def infer(self, obs, **kwargs):
        self._maybe_lose()
        return super().infer(obs, **kwargs)

    def feedback(self, *args, **kwargs):
        self._maybe_lose()
        super().feedback(*args, **kwargs)


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("lost", [{0}, {3}, {4}, {2, 3}, {5, 6, 7}, set(range(3, 30, 4))])
def test_after_a_loss_every_row_asks_anew_and_ended_rows_begin_anew(mode, lost):
    agent = LosingAgent(act(2), lost)
    env = counter(mode=mode)
    result = rollout(env, agent, num_episodes=8)
    assert result.connections_lost == sum(call <= agent.calls for call in lost) > 0
    assert result.episodes == 8
    for obs, rows, _ in agent.requests:
        for place, row in enumerate(rows):
            assert obs.states["x"][place][1] < LENGTHS[row]  # never an episode's last
    after = [place for place in agent.asked_before_losses if place < len(agent.requests)]
    assert after
    assert [agent.requests[place][1].tolist() for place in after] == [[0, 1, 2, 3]] * len(after)


def test_a_lost_chunk_is_neither_reported_nor_counted():
    agent = LosingAgent(act(1), {1})
    rollout(counter(1), agent, num_episodes=1)
    steps = [obs.states["x"][0, 1] for obs, _, _ in agent.requests]
    assert steps == [0, 1, 2]
    assert [r["step_ids"].item() for r in agent.reports] == [1, 2]
    assert agent.reports[-1]["info"]["episode"]["l"].tolist() == [3]


@pytest.mark.parametrize("call", [0, 3])
def test_the_end_of_the_run_ends_the_rollout(call):
    agent = LosingAgent(act(), {call}, ServerStopped(CLOSE_STOP))
    result = rollout(counter(), agent, num_episodes=10**6)
    assert result.server_stopped


def test_programming_errors_are_not_retried():
    agent = LosingAgent(act(), {1}, TypeError("a bug"))
    with pytest.raises(TypeError, match="a bug"):
        rollout(counter(), agent, num_episodes=10)
    assert agent.calls == 1


def test_replanning_beyond_the_chunk_is_refused():
    with pytest.raises(ValueError, match="replan_steps is 4; the server's chunks have 3 steps"):
        rollout(counter(), NotingAgent(act(3)), num_episodes=1, replan_steps=4)


def test_a_chunk_of_another_length_than_declared_is_refused():
    options = RolloutOptions(num_episodes=1, action_horizon=2)
    with pytest.raises(ActionShapeError, match="chunk of 3 steps; 2 were declared"):
        RolloutLoop(counter(), NotingAgent(act(3)), options).run()


def test_the_number_of_rows_must_be_the_environments():
    with pytest.raises(ValueError, match="num_envs is 3, the environment has 4"):
        rollout(counter(), NotingAgent(act()), num_episodes=1, num_envs=3)


def test_the_seed_is_used_once():
    env = counter()
    rollout(env, NotingAgent(act()), num_episodes=8, seed=11)
    assert env.unwrapped.seeds[0] == 11
    assert set(env.unwrapped.seeds[1:]) == {None}


def test_a_rate_is_kept():
    options = RolloutOptions(num_episodes=4, fps=1000.0)
    result = RolloutLoop(counter(), NotingAgent(act(1)), options).run()
    timing = result.timing.as_dict()
    assert timing["total_s"] >= (timing["steps"] - 1 - timing["late_steps"]) / 1000


def test_the_timing_is_logged_while_it_runs(caplog):
    options = RolloutOptions(num_episodes=4, log_every_s=0.0)
    with caplog.at_level(logging.INFO, "plugrl_env_client"):
        RolloutLoop(counter(), NotingAgent(act(1)), options).run()
    assert len([r for r in caplog.records if "steps/s" in r.message]) > 3


@pytest.mark.parametrize("uid", ["classic-v1", "probe-v1"])
def test_registered_environments_roll_out(uid):
    env = make_vec(uid, 3, max_episode_steps=6)
    shape = env.single_action_space.shape
    agent = NotingAgent(lambda obs, rows: np.zeros((2, len(rows), *shape), np.int64))
    result = rollout(env, agent, num_episodes=6, seed=0)
    assert result.episodes == 6
    assert result.summary()["mean_return"] == np.mean(result.returns)
    env.close()
