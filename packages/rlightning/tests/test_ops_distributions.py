"""Hand-written distributions against torch.distributions, analytic float64 and frequencies."""

import math

import pytest
import torch
from torch import distributions

from rlightning.ops import distributions as ops


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("per_state", [False, True])
def test_gaussian_equals_torch(rng, per_state):
    mean, sample = torch.randn(7, 3, generator=rng), torch.randn(7, 3, generator=rng)
    log_std = torch.randn((7, 3) if per_state else (3,), generator=rng)
    peer = distributions.Normal(mean, log_std.exp())
    ours = ops.gaussian_log_prob(sample, mean, log_std)
    assert torch.allclose(ours, peer.log_prob(sample).sum(-1), atol=1e-5)
    entropy = ops.gaussian_entropy(log_std).expand(7)
    assert torch.allclose(entropy, peer.entropy().sum(-1), atol=1e-5)


def test_standard_normal_density_by_hand():
    zero = torch.zeros(1, 2)
    assert ops.gaussian_log_prob(zero, zero, torch.zeros(2)).item() == pytest.approx(
        -math.log(2 * math.pi)
    )


def test_gaussian_samples_have_the_asked_moments_and_follow_the_generator(rng):
    mean, log_std = torch.tensor([1.0, -2.0]).expand(20_000, 2), torch.tensor([0.0, -1.0])
    sample = ops.gaussian_sample(mean, log_std, generator=rng)
    assert torch.allclose(sample.mean(0), mean[0], atol=0.03)
    assert torch.allclose(sample.std(0), log_std.exp(), atol=0.03)
    again = ops.gaussian_sample(mean, log_std, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sample, again)


def test_gaussian_sample_carries_gradients():
    mean, log_std = torch.zeros(4, 2, requires_grad=True), torch.zeros(2, requires_grad=True)
    ops.gaussian_sample(mean, log_std).sum().backward()
    assert mean.grad is not None
    assert log_std.grad is not None
    assert torch.equal(mean.grad, torch.ones(4, 2))


def test_squashed_log_prob_equals_the_textbook_where_that_is_exact(rng):
    mean, log_std = torch.randn(50, 3, generator=rng), torch.full((3,), -1.0)
    action, pre_tanh = ops.squashed_gaussian_sample(mean, log_std, generator=rng)
    assert torch.equal(action, pre_tanh.tanh())
    u = pre_tanh.double()
    peer = distributions.Normal(mean.double(), log_std.double().exp()).log_prob(u)
    expected = (peer - torch.log1p(-u.tanh().square())).sum(-1)
    ours = ops.squashed_gaussian_log_prob(pre_tanh, mean, log_std)
    assert torch.allclose(ours.double(), expected, atol=1e-3)


def test_squashed_log_prob_survives_saturation():
    """mean 20, std 0.1: tanh is exactly 1 in float32, log-prob and gradients stay right."""
    mean = torch.full((64, 1), 20.0, requires_grad=True)
    log_std = torch.full((1,), math.log(0.1), requires_grad=True)
    action, pre_tanh = ops.squashed_gaussian_sample(
        mean, log_std, generator=torch.Generator().manual_seed(0)
    )
    assert (action == 1.0).all()
    log_prob = ops.squashed_gaussian_log_prob(pre_tanh.detach(), mean, log_std)
    log_prob.sum().backward()
    u = pre_tanh.detach().double()
    # log(1 - tanh^2 u) = 2 log 2 - 2u - 2 log(1 + exp(-2u))
    correction = 2 * math.log(2) - 2 * u - 2 * torch.log1p(torch.exp(-2 * u))
    z = (u - 20.0) / 0.1
    expected = (-0.5 * z**2 - math.log(0.1) - 0.5 * math.log(2 * math.pi) - correction).sum(-1)
    assert torch.allclose(log_prob.detach().double(), expected, atol=1e-3)
    for parameter in (mean, log_std):
        assert parameter.grad is not None
        assert torch.isfinite(parameter.grad).all()


