"""The remote environment, one step at a time: clients come, go, die, return, and are checked."""

import contextlib
import importlib
import re
import socket
import sys
import threading

import gymnasium as gym
import numpy as np
import pytest

from plugrl_protocol import (
    Backoff,
    ConnectionReplaced,
    EnvClient,
    Feedback,
    HandshakeError,
    Infer,
    ObservationRefusedError,
    ServerStopped,
    make_observation,
)
from rlightning.buffer.replay_buffer import ReplayBuffer
from rlightning.build import check_config
from rlightning.cli import main as rlightning_command
from rlightning.config import BufferConfig, EnvConfig, MainConfig
from rlightning.env import EnvGroup, remote_hub
from rlightning.env.remote_env import RemoteEnv, RemoteEnvClient
from rlightning.errors import ConfigError, ContractError, EnvWorkerError, StopRequested
from rlightning.runtime import StopSignal
from rlightning.types import PolicyResponse

LIMIT_S = 20
SPACE = "{low: -1.0, high: 1.0, shape: [1]}"


def section(**keys):
    return EnvConfig.from_dict(
        {
            "name": "far", "backend": "env_server", "task": "none", "port": 0,
            "action_space": {"low": -1.0, "high": 1.0, "shape": [1]},
            "observation": {"states": {"obs": 1}}, "start_timeout_s": LIMIT_S, **keys,
        }
    )  # fmt: skip


@contextlib.contextmanager
def listening(**keys):
    env = RemoteEnv(section(**keys))
    env.init()
    try:
        yield env
    finally:
        env.close()


class Counter:
    """A client of some environments that show how often they acted; driven by the test.

    An environment's episode lasts `length` steps and is worth 1 a step.
    """

    def __init__(self, env, rows=1, *, length=3, start=0.0, **options):
        self.wire = EnvClient(
            f"ws://127.0.0.1:{env.port}", backoff=Backoff(first_s=0.01, limit_s=LIMIT_S), **options
        )
        self.rows, self.length = np.arange(rows), length
        self.now = start + 100.0 * np.arange(rows)
        self.steps = np.zeros(rows, np.int64)
        self.step_ids = np.zeros(rows, np.int64)
        self.actions = []

    def shown(self, rows, values):
        states = {"obs": values[rows, None].astype(np.float32)}
        return make_observation(num_envs=len(rows), states=states)

    def ask(self, rows=None):
        rows = self.rows if rows is None else rows
        request = Infer(env_indices=rows, step_ids=self.step_ids[rows],
                        observation=self.shown(rows, self.now))  # fmt: skip
        action = self.wire.infer(request, timeout_s=LIMIT_S).action
        self.actions.append(action)
        return action

    def act(self, rows=None, steps=1, reward=None, **info):
        """Take some steps of some environments and report them."""
        rows = self.rows if rows is None else rows
        self.now[rows] += steps
        self.steps[rows] += steps
        self.step_ids[rows] += 1
        over = self.steps[rows] >= self.length
        report = Feedback(
            env_indices=rows, step_ids=self.step_ids[rows] - 1,
            observation=self.shown(rows, self.now),
            rewards=np.full(len(rows), steps if reward is None else reward, np.float32),
            terminated=over,
            truncated=np.zeros(len(rows), bool), steps=np.full(len(rows), steps), info=info,
        )  # fmt: skip
        ended = rows[over]
        self.steps[ended] = self.step_ids[ended] = 0
        self.now[ended] += 0.5
        self.wire.feedback(report)

    def die(self):
        """Take an action and never say what came of it."""
        self.ask()
        self.wire.close()

    def play(self):
        """Ask and act until the run is finished."""
        while True:
            self.ask()
            self.act()


@contextlib.contextmanager
def together(*calls):
    """Run calls in threads beside the block; what they raise, fails the test."""
    errors = []

    def guarded(call):
        try:
            with contextlib.suppress(ServerStopped):
                call()
        except Exception as error:  # noqa: BLE001  # looked at below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    assert not errors


def in_background(call):
    """Run a client until the trainer says that its run is finished."""

    def guarded():
        with contextlib.suppress(ServerStopped, ConnectionReplaced):
            call()

    threading.Thread(target=guarded, daemon=True).start()


def respond(env, value=0.5):
    shape = (1,) if env.num_envs == 1 else (env.num_envs, 1)
    return PolicyResponse(env.env_id, action=np.full(shape, value, np.float32))


