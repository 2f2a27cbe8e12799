"""Soft actor-critic's maths: hand-computed values, gradients, a positive temperature."""

import math

import pytest
import torch

from rlightning.ops import soft_actor_critic as ops
from rlightning.ops.distributions import squashed_gaussian_log_prob

T = torch.tensor


def test_the_soft_value_is_the_lower_critic_plus_entropy():
    value = ops.soft_value(T([[1.0, 5.0], [3.0, 4.0]]), T([-2.0, 1.0]), T(0.5))
    assert value.tolist() == [1.0 + 1.0, 4.0 - 0.5]


def test_the_actor_loss_is_the_negated_soft_value_and_leaves_the_temperature_alone():
    alpha = torch.tensor(0.5, requires_grad=True)
    log_prob = T([-2.0, 1.0]).requires_grad_()
    q = T([[1.0, 5.0], [3.0, 4.0]]).requires_grad_()
    loss = ops.actor_loss(q, log_prob, alpha)
    assert loss.item() == pytest.approx(-(2.0 + 3.5) / 2)
    loss.backward()
    assert alpha.grad is None
    assert log_prob.grad.tolist() == [0.25, 0.25]
    assert q.grad.tolist() == [[-0.5, 0.0], [0.0, -0.5]]


@pytest.mark.parametrize(("entropy", "direction"), [(0.0, -1), (-3.0, 1)])
def test_entropy_above_the_target_lowers_the_temperature(entropy, direction):
    """The target is -2 nats."""
    log_alpha = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.SGD([log_alpha], lr=0.1)
    loss = ops.temperature_loss(log_alpha, entropy, -2.0)
    assert loss.item() == pytest.approx(entropy + 2.0)
    loss.backward()
    optimizer.step()
    assert math.copysign(1, log_alpha.item()) == direction


def test_no_gradient_reaches_the_policy_through_the_temperature():
    entropy = torch.tensor(1.0, requires_grad=True)
    log_alpha = torch.zeros((), requires_grad=True)
    ops.temperature_loss(log_alpha, entropy, 0.0).backward()
    assert entropy.grad is None


def test_the_temperature_stays_positive_under_ten_thousand_adversarial_steps():
    log_alpha = torch.zeros((), requires_grad=True)
    optimizer = torch.optim.Adam([log_alpha], lr=0.01)
    lowest = 1.0
    for step in range(10_000):
        optimizer.zero_grad()
        entropy = 1e3 if step < 9_000 else -1e3
        ops.temperature_loss(log_alpha, entropy, -1.0).backward()
        optimizer.step()
        lowest = min(lowest, float(log_alpha.detach().exp()))
    assert 0.0 < lowest < 1e-3
    assert log_alpha.grad.isfinite()


def test_squashed_log_probabilities_integrate_to_one():
    """Trapezoids over the action a = tanh(u), mean 0.3, standard deviation 0.8."""
    action = torch.linspace(-0.99999, 0.99999, 200_001, dtype=torch.float64)
    pre_tanh = torch.atanh(action).unsqueeze(-1)
    mean = torch.full_like(pre_tanh, 0.3)
    log_std = torch.full_like(pre_tanh, math.log(0.8))
    density = squashed_gaussian_log_prob(pre_tanh, mean, log_std).exp()
    assert torch.trapezoid(density, action).item() == pytest.approx(1.0, abs=1e-3)


def test_squashed_log_probabilities_of_a_saturated_tanh_are_right_and_have_gradients():
    """Mean 20, deviation 0.1: log(1 - tanh(u)^2) is log 4 - 2u to double precision."""
    mean = torch.full((5, 1), 20.0, requires_grad=True)
    log_std = torch.full((5, 1), math.log(0.1), requires_grad=True)
    noise = torch.linspace(-2, 2, 5).unsqueeze(-1)
    pre_tanh = mean + noise * log_std.exp()
    log_prob = squashed_gaussian_log_prob(pre_tanh, mean, log_std)
    u = 20.0 + 0.1 * noise.double()
    gaussian = -0.5 * noise.double() ** 2 - math.log(0.1) - 0.5 * math.log(2 * math.pi)
    exact = (gaussian - (math.log(4.0) - 2.0 * u)).squeeze(-1)
    assert torch.allclose(log_prob.double(), exact, atol=1e-3)
    log_prob.sum().backward()
    assert mean.grad.isfinite().all()
    assert log_std.grad.isfinite().all()
