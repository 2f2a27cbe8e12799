"""The fakes do what they say, because others trust them."""

import numpy as np
import pytest

from plugrl_protocol.messages import Feedback, Infer, make_observation
from plugrl_protocol.testing import NotingApplication, Pipe, ProbeEnv, probe_action


def ask(*envs):
    return Infer(
        env_indices=np.array(envs, np.int64),
        step_ids=np.zeros(len(envs), np.int64),
        observation=make_observation(num_envs=len(envs)),
    )


def test_the_probe_environment_is_the_page():
    env = ProbeEnv(4, action_dim=2)
    seen = env.reset()
    assert env.lengths_steps.tolist() == [3, 5, 7, 3]
    assert (seen.states["t"].shape, seen.states["a"].shape) == ((4, 1), (4, 2))
    assert seen.states["t"].dtype == seen.states["a"].dtype == np.float64
    for step in range(1, 4):
        seen, rewards, done = env.step(np.full((4, 2), step))
        assert rewards.tolist() == [1.0] * 4
        assert seen.states["t"].ravel().tolist() == [step] * 4
        assert seen.states["a"].tolist() == [[step, step]] * 4
    assert done.tolist() == [True, False, False, True]
    seen = env.reset(np.array([0]))
    assert seen.states["t"].ravel().tolist() == [0, 3, 3, 3]


def test_the_probe_action_is_the_page():
    action = probe_action(ask(0, 2), horizon=2, action_dim=3)
    assert action.tolist() == [
        [[0, 1, 2], [20, 21, 22]],
        [[10_000, 10_001, 10_002], [10_020, 10_021, 10_022]],
    ]


def test_a_pipe_joins_both_sessions():
    pipe = Pipe()
    action = pipe.infer(ask(1, 3))
    assert action.env_ids.tolist() == [1, 3]
    report = Feedback(
        env_indices=np.array([3]),
        step_ids=np.array([0]),
        observation=make_observation(num_envs=1),
        rewards=np.array([2.0], np.float32),
        terminated=np.array([False]),
        truncated=np.array([False]),
    )
    assert pipe.feedback(report).rewards.tolist() == [2.0]
    assert pipe.client.holding == {1}


def test_waiting_for_notes_has_an_end():
    with pytest.raises(TimeoutError, match="never held"):
        NotingApplication().wait_for(lambda notes: notes.requests, timeout_s=0.01)