def step_for_ever(env):
    while True:
        env._step(respond(env))


def column(values):
    return np.asarray(values).reshape(-1).tolist()


def test_one_environment_of_one_client_is_a_row_without_an_axis():
    with listening() as env:
        client = Counter(env)

        def dial():
            for _ in range(4):
                client.ask()
                client.act()

        with together(dial):
            first = env._reset()
            assert first.observation.shape == (1,)
            seen = [env._step(respond(env, 3.0)) for _ in range(3)]
            env.close()
    assert column(first.observation) == [0.0]
    assert [column(row.observation) for row in seen] == [[1.0], [2.0], [3.5]]
    assert [float(row.last_reward) for row in seen] == [1.0, 1.0, 1.0]
    assert [bool(row.last_terminated) for row in seen] == [False, False, True]
    assert column(seen[2].info["final_obs"]) == [3.0]
    assert bool(seen[2].info["_final_obs"])
    assert [column(action) for action in client.actions] == [[1.0]] * 3, "clipped at the border"
    assert env.get_env_stats()["episode_return"] == [3.0, 1]
    assert env.get_env_stats()["episode_length"] == [3.0, 1]


def test_several_clients_of_several_environments_make_up_the_rows():
    with listening(num_envs=3) as env:
        one, two = Counter(env, 1, start=1000.0), Counter(env, 2)
        with together(one.play, two.play):
            first = env._reset()
            assert sorted(column(first.observation)) == [0.0, 100.0, 1000.0]
            second = env._step(respond(env))
            assert column(second.observation - first.observation) == [1.0, 1.0, 1.0]
            assert "_idle" not in second.info
            env.close()


def test_a_start_without_enough_clients_says_so():
    with (
        listening(num_envs=2, start_timeout_s=0.3) as env,
        pytest.raises(EnvWorkerError, match=r"2 of 2 rows.*start more clients .*lower num_envs"),
    ):
        env.reset()


