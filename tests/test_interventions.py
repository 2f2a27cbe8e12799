"""A person takes over: what the robot executed is what a learner stores, not what was asked."""

import importlib.util
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

from plugrl_protocol.testing import NotingApplication, serve_in_thread
from plugrl_server.algorithm.base_algorithm import FrameBatch, Sampled
from plugrl_server.algorithm.registration import make_algo
from plugrl_server.algorithm.sac import SACConfig
from plugrl_server.errors import ObservationError
from plugrl_server.policy.registration import make_policy
from plugrl_server.policy.sac import SACPolicyConfig
from rlightning.buffer.replay_buffer import ReplayBuffer
from rlightning.config import BufferConfig
from rlightning.errors import ContractError
from rlightning.types import BatchedData, EnvMeta, EnvRet, PolicyResponse

EXAMPLE = Path(__file__).parents[1] / "examples" / "robot_loop.py"
BOX = gym.spaces.Box(-1, 1, (2,), np.float32)


@pytest.fixture
def robot(monkeypatch):
    spec = importlib.util.spec_from_file_location("robot_loop", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "robot_loop", module)
    spec.loader.exec_module(module)
    return module


def maps(observation):
    return {"images": {}, "states": dict(observation.states), "text": np.asarray([""])}


def make_sac():
    policy = SACPolicyConfig(
        state_dim=4, state_keys=("pose",), action_dim=2, hidden_dims=(8,), device="cpu"
    )
    return make_algo("sac", make_policy("sac-policy", policy), config=SACConfig(buffer_size=500))


def frame(algorithm, request, report, info):
    """What the server makes of one report: the policy had asked for 1 and 1."""
    state = {
        "obs": algorithm.policy.prepare_observation(maps(request.observation)),
        "action": np.ones((1, 2), np.float32),
    }
    return FrameBatch(
        chains=np.zeros(1, np.int64),
        sampled=Sampled(maps(request.observation), None, lambda _: state),
        was_terminated=np.zeros(1, np.bool_),
        was_truncated=np.zeros(1, np.bool_),
        next_obs=maps(report.observation),
        rewards=report.rewards,
        steps=report.steps,
        terminated=report.terminated,
        truncated=report.truncated,
        info=info,
    )


def test_a_server_s_sac_stores_what_the_robot_executed(robot):
    """The robot's loop with a person at it, over a socket; its reports into the algorithm."""
    app = NotingApplication(act=lambda _: np.ones((1, 1, 2), np.float32))
    with serve_in_thread(app) as server:
        assert robot.main([server.url, "--episodes", "1", "--rate-hz", "0", "--person"]) == 0
        app.wait_for(lambda notes: notes.closes)
    algorithm = make_sac()
    executed = []
    for (_, request), (_, report) in zip(app.requests, app.reports, strict=True):
        algorithm.feedback_batch(frame(algorithm, request, report, report.info))
        executed.append(report.info["executed_action"][0, 0])
        if not report.info["intervened"][0, 0]:
            assert (executed[-1] == 1.0).all()
    stored = algorithm.replay._columns.read(len(algorithm.replay))["action"].numpy()
    np.testing.assert_array_equal(stored, np.stack(executed))
    assert 0 < (stored != 1.0).any(1).sum() < len(stored)


def test_executed_actions_of_another_shape_are_refused_with_both_sides_named(robot):
    app = NotingApplication(act=lambda _: np.ones((1, 1, 2), np.float32))
    with serve_in_thread(app) as server:
        assert robot.main([server.url, "--episodes", "1", "--rate-hz", "0"]) == 0
        app.wait_for(lambda notes: notes.closes)
    algorithm, (_, request), (_, report) = make_sac(), app.requests[0], app.reports[0]
    wrong = {"executed_action": np.zeros((1, 1, 7), np.float32)}
    with pytest.raises(ObservationError, match=r"float32\[1, 1, 7\], policy has actions \[1, 2\]"):
        algorithm.feedback_batch(frame(algorithm, request, report, wrong))
    assert len(algorithm.replay) == 0
    algorithm.feedback_batch(frame(algorithm, request, report, {}))
    assert algorithm.replay._columns.read(1)["action"].tolist() == [[1.0, 1.0]]


def replay(n_envs=1):
    config = BufferConfig(type="ReplayBuffer", capacity=100)
    buffer = ReplayBuffer(config, seed=0)
    buffer.init([EnvMeta("e-0", BOX, BOX, n_envs)])
    return buffer


def add(buffer, action, info, n_envs):
    zeros = np.zeros(n_envs) if n_envs > 1 else 0.0
    shape = (n_envs, 2) if n_envs > 1 else (2,)
    no = zeros.astype(bool) if n_envs > 1 else False
    env_ret = EnvRet("e-0", np.zeros(shape, np.float32), zeros, no, no, info)
    response = PolicyResponse("e-0", action=np.full(shape, action, np.float32))
    buffer.add_batched_transition(BatchedData(["e-0"], [env_ret]), BatchedData(["e-0"], [response]))


def test_a_replay_buffer_stores_what_an_environment_says_was_executed():
    """The action of a row is corrected by what came of it, as the reward is."""
    buffer = replay()
    infos = [{}, {}, {"executed_action": np.array([0.5, -0.5])}, {}]
    for step, info in enumerate(infos):
        add(buffer, step, info, 1)
    actions = buffer._ring.columns["action",].tensor[:3].tolist()
    assert actions == [[0.0, 0.0], [0.5, -0.5], [2.0, 2.0]]


def test_of_several_environments_only_those_said_are_corrected():
    buffer = replay(3)
    add(buffer, 1.0, {}, 3)
    told = {"executed_action": np.full((3, 2), -1.0), "_executed_action": np.array([0, 1, 0], bool)}
    add(buffer, 2.0, told, 3)
    stored = buffer._ring.columns["action",].tensor[:3, 0].tolist()
    assert stored == [1.0, -1.0, 1.0]


def test_an_executed_action_of_another_shape_is_refused():
    buffer = replay()
    add(buffer, 0.0, {}, 1)
    with pytest.raises(ContractError, match=r"executed_action'\] has shape \(3,\).*\(1, 2\)"):
        add(buffer, 1.0, {"executed_action": np.zeros(3)}, 1)
