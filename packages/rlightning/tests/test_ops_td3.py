"""TD3's maths: noise within its bounds, the lower critic, the first critic's gradient."""

import pytest
import torch

from rlightning.ops import td3 as ops


def test_noise_is_clipped_and_actions_stay_in_range():
    action = torch.tensor([[0.0, 0.95, -0.95]]).expand(20_000, 3)
    generator = torch.Generator().manual_seed(0)
    noisy = ops.noisy_action(action, std=0.2, noise_clip=0.3, generator=generator)
    moved = noisy - action
    assert moved.abs().max().item() == pytest.approx(0.3, abs=1e-6)
    assert noisy.abs().max() <= 1.0
    assert moved[:, 0].mean().item() == pytest.approx(0.0, abs=0.01)
    inside = moved[:, 0].abs() < 0.3
    # P(|N(0, 0.2)| < 0.3) = P(|z| < 1.5) = 0.866
    assert inside.float().mean().item() == pytest.approx(0.866, abs=0.01)


def test_noise_without_a_clip_has_the_given_deviation():
    generator = torch.Generator().manual_seed(0)
    noisy = ops.noisy_action(torch.zeros(50_000, 1), std=0.1, generator=generator)
    assert noisy.std().item() == pytest.approx(0.1, abs=0.002)
    assert noisy.abs().max() > 0.3


def test_no_noise_changes_nothing():
    action = torch.tensor([[0.3, -1.0]])
    assert torch.equal(ops.noisy_action(action, std=0.0), action)


def test_the_lower_critic_counts():
    q = torch.tensor([[1.0, 5.0], [3.0, 4.0]])
    assert ops.clipped_double_value(q).tolist() == [1.0, 4.0]


def test_the_actor_follows_the_first_critic_only():
    q = torch.tensor([[1.0, 5.0], [3.0, 4.0]], requires_grad=True)
    loss = ops.actor_loss(q)
    assert loss.item() == -3.0
    loss.backward()
    assert q.grad.tolist() == [[-0.5, -0.5], [0.0, 0.0]]