@pytest.mark.parametrize(
    ("missing", "overrides"),
    [
        ("clients in 2 of 2 rows", []),
        ("the first client", ["env.task=none", f"+env.action_space={SPACE}"]),
    ],
)
def test_a_command_to_which_no_client_comes_says_what_it_waits_for_and_ends_without_a_traceback(
    missing, overrides, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(remote_hub, "_FIRST_WORD_S", 0.1)
    with pytest.raises(SystemExit) as end:
        rlightning_command(
            ["train", "pendulum_ppo", "env.backend=env_server", "env.port=0", "env.num_envs=2",
             "env.start_timeout_s=1.2", f"log.log_dir={tmp_path}", *overrides]
        )  # fmt: skip
    assert end.value.code == 2
    (log,) = tmp_path.glob("*/*/run.log")
    words = [line for line in log.read_text().splitlines() if "waiting at" in line]
    assert len(words) == 1, log.read_text()  # the next one comes after a minute
    which = "YOUR_ENVIRONMENT" if overrides else "gym-v1 --env.name Pendulum-v1"
    command = f"plugrl-run-env-client {which} --num-envs 2 --server-host 127.0.0.1 --server-port "
    assert re.search(f"for {missing}, .*{re.escape(command)}", words[0])
    said = capsys.readouterr().err
    (line,) = [line for line in said.splitlines() if line.startswith("error: ")]
    assert re.search(f"{re.escape(command)}.*start_timeout_s", line)
    assert "Traceback" not in said
    assert RemoteEnv._hubs == {}  # nothing listens on


def test_the_rows_of_a_lost_client_are_idle_and_its_episode_is_dropped_until_another_comes():
    with listening(num_envs=2) as env:
        stays, dies = Counter(env, start=1000.0, length=50), Counter(env, length=50)
        with together(stays.play):
            with together(dies.die):
                env._reset()
                env._step(respond(env))  # the other one never reports
            for _ in range(3):
                env_ret = env._step(respond(env))
            gone = int(np.flatnonzero(env_ret.info["_idle"])[0])
            assert float(env_ret.last_reward[gone]) == 0.0
            assert float(env_ret.last_reward[1 - gone]) == 1.0
            assert env.get_env_stats(reset=True)["lost_episodes"] == [1.0, 1.0]
            returns = Counter(env, start=77.0, length=50)
            with together(returns.play):
                while "_lost" not in (env_ret := env._step(respond(env))).info:
                    pass
                assert env_ret.info["_lost"].tolist() == [row == gone for row in range(2)]
                assert column(env_ret.observation[gone]) == [77.0]
                assert float(env_ret.last_reward[gone]) == 0.0
                env_ret = env._step(respond(env))
                assert column(env_ret.observation[gone]) == [78.0]
                assert float(env_ret.last_reward[gone]) == 1.0
                env.close()


def test_a_client_that_is_lost_after_an_episodes_end_loses_nothing():
    with listening() as env:
        client = Counter(env, length=1)

        def one_episode():
            client.ask()
            client.act()
            client.wire.close()

        other = Counter(env, start=9.0, length=50)
        with together(one_episode):
            env._reset()
            threading.Timer(0.3, in_background, [other.play]).start()
            env_ret = env._step(respond(env))
            assert bool(env_ret.last_terminated)
            assert column(env_ret.info["final_obs"]) == [1.0]
            assert column(env_ret.observation) == [9.0]
            assert "_lost" not in env_ret.info


def test_a_row_that_nobody_takes_ends_the_run_with_its_name():
    with listening(num_envs=2, row_timeout_s=0.4) as env:
        stays, dies = Counter(env, length=50), Counter(env, length=50)
        with together(stays.play):
            with together(dies.die):
                env._reset()
                env._step(respond(env))
            with pytest.raises(EnvWorkerError, match=r"1 of 2 .* raise row_timeout_s. --resume"):
                step_for_ever(env)
            env.close()


def test_a_client_that_takes_too_long_loses_its_row():
    with listening(feedback_timeout_s=0.3, row_timeout_s=0.3) as env:
        slow = Counter(env)
        with together(slow.ask):
            env._reset()
            with pytest.raises(EnvWorkerError, match="have had no client"):
                env._step(respond(env))
            with pytest.raises(ConnectionReplaced, match="Feedback timeout"):
                slow.act()


def test_rows_of_one_client_whose_chunks_end_at_different_times_advance_on_their_own():
    with listening(num_envs=2, action_horizon=2) as env:
        client = Counter(env, 2, length=3)
        zero, both = np.array([0]), np.array([0, 1])
        assert env.get_action_space().shape == (2, 1)

        def dial():
            assert client.ask(both).shape == (2, 2, 1)
            client.act(zero, steps=1)  # it planned anew after one step
            client.ask(zero)
            client.act(both, steps=2)
            client.ask(both)

        with together(dial):
            env._reset()
            action = PolicyResponse(env.env_id, action=np.zeros((2, 2, 1), np.float32))
            first = env._step(action)
            assert first.info["_idle"].tolist() == [False, True]
            assert first._extra["last_steps"].tolist() == [1, 0]
            second = env._step(action)
            assert second._extra["last_steps"].tolist() == [2, 2]
            assert second.last_reward.tolist() == [2.0, 2.0]
            assert second.last_terminated.tolist() == [True, False]
            env.close()


def test_what_a_person_did_is_stored_in_place_of_what_was_asked():
    """Of two clients one has a person, who acts in its second step."""
    keys = {"type": "ReplayBuffer", "capacity": 8, "sampler": {"type": "all"}}
    buffer = ReplayBuffer(BufferConfig.from_dict(keys), seed=0)
    with listening(num_envs=2) as env:
        robot, other = Counter(env, start=1000.0, length=50), Counter(env, length=50)

        def dial():
            robot.ask()
            robot.act()
            robot.ask()
            robot.act(executed_action=np.full((1, 1, 1), -0.25, np.float32))
            robot.play()

        with together(dial, other.play):
            env_ret = env._reset()
            buffer.init([env.get_metadata()])
            for _ in range(4):
                response = respond(env)
                buffer.add_transition(env.env_id, env_ret, response)
                env_ret = env._step(response)
            env.close()
    assert "executed_action" not in env_ret.info
    stored = buffer.sample(shuffle=False)[0]
    by_start = zip(column(stored["observation"]), column(stored["action"]), strict=True)
    asked = {(seen, 0.5) for seen in (0.0, 1.0, 2.0, 1000.0, 1002.0)}
    assert set(by_start) == asked | {(1001.0, -0.25)}


@pytest.mark.parametrize(
    ("space", "wrong"),
    [
        ({"low": -1.0, "high": 1.0, "shape": [1]}, np.zeros((1, 1, 2), np.float32)),
        ({"low": -1.0, "high": 1.0, "shape": [1]}, np.full((1, 1, 1), np.nan, np.float32)),
        ({"low": -1.0, "high": 1.0, "shape": [1]}, np.zeros(1, np.float32)),
        ({"low": -1.0, "high": 1.0, "shape": [1]}, ["left"]),
        ({"n": 2}, np.full((1, 1), 7)),
    ],
    ids=["shape", "NaN", "axes", "text", "range"],
)
def test_an_executed_action_that_is_none_loses_the_client_and_not_the_run(space, wrong):
    with listening(action_space=space) as env:
        action = 0 if "n" in space else np.zeros(1, np.float32)
        bad, good = Counter(env), Counter(env, start=500.0)

        def dial():
            bad.ask()
            bad.act(executed_action=wrong)
            with pytest.raises(ObservationRefusedError, match="executed_action"):
                bad.ask()
            good.play()

        with together(dial):
            env._reset()
            env_ret = env._step(PolicyResponse(env.env_id, action=action))
            assert column(env_ret.observation) == [500.0]
            assert bool(env_ret.info["_lost"])
            env.close()


@pytest.mark.parametrize(
    ("states", "images", "named"),
    [
        ({"obs": 2}, {}, "observation obs:2, policy has obs:1"),
        ({"other": 1}, {}, "observation other:1, policy has obs:1"),
        ({"obs": 1}, {"cam": (4, 4, 3)}, "observation cam:4x4x3,obs:1, policy has obs:1"),
    ],
)
def test_a_client_that_shows_something_else_is_refused_by_both_names(states, images, named):
    with listening() as env:
        good = Counter(env)
        bad = EnvClient(f"ws://127.0.0.1:{env.port}", backoff=Backoff(limit_s=LIMIT_S))
        seen = make_observation(
            num_envs=1,
            states={name: np.zeros((1, width), np.float32) for name, width in states.items()},
            images={name: np.zeros((1, *shape), np.uint8) for name, shape in images.items()},
        )
        ids = np.zeros(1, np.int64)
        with pytest.raises(ObservationRefusedError, match=named):
            bad.infer(Infer(env_indices=ids, step_ids=ids, observation=seen), timeout_s=LIMIT_S)
        with together(good.play):
            env._reset()
            assert float(env._step(respond(env)).last_reward) == 1.0
            env.close()


@pytest.mark.parametrize("start", [np.nan, 1e30])
def test_numbers_that_cannot_be_learned_from_lose_the_client_and_not_the_run(start):
    with listening() as env:
        bad, good = Counter(env, start=start), Counter(env)
        with pytest.raises(ObservationRefusedError, match="a state that is NaN or beyond 1e\\+15"):
            bad.ask()
        with together(good.play):
            env._reset()
            assert np.isfinite(env._step(respond(env)).observation).all()
            env.close()


def test_a_reward_that_cannot_be_learned_from_loses_the_client_and_not_the_run():
    with listening() as env:
        bad, good = Counter(env), Counter(env)

        def one_after_the_other():
            bad.ask()
            bad.act(reward=1e38)
            with pytest.raises(ObservationRefusedError, match="a reward beyond 1e\\+15"):
                bad.ask()
            good.play()

        with together(one_after_the_other):
            env._reset()
            rewards = [float(env._step(respond(env)).last_reward) for _ in range(3)]
            env.close()
    assert set(rewards) <= {0.0, 1.0}


def test_more_environments_than_rows_wait_for_a_place():
    with listening() as env:
        first, second = Counter(env, length=50), Counter(env, start=500.0, length=50)
        with together(first.ask):
            assert column(env._reset().observation) == [0.0]
            with together(second.play):
                threading.Timer(0.2, first.wire.close).start()
                assert column(env._step(respond(env)).observation) == [500.0]
                env.close()


def test_what_is_observed_is_what_the_first_client_shows_where_nothing_says():
    env = RemoteEnv(section(observation=None))
    metas = []
    with together(lambda: metas.append(env.init())):
        while not env.port:
            pass
        client = Counter(env, 1)
        in_background(client.play)
    assert metas[0].observation_space == gym.spaces.Box(-np.inf, np.inf, (1,), np.float32)
    env._reset()
    env.close()


def test_a_wrong_action_names_the_space():
    with listening() as env, together(Counter(env).ask):
        env._reset()
        with pytest.raises(ContractError, match=r"shape \(2,\)"):
            env.step(PolicyResponse(env.env_id, action=np.zeros(2)))
        env.close()


def test_an_address_that_others_reach_needs_a_key():
    with pytest.raises(ConfigError, match=r"can be reached by others: set api_key"):
        RemoteEnv(section(host="0.0.0.0"))
    assert RemoteEnv(section(host="0.0.0.0", api_key="k")).options.api_key == "k"


def test_a_wrong_key_is_refused():
    with listening(api_key="secret") as env:
        with pytest.raises(HandshakeError, match="401"):
            Counter(env, api_key="guess").ask()
        right = Counter(env, api_key="secret")
        with together(right.play):
            env._reset()
            env.close()


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        env = RemoteEnv(section(port=taken.getsockname()[1]))
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{env.port}"):
            env.init()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"action_space": None}, "what acts is not known here. Set action_space"),
        ({"action_space": {"n": 2, "low": 0, "high": 1}}, "give n, or nvec, or low and high"),
        ({"action_horizon": 0}, "greater than or equal to 1"),
        ({"observation": {"states": {}}}, "needs an image or a state"),
    ],
)
def test_a_section_that_cannot_be_meant_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        RemoteEnv(section(**keys))


