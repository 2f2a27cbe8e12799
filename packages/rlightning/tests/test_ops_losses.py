"""Loss terms against hand-computed numbers and a peer's formulae."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from rlightning.ops import losses


def test_policy_loss_of_four_samples_by_hand():
    """Ratios 2, 2, 0.5, 0.5 with advantages 1, -1, 1, -1 and a clip of 0.2."""
    ratio = torch.tensor([2.0, 2.0, 0.5, 0.5])
    result = losses.ppo_policy_loss(
        ratio.log(), torch.zeros(4), torch.tensor([1.0, -1.0, 1.0, -1.0]), clip_ratio=0.2
    )
    # min(2, 1.2), min(-2, -1.2), min(0.5, 0.8), min(-0.5, -0.8)
    assert result.loss.item() == pytest.approx(-(1.2 - 2.0 + 0.5 - 0.8) / 4)
    assert result.clip_fraction.item() == 1.0
    expected_kl = (2 * (1 - math.log(2)) + 2 * (-0.5 + math.log(2))) / 4
    assert result.approx_kl.item() == pytest.approx(expected_kl)


def test_upper_clip_can_be_wider_than_the_lower():
    ratio = torch.tensor([1.25, 0.75])
    result = losses.ppo_policy_loss(
        ratio.log(), torch.zeros(2), torch.tensor([1.0, -1.0]), clip_ratio=0.2, clip_ratio_high=0.3
    )
    assert result.loss.item() == pytest.approx(-(1.25 - 0.8) / 2)
    assert result.clip_fraction.item() == 0.5


def test_policy_loss_equals_the_peers_formula_with_gradients():
    """The same expression as Stable-Baselines3's PPO.train evaluates, on random data."""
    rng = torch.Generator().manual_seed(0)
    log_prob = torch.randn(64, generator=rng).mul(0.5).requires_grad_()
    old, advantage = torch.randn(64, generator=rng) * 0.5, torch.randn(64, generator=rng)
    ours = losses.ppo_policy_loss(log_prob, old, advantage, clip_ratio=0.2)
    (gradient,) = torch.autograd.grad(ours.loss, log_prob)

    ratio = torch.exp(log_prob - old)
    peer = -torch.min(advantage * ratio, advantage * torch.clamp(ratio, 0.8, 1.2)).mean()
    (peer_gradient,) = torch.autograd.grad(peer, log_prob)
    assert ours.loss.item() == pytest.approx(peer.item(), abs=1e-6)
    assert torch.allclose(gradient, peer_gradient, atol=1e-7)
    clipped = (torch.abs(ratio - 1) > 0.2).float().mean().item()
    assert ours.clip_fraction.item() == pytest.approx(clipped)
    kl = ((ratio - 1) - (log_prob - old)).mean().item()
    assert ours.approx_kl.item() == pytest.approx(kl, abs=1e-6)
    assert not ours.approx_kl.requires_grad


def test_losses_of_an_update_equal_those_that_stable_baselines3_reports():
    """One pass of its PPO over one batch, after its weights were moved away from the sampling."""
    sb3 = pytest.importorskip("stable_baselines3")
    from stable_baselines3.common.logger import Logger

    torch.set_num_threads(1)
    model = sb3.PPO(
        "MlpPolicy", "CartPole-v1", seed=0, n_steps=64, batch_size=64, n_epochs=1,
        clip_range=0.2, device="cpu",
    )  # fmt: skip
    model.learn(64)
    rng = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=rng))
    rows = next(model.rollout_buffer.get())
    with torch.no_grad():
        value, log_prob, entropy = model.policy.evaluate_actions(
            rows.observations, rows.actions.long().flatten()
        )
    policy = losses.ppo_policy_loss(
        log_prob, rows.old_log_prob, losses.standardize(rows.advantages), clip_ratio=0.2
    )
    said = Logger(None, [])
    model.set_logger(said)
    model.train()
    reported = {name.removeprefix("train/"): found for name, found in said.name_to_value.items()}
    assert policy.loss.item() == pytest.approx(reported["policy_gradient_loss"], rel=1e-4)
    assert policy.approx_kl.item() == pytest.approx(reported["approx_kl"], rel=1e-4)
    assert policy.clip_fraction.item() == pytest.approx(reported["clip_fraction"])
    assert 0 < policy.clip_fraction.item() < 1
    assert losses.entropy_loss(entropy).item() == pytest.approx(reported["entropy_loss"], rel=1e-4)
    found = losses.value_loss(value.flatten(), rows.returns)
    assert found.item() == pytest.approx(reported["value_loss"], rel=1e-4)


def test_an_unchanged_policy_has_ratio_one():
    log_prob = torch.randn(8)
    result = losses.ppo_policy_loss(log_prob, log_prob, torch.ones(8), clip_ratio=0.2)
    assert (result.loss.item(), result.approx_kl.item(), result.clip_fraction.item()) == (-1, 0, 0)


def test_value_loss_is_the_mean_squared_error():
    value, target = torch.randn(16), torch.randn(16)
    assert torch.allclose(losses.value_loss(value, target), functional.mse_loss(target, value))


def test_clipped_value_loss_by_hand():
    """Old 0, target 1, range 0.2: moving to 0.9 counts as 0.2; moving away is not hidden."""
    loss = losses.value_loss(
        torch.tensor([0.9, -0.5]), torch.ones(2), old_value_B=torch.zeros(2), clip_range=0.2
    )
    assert loss.item() == pytest.approx((0.8**2 + 1.5**2) / 2)


def test_clipping_the_value_needs_the_old_one():
    with pytest.raises(ValueError, match="old_value_B"):
        losses.value_loss(torch.zeros(1), torch.zeros(1), clip_range=0.2)


def test_entropy_loss_is_minus_the_mean():
    assert losses.entropy_loss(torch.tensor([1.0, 3.0])).item() == -2.0


def test_standardized_advantages_have_mean_zero_and_std_one():
    advantage = losses.standardize(torch.randn(100) * 7 + 3)
    assert advantage.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantage.std().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("advantage", [torch.tensor([3.0]), torch.tensor([2.0, 2.0])])
def test_one_sample_or_equal_ones_give_no_nan(advantage):
    assert torch.isfinite(losses.standardize(advantage)).all()


def test_explained_variance_knows_perfect_mean_and_useless():
    target = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert losses.explained_variance(target, target).item() == 1.0
    assert losses.explained_variance(torch.full((4,), 2.5), target).item() == 0.0
    assert losses.explained_variance(-target, target).item() == pytest.approx(-3.0)
    assert losses.explained_variance(target, torch.ones(4)).item() == 0.0


def test_explained_variance_equals_stable_baselines3():
    utils = pytest.importorskip("stable_baselines3.common.utils")
    value, target = torch.randn(50), torch.randn(50)
    peer = utils.explained_variance(value.numpy(), target.numpy())
    np.testing.assert_allclose(losses.explained_variance(value, target).item(), peer, rtol=1e-4)
