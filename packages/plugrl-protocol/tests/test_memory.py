"""Rows that the server has are left out, and no others."""

import numpy as np
import pytest

from plugrl_protocol.memory import Memory
from plugrl_protocol.messages import Feedback, Observation


def seen(*values, text="x", dtype=np.float32, name="s"):
    n = len(values)
    return Observation(
        images={"cam": np.full((n, 2, 2, 1), 7, np.uint8)},
        states={name: np.array(values, dtype).reshape(n, 1)},
        text=np.full(n, text),
    )


def memory_of(envs, *values, done=None):
    memory = Memory()
    n = len(envs)
    report = Feedback(
        env_indices=np.array(envs), step_ids=np.zeros(n, np.int64), observation=seen(*values),
        rewards=np.zeros(n), truncated=np.zeros(n, np.bool_),
        terminated=np.zeros(n, np.bool_) if done is None else np.array(done),
    )  # fmt: skip
    memory.note(report, envs)
    for array in report.observation.states.values():
        array[:] = -99  # the caller fills its arrays again
    return memory


def left_out(memory, observation, envs):
    """Give the states that are sent, and which rows are not."""
    found = memory.leave_out(observation, envs)
    if found is None:
        return None
    rest, reuse = found
    assert len(rest) == len(rest.images["cam"]) == len(envs) - reuse.sum()
    return rest.states["s"][:, 0].tolist(), reuse.tolist()


@pytest.mark.parametrize(
    ("envs", "values", "expected"),
    [
        ([4, 7], (1, 2), ([], [True, True])),
        ([7, 4], (2, 1), ([], [True, True])),
        ([7], (2,), ([], [True])),
        ([4], (1,), ([], [True])),
        ([4, 7], (1, 3), ([3.0], [True, False])),
        ([7, 4], (1, 2), None),
        ([4, 7, 9], (1, 2, 3), ([3.0], [True, True, False])),
        ([9], (1,), None),
        ([9, 4], (1, 1), ([1.0], [False, True])),
    ],
)
def test_rows_are_found_by_env(envs, values, expected):
    for _ in range(2):
        memory = memory_of([4, 7], 1, 2)
        assert left_out(memory, seen(*values), envs) == expected


def test_names_dtypes_and_text_are_compared():
    memory = memory_of([4], 1)
    assert memory.leave_out(seen(1, name="other"), [4]) is None
    assert memory.leave_out(seen(1, dtype=np.float64), [4]) is None
    assert memory.leave_out(seen(1, text="y"), [4]) is None
    assert left_out(memory, seen(1, text=np.str_("x").astype("<U9")), [4]) == ([], [True])


def test_bytes_are_compared_not_numbers():
    memory = memory_of([4, 7], 0.0, np.nan)
    assert left_out(memory, seen(-0.0, np.nan), [4, 7]) == ([0.0], [False, True])


def test_a_state_of_no_width_equals_itself():
    memory = memory_of([4, 7], 1, 2)
    memory.note(
        Feedback(
            env_indices=np.array([4, 7]), step_ids=np.zeros(2, np.int64), rewards=np.zeros(2),
            observation=Observation(states={"s": np.zeros((2, 0))}, text=np.full(2, "x")),
            truncated=np.zeros(2, np.bool_), terminated=np.zeros(2, np.bool_),
        ),
        [4, 7],
    )  # fmt: skip
    one = Observation(states={"s": np.zeros((1, 0))}, text=np.full(1, "x"))
    assert memory.leave_out(one, [7])[1].tolist() == [True]


def test_rows_of_two_feedbacks_are_found():
    memory = memory_of([4, 7], 1, 2)
    report = Feedback(
        env_indices=np.array([7]), step_ids=np.zeros(1, np.int64), observation=seen(5),
        rewards=np.zeros(1), truncated=np.zeros(1, np.bool_), terminated=np.zeros(1, np.bool_),
    )  # fmt: skip
    memory.note(report, [7])
    for _ in range(2):
        assert left_out(memory, seen(1, 5), [4, 7]) == ([], [True, True])
    assert left_out(memory, seen(1, 2), [4, 7]) == ([2.0], [True, False])


def test_what_is_sent_when_all_is_left_out_follows_the_observation():
    memory = memory_of([4, 7], 1, 2)
    for _ in range(2):
        assert left_out(memory, seen(1, 2), [4, 7]) == ([], [True, True])
    memory.note(
        Feedback(
            env_indices=np.array([4]), step_ids=np.zeros(1, np.int64), rewards=np.zeros(1),
            observation=seen(3, dtype=np.float64), truncated=np.zeros(1, np.bool_),
            terminated=np.zeros(1, np.bool_),
        ),
        [4],
    )  # fmt: skip
    rest, reuse = memory.leave_out(seen(3, dtype=np.float64), [4])
    assert (rest.states["s"].dtype, reuse.tolist()) == (np.float64, [True])


def test_a_done_and_a_request_forget():
    memory = memory_of([4, 7], 1, 2, done=[True, False])
    assert left_out(memory, seen(1, 2), [4, 7]) == ([1.0], [False, True])
    memory.forget([7, 8])
    assert not memory
    assert memory.leave_out(seen(2), [7]) is None