def test_spaces_follow_from_the_task():
    env = RemoteEnv(section(task="Pendulum-v1", action_space=None, observation=None))
    assert env.get_action_space() == gym.spaces.Box(-2.0, 2.0, (1,), np.float32)
    assert env.get_observation_space().shape == (3,)


def test_a_group_steps_it_inside_auto_reset_with_any_environment_that_dials_in():
    config = section(task="CartPole-v1", action_space=None, observation=None, num_envs=2)
    group = EnvGroup([config])
    (env,) = group.env_list
    metas = []
    with together(lambda: metas.extend(group.init())):
        while not env.port:
            pass
        for seed in range(2):
            client = RemoteEnvClient(gym.make("CartPole-v1"), "127.0.0.1", env.port, seed=seed)
            in_background(client.run)
    assert metas[0].action_space == gym.spaces.Discrete(2)
    responses = {env.env_id: PolicyResponse(env.env_id, action=np.array([0, 1]))}
    with group.auto_reset(max_episode_steps=5):
        env_rets, _ = group.reset()
        limits = []
        for _ in range(12):
            batch = type(env_rets)(list(responses), list(responses.values()))
            env_rets, reached = group.step(batch)
            limits.append(reached[0])
    assert [step for step, limit in enumerate(limits) if limit] == [4, 10]
    group.close()


