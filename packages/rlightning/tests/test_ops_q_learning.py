"""Action values: targets, losses and slow networks, with hand-computed numbers."""

import pytest
import torch

from rlightning.ops import q_learning as ops
from rlightning.ops.returns import n_step_window

T = torch.tensor


def test_a_termination_ends_the_discount_and_nothing_else_does():
    discount = ops.bootstrap_discount(T([False, True, False]), gamma=0.9)
    assert discount.tolist() == pytest.approx([0.9, 0.0, 0.9])


def test_the_target_is_reward_plus_discounted_value():
    target = ops.td_target(T([1.0, 2.0, 3.0]), T([0.9, 0.0, 0.81]), T([10.0, 10.0, -10.0]))
    assert target.tolist() == pytest.approx([10.0, 2.0, -5.1])


def test_what_follows_a_termination_may_be_anything():
    target = ops.td_target(T([1.0, 2.0]), T([0.0, 0.0]), T([float("nan"), float("inf")]))
    assert target.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("terminated", "cut", "reward", "discount"),
    [
        ([0, 0, 0], [0, 0, 0], 1 + 0.5 * 2 + 0.25 * 4, 0.125),
        ([0, 1, 0], [0, 1, 0], 1 + 0.5 * 2, 0.0),
        ([0, 0, 0], [0, 1, 0], 1 + 0.5 * 2, 0.25),
        ([0, 0, 0], [1, 0, 0], 1, 0.5),
    ],
    ids=["goes on", "terminated in step 2", "truncated in step 2", "truncated in step 1"],
)
def test_n_step_targets_discount_by_the_steps_that_were_summed(terminated, cut, reward, discount):
    """gamma 0.5, rewards 1, 2, 4, next value 8: a truncation bootstraps, a termination does not."""
    column = lambda values: T(values).reshape(3, 1)  # noqa: E731
    window = n_step_window(
        column([1.0, 2.0, 4.0]), column(terminated).bool(), column(cut).bool(), gamma=0.5
    )
    target = ops.td_target(window.reward_B, window.discount_B, T([8.0]))
    assert target.item() == pytest.approx(reward + discount * 8.0)


def test_critics_are_summed_and_rows_averaged():
    q = T([[1.0, 2.0], [0.0, 4.0]])
    assert ops.ensemble_loss(q, T([0.0, 1.0])).item() == pytest.approx((1 + 1) / 2 + (0 + 9) / 2)
    weighted = ops.ensemble_loss(q, T([0.0, 1.0]), T([1.0, 0.5]))
    assert weighted.item() == pytest.approx((1 + 0.5) / 2 + (0 + 4.5) / 2)


def test_the_huber_loss_is_quadratic_near_zero_and_linear_beyond_one():
    loss = ops.huber_loss(T([0.5, 3.0]), T([0.0, 0.0]))
    assert loss.item() == pytest.approx((0.125 + 2.5) / 2)
    weighted = ops.huber_loss(T([0.5, 3.0]), T([0.0, 0.0]), T([1.0, 0.2]))
    assert weighted.item() == pytest.approx((0.125 + 0.5) / 2)


def test_double_learning_judges_the_action_that_the_other_network_chose():
    slow, fast = T([[1.0, 5.0], [2.0, 3.0]]), T([[9.0, 0.0], [0.0, 1.0]])
    assert ops.greedy_value(slow).tolist() == [5.0, 3.0]
    assert ops.greedy_value(slow, fast).tolist() == [1.0, 3.0]


def test_dueling_values_are_the_state_s_on_average():
    q = ops.dueling_values(T([[10.0]]), T([[1.0, 2.0, 6.0]]))
    assert q.tolist() == [[8.0, 9.0, 13.0]]


def test_a_schedule_moves_linearly_and_then_stays():
    values = [ops.linear_schedule(s, start=1.0, end=0.2, duration=4) for s in (0, 1, 4, 9)]
    assert values == pytest.approx([1.0, 0.8, 0.2, 0.2])


def test_epsilon_is_the_share_of_rows_that_choose_anything():
    q = T([[0.0, 1.0, 0.5, 0.2]]).expand(40_000, 4)
    generator = torch.Generator().manual_seed(0)
    assert ops.epsilon_greedy(q, 0.0).eq(1).all()
    chosen = ops.epsilon_greedy(q, 0.4, generator=generator)
    share = torch.bincount(chosen, minlength=4) / len(chosen)
    assert share.tolist() == pytest.approx([0.1, 0.7, 0.1, 0.1], abs=0.01)


def test_slow_parameters_move_their_share_of_the_way_and_one_copies():
    slow, fast = [torch.zeros(2), T([[4.0]])], [T([1.0, -2.0]), T([[0.0]])]
    ops.polyak_update(slow, fast, tau=0.25)
    assert (slow[0].tolist(), slow[1].item()) == ([0.25, -0.5], 3.0)
    ops.polyak_update(slow, fast, tau=1.0)
    assert torch.equal(slow[0], fast[0])
    slow[0].add_(1.0)
    assert fast[0].tolist() == [1.0, -2.0], "a copy, not the same memory"


def test_repeated_moves_decay_the_distance_geometrically():
    slow, fast = [T([1.0])], [torch.nn.Parameter(T([0.0]))]
    for _ in range(100):
        ops.polyak_update(slow, fast, tau=0.05)
    assert slow[0].item() == pytest.approx(0.95**100, rel=1e-4)
