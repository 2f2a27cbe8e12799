"""The arrays that hold chunks, against a list per row."""

import numpy as np
import pytest

from plugrl_env_client.errors import ActionShapeError
from plugrl_env_client.runner.plans import Plans


def test_the_arrays_do_what_a_list_per_row_does():
    rng = np.random.default_rng(0)
    plans = Plans(5, (2,))
    twin = [[] for _ in range(5)]
    earned = np.zeros(5)
    for _ in range(300):
        asking = plans.without_chunk()
        assert asking.tolist() == [row for row, chunk in enumerate(twin) if not chunk]
        if len(asking):
            horizon = int(rng.integers(1, 6))
            use_steps = int(rng.integers(1, horizon + 1))
            action = rng.normal(size=(horizon, len(asking), 2))
            plans.load(asking, action, use_steps=use_steps)
            for column, row in enumerate(asking):
                twin[row] = [action[step, column] for step in range(use_steps)]
                earned[row] = 0
        assert np.array_equal(plans.next_actions(), np.stack([chunk.pop(0) for chunk in twin]))
        rewards = rng.normal(size=5)
        done = rng.random(5) < 0.1
        earned += rewards
        used_up = plans.add(rewards)
        assert used_up.tolist() == [not chunk for chunk in twin]
        finished = np.flatnonzero(used_up | done)
        assert np.allclose(plans.reward[finished], earned[finished])
        plans.finish(finished, done)
        for row in finished:
            twin[row] = []


def test_chunks_are_counted_per_episode():
    plans = Plans(2, ())
    for _ in range(3):
        plans.load(np.arange(2), np.zeros((1, 2)), use_steps=1)
        plans.finish(np.arange(2), np.array([False, False]))
    assert plans.step_id.tolist() == [3, 3]
    plans.load(np.arange(2), np.zeros((1, 2)), use_steps=1)
    plans.finish(np.arange(2), np.array([True, False]))
    assert plans.step_id.tolist() == [0, 4]


def test_dropped_chunks_do_not_count():
    plans = Plans(2, ())
    plans.load(np.arange(2), np.zeros((3, 2)), use_steps=3)
    plans.drop()
    assert plans.without_chunk().tolist() == [0, 1]
    assert plans.step_id.tolist() == [0, 0]


def test_a_longer_chunk_makes_room_without_losing_others():
    plans = Plans(2, ())
    plans.load(np.array([0]), np.array([[1], [2]]), use_steps=2)
    plans.load(np.array([1]), np.array([[3.5], [4.5], [5.5]]), use_steps=3)
    assert plans.next_actions().tolist() == [1, 3.5]
    plans.add(np.zeros(2))
    assert plans.next_actions().tolist() == [2, 4.5]


@pytest.mark.parametrize("shape", [(2, 3, 1), (2, 3)])
def test_discrete_actions_come_with_or_without_an_axis(shape):
    plans = Plans(3, ())
    plans.load(np.arange(3), np.ones(shape, np.int64), use_steps=2)
    assert plans.next_actions().tolist() == [1, 1, 1]
    assert plans.next_actions().dtype == np.int64


def test_actions_of_another_width_are_refused():
    with pytest.raises(ActionShapeError, match=r"shape \(7,\), the environment takes \(6,\)"):
        Plans(1, (6,)).load(np.array([0]), np.zeros((1, 1, 7)), use_steps=1)