def test_a_run_that_is_asked_to_stop_does_not_wait_for_clients_and_they_wait_for_it():
    with StopSignal() as stop:
        env = RemoteEnv(section(num_envs=2))
        env.init()
        client = Counter(env)
        seen = []

        def ask():
            try:
                client.ask()
            except ConnectionReplaced as lost:
                seen.append(str(lost))

        with together(ask):
            stop.request()
            with pytest.raises(StopRequested):
                env.reset()
            env.close()
    assert "Server shutdown" in seen[0]


def test_ctrl_c_during_an_evaluation_ends_clients_as_the_end_of_a_run_does():
    env = RemoteEnv(section())
    env.init()
    with together(Counter(env).play):  # anything but the end of a run fails here
        env.reset()
        with pytest.raises(KeyboardInterrupt), contextlib.closing(env):
            raise KeyboardInterrupt


def test_no_video_of_it_is_promised():
    section_of_env = {"name": "far", "backend": "env_server", "task": "CartPole-v1", "port": 0}
    config = MainConfig.from_dict(
        {
            "engine": "syncrl",
            "env": section_of_env,
            "buffer": {"type": "RolloutBuffer", "capacity": 64},
            "policy": {"type": "PPOPolicy"},
            "train": {"max_epochs": 1, "record_episodes": 1},
        }
    )
    with pytest.raises(ConfigError, match=r"train.record_episodes wants a video.*--recorder"):
        check_config(config)


def test_without_the_protocol_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "rlightning.env.remote_env")
    monkeypatch.setitem(sys.modules, "plugrl_protocol", None)
    with pytest.raises(ConfigError, match=r"pip install 'rlightning\[remote\]'"):
        importlib.import_module("rlightning.env.remote_env")