def test_squashed_density_integrates_to_one():
    """Integrate exp(log p) da over the open interval, with da = (1 - tanh^2 u) du."""
    u = torch.linspace(-12, 12, 20_001).unsqueeze(-1)
    log_p = ops.squashed_gaussian_log_prob(u, torch.tensor([[0.3]]), torch.tensor([0.2]))
    density_du = log_p.exp() * (1 - u.squeeze(-1).tanh().square())
    assert torch.trapezoid(density_du, u.squeeze(-1)).item() == pytest.approx(1.0, abs=1e-3)


def test_categorical_equals_torch(rng):
    logits, index = torch.randn(9, 5, generator=rng), torch.randint(5, (9,), generator=rng)
    peer, log_p = distributions.Categorical(logits=logits), logits.log_softmax(-1)
    assert torch.allclose(ops.categorical_log_prob(log_p, index), peer.log_prob(index), atol=1e-6)
    assert torch.allclose(ops.categorical_entropy(log_p), peer.entropy(), atol=1e-6)


def test_a_masked_category_is_never_drawn_and_adds_no_nan():
    logits = torch.tensor([[0.0, float("-inf"), 0.0]]).expand(2000, 3)
    entropy = ops.categorical_entropy(logits.log_softmax(-1))
    assert torch.allclose(entropy, torch.full((2000,), math.log(2)))
    assert (ops.categorical_sample(logits) != 1).all()


def test_categorical_frequencies_follow_the_probabilities(rng):
    probability = torch.tensor([0.1, 0.2, 0.7])
    sample = ops.categorical_sample(probability.log().expand(30_000, 3), generator=rng)
    assert sample.dtype == torch.int64
    frequency = torch.bincount(sample, minlength=3) / 30_000
    assert torch.allclose(frequency, probability, atol=0.01)


def test_multi_categorical_is_a_sum_of_categoricals(rng):
    sizes = (2, 4, 3)
    logits = torch.randn(6, 9, generator=rng)
    sample = ops.multi_categorical_sample(logits, sizes, generator=rng)
    assert sample.shape == (6, 3)
    log_p = ops.multi_log_softmax(logits, sizes)
    peers = [distributions.Categorical(logits=part) for part in logits.split(sizes, -1)]
    expected = sum(peer.log_prob(sample[:, i]) for i, peer in enumerate(peers))
    assert torch.allclose(ops.multi_categorical_log_prob(log_p, sample, sizes), expected, atol=1e-5)
    entropy = sum(peer.entropy() for peer in peers)
    assert torch.allclose(ops.categorical_entropy(log_p), entropy, atol=1e-5)
    mode = torch.stack([peer.logits.argmax(-1) for peer in peers], -1)
    assert torch.equal(ops.multi_categorical_mode(logits, sizes), mode)


def test_multi_categorical_frequencies_are_per_group(rng):
    logits = torch.tensor([0.25, 0.75, 0.9, 0.1]).log().expand(20_000, 4)
    sample = ops.multi_categorical_sample(logits, (2, 2), generator=rng).float().mean(0)
    assert torch.allclose(sample, torch.tensor([0.75, 0.1]), atol=0.01)


def test_bernoulli_equals_torch(rng):
    logits = torch.randn(20_000, 2, generator=rng)[:1].expand(20_000, 2)
    bits = ops.bernoulli_sample(logits, generator=rng)
    peer = distributions.Bernoulli(logits=logits)
    log_prob = ops.bernoulli_log_prob(logits, bits)
    assert torch.allclose(log_prob, peer.log_prob(bits.float()).sum(-1), atol=1e-5)
    assert torch.allclose(ops.bernoulli_entropy(logits), peer.entropy().sum(-1), atol=1e-5)
    assert torch.allclose(bits.float().mean(0), logits[0].sigmoid(), atol=0.015)
