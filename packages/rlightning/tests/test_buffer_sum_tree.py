"""`SumTree` and `Priorities` against plain numpy."""

import numpy as np
import pytest
import torch

from rlightning.buffer.priorities import Priorities
from rlightning.buffer.sum_tree import SumTree


@pytest.mark.parametrize("size", [1, 2, 5, 8, 1000])
def test_the_tree_equals_a_running_sum_over_many_operations(size):
    rng = np.random.default_rng(size)
    tree, naive = SumTree(size), np.zeros(size)
    for _ in range(200):
        indices = rng.integers(size, size=rng.integers(1, 50))
        weights = rng.integers(0, 8, size=len(indices)).astype(float)  # exact in float64
        tree.set(indices, weights)
        for index, weight in zip(indices, weights, strict=True):
            naive[index] = weight
        assert tree.total == naive.sum()
        np.testing.assert_array_equal(tree.get(np.arange(size)), naive)
        if naive.sum() == 0:
            continue
        mass = np.concatenate([rng.random(50) * naive.sum(), np.arange(int(naive.sum()))])
        np.testing.assert_array_equal(
            tree.find(mass), np.searchsorted(np.cumsum(naive), mass, side="right")
        )


@pytest.mark.parametrize("size", [1, 5, 64, 1000])
def test_filling_a_range_equals_setting_each_of_its_leaves(size):
    rng = np.random.default_rng(size)
    filled, leaf_by_leaf = SumTree(size), SumTree(size)
    for _ in range(200):
        start = int(rng.integers(size))
        stop = int(rng.integers(start, size)) + 1
        weight = float(rng.integers(0, 8))
        filled.fill(start, stop, weight)
        leaf_by_leaf.set(np.arange(start, stop), weight)
        np.testing.assert_array_equal(filled._nodes, leaf_by_leaf._nodes)


def test_a_leaf_of_weight_zero_is_never_found_whatever_rounding_does():
    rng = np.random.default_rng(0)
    tree, size = SumTree(1000), 1000
    weights = np.where(
        rng.random(size) < 0.5, 0.0, rng.random(size) * 10.0 ** rng.integers(-9, 9, size)
    )
    tree.set(np.arange(size), weights)
    mass = np.concatenate([rng.random(100_000) * tree.total, [0.0, tree.total, tree.total * 1.01]])
    assert (weights[tree.find(mass)] > 0).all()


def test_slots_are_drawn_in_proportion_to_their_priorities():
    priorities = Priorities(4, exponent=1.0, epsilon=1e-9)
    slots = np.arange(4)
    priorities.add(slots)
    priorities.update(slots, np.array([1.0, 2.0, 0.0, 5.0]))
    drawn = priorities.draw(80_000, np.random.default_rng(0))
    np.testing.assert_allclose(
        np.bincount(drawn, minlength=4) / 80_000, [0.125, 0.25, 0, 0.625], atol=1e-3
    )


def test_the_exponent_flattens_the_distribution():
    priorities = Priorities(2, exponent=0.5, epsilon=1e-12)
    priorities.update(np.arange(2), np.array([1.0, 9.0]))
    drawn = priorities.draw(40_000, np.random.default_rng(0))
    assert abs((drawn == 1).mean() - 0.75) < 1e-3


def test_new_slots_get_the_highest_priority_seen():
    priorities = Priorities(3, exponent=1.0, epsilon=1e-9)
    priorities.add(np.array([0]))
    priorities.update(np.array([0]), np.array([4.0]))
    priorities.add(np.array([1]))
    drawn = priorities.draw(10_000, np.random.default_rng(0))
    assert abs((drawn == 1).mean() - 0.5) < 1e-3
    priorities.remove(np.array([1]))
    assert set(priorities.draw(100, np.random.default_rng(0))) == {0}


def test_weights_undo_the_bias_and_the_highest_is_one():
    priorities = Priorities(4, exponent=1.0, epsilon=1e-12)
    slots = np.arange(4)
    priorities.update(slots, np.array([1.0, 2.0, 2.0, 5.0]))
    # Probabilities .1 .2 .2 .5; (4 p)^-1 = 2.5 1.25 1.25 .5, divided by the highest of the batch.
    full = priorities.weights(slots, count=4, exponent=1.0)
    torch.testing.assert_close(full, torch.tensor([1.0, 0.5, 0.5, 0.2]))
    none = priorities.weights(slots, count=4, exponent=0.0)
    assert none.tolist() == [1.0] * 4


def test_updating_nothing_changes_nothing():
    priorities = Priorities(4, exponent=1.0, epsilon=1e-12)
    priorities.add(np.arange(4))
    before = priorities.state_dict(4)
    priorities.update(np.array([], dtype=np.int64), np.array([]))
    assert torch.equal(before["leaves"], priorities.state_dict(4)["leaves"])


def test_a_restored_state_draws_the_same():
    one = Priorities(5, exponent=0.6, epsilon=1e-6)
    one.update(np.arange(5), np.array([1.0, 2.0, 3.0, 4.0, 9.0]))
    two = Priorities(5, exponent=0.6, epsilon=1e-6)
    two.load_state_dict(one.state_dict(5))
    one.add(np.array([2]))
    two.add(np.array([2]))
    for seed in range(3):
        draws = [item.draw(50, np.random.default_rng(seed)).tolist() for item in (one, two)]
        assert draws[0] == draws[1]
    three = Priorities(5, exponent=0.6, epsilon=1e-6)
    three.load_state_dict(one.state_dict(0))
    assert three.state_dict(5)["highest"] == one.state_dict(0)["highest"]
