"""The hand-written step equals autograd and torch's Adam, and borrows without a trace."""

import math

import pytest
import torch
from torch import nn

from rlightning.ops import losses
from rlightning.ops.distributions import (
    categorical_entropy,
    categorical_log_prob,
    gaussian_entropy,
    gaussian_log_prob,
    gaussian_sample_with_log_prob,
)
from rlightning.ops.fused_ppo import FusedPPO, Minibatch, supports
from rlightning.ops.plain_networks import Noise, PlainLayers, Spread, draw_gaussian

HYPER = {"clip_ratio": 0.2, "value_coef": 0.5, "max_grad_norm": 0.5}


class Networks:
    """Two plain networks and their Adam, stepped by the textbook or by FusedPPO."""

    def __init__(self, kind, sizes=(16, 8), n_in=5, n_out=3, entropy_coef=0.01, **adam):
        torch.manual_seed(0)
        dtype = adam.pop("dtype", torch.float32)
        widths = (n_in, *sizes)

        def stack(n_last):
            pairs = zip((*widths,), (*sizes, n_last), strict=True)
            return [nn.Linear(a, b, dtype=dtype) for a, b in pairs]

        log_std = (
            nn.Parameter(torch.full((n_out,), -0.3, dtype=dtype)) if kind == "gaussian" else None
        )
        self.layers = PlainLayers(stack(n_out), stack(1), log_std, (-20.0, 2.0))
        self.entropy_coef = entropy_coef
        self.modules = nn.ModuleList([*self.layers.actor, *self.layers.critic])
        self.parameters = [*self.modules.parameters(), *([] if log_std is None else [log_std])]
        self.optimizer = torch.optim.Adam(self.parameters, lr=1e-3, eps=1e-5, **adam)

    def fused(self, on_non_finite=lambda *_: None, **overrides):
        hyper = HYPER | {"entropy_coef": self.entropy_coef} | overrides
        return FusedPPO(self.layers, self.optimizer, on_non_finite=on_non_finite, **hyper)

    def forward(self, stack, x):
        for layer in stack[:-1]:
            x = torch.tanh(layer(x))
        return stack[-1](x)

    @torch.enable_grad()
    def autograd_step(self, minibatch, max_grad_norm=0.5):
        out, log_std = self.forward(self.layers.actor, minibatch.features), self.layers.log_std
        if log_std is not None:
            log_prob = gaussian_log_prob(minibatch.action, out, log_std)
            entropy = gaussian_entropy(log_std)
        else:
            log_p = out.log_softmax(-1)
            log_prob = categorical_log_prob(log_p, minibatch.action)
            entropy = categorical_entropy(log_p).mean()
        value = self.forward(self.layers.critic, minibatch.features).squeeze(-1)
        loss = losses.ppo_policy_loss(
            log_prob, minibatch.log_prob, minibatch.advantage, clip_ratio=0.2
        ).loss
        loss = loss + 0.5 * losses.value_loss(value, minibatch.value_target)
        self.optimizer.zero_grad()
        (loss - self.entropy_coef * entropy).backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, max_grad_norm)
        self.optimizer.step()
        if log_std is not None:
            with torch.no_grad():
                log_std.clamp_(*self.layers.log_std_bounds)
        return log_prob.detach(), value.detach(), entropy.detach(), norm.item()


def minibatch(kind, n_rows, seed, n_in=5, n_out=3, dtype=torch.float32):
    rng = torch.Generator().manual_seed(seed)
    if kind == "gaussian":
        action = torch.randn(n_rows, n_out, generator=rng)
    else:
        action = torch.randint(n_out, (n_rows,), generator=rng)
    # Old log-probabilities around the typical ones, so that some ratios are clipped on both sides.
    centre = -3.5 if kind == "gaussian" else -math.log(n_out)
    columns = torch.randn(4, n_rows, generator=rng)
    floats = (torch.randn(n_rows, n_in, generator=rng), centre + 0.5 * columns[0], *columns[1:])
    features, *rest = (column.to(dtype) for column in floats)
    return Minibatch(features, action.to(dtype) if kind == "gaussian" else action, *rest)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.01])
@pytest.mark.parametrize("sizes", [(512,), (64, 64), (8, 12, 6), (16, 300)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_thirty_steps_equal_autograd(kind, entropy_coef, sizes, dtype, tolerance):
    """Parameters, moments, outputs and norms agree, with minibatches of several sizes."""
    plain = Networks(kind, sizes, entropy_coef=entropy_coef, dtype=dtype)
    ours = Networks(kind, sizes, entropy_coef=entropy_coef, dtype=dtype)
    fused = ours.fused()
    with fused.borrowed():
        for seed in range(30):
            rows = minibatch(kind, (64, 65, 7)[seed % 3], seed, dtype=dtype)
            log_prob, value, entropy, norm = plain.autograd_step(rows)
            outputs = fused.step(rows)
            close = {"rtol": 100 * tolerance, "atol": 10 * tolerance}
            assert torch.allclose(outputs.log_prob, log_prob, **close)
            assert torch.allclose(outputs.value, value, **close)
            assert outputs.entropy == pytest.approx(entropy.item(), rel=100 * tolerance)
            assert outputs.grad_norm == pytest.approx(norm, rel=100 * tolerance)
    for left, right in zip(ours.parameters, plain.parameters, strict=True):
        assert torch.allclose(left, right, rtol=0, atol=tolerance)
        ours_state, plain_state = ours.optimizer.state[left], plain.optimizer.state[right]
        assert ours_state["step"] == plain_state["step"] == 30
        for moment in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(ours_state[moment], plain_state[moment], rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_an_unclipped_gradient_is_left_alone(kind):
    plain, ours = Networks(kind), Networks(kind)
    fused, rows = ours.fused(max_grad_norm=1e6), minibatch(kind, 32, 0)
    plain.autograd_step(rows, max_grad_norm=1e6)
    with fused.borrowed():
        fused.step(rows)
    for left, right in zip(ours.parameters, plain.parameters, strict=True):
        assert torch.allclose(left, right, atol=1e-6)


@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_both_ways_of_stepping_can_take_turns(kind):
    """Moments and step counts go over in both directions, so ten and ten equal twenty."""
    plain, mixed = Networks(kind, fused=True), Networks(kind, fused=True)
    fused = mixed.fused()
    for seed in range(20):
        rows = minibatch(kind, 64, seed)
        plain.autograd_step(rows)
        if seed % 2:
            with fused.borrowed():
                fused.step(rows)
        else:
            mixed.autograd_step(rows)
    for left, right in zip(mixed.parameters, plain.parameters, strict=True):
        assert torch.allclose(left, right, atol=1e-6)


def test_the_learning_rate_of_the_optimizer_is_read_at_every_step():
    networks = Networks("gaussian")
    before = [p.detach().clone() for p in networks.parameters]
    networks.optimizer.param_groups[0]["lr"] = 0.0
    fused = networks.fused()
    with fused.borrowed():
        fused.step(minibatch("gaussian", 16, 0))
    assert all(torch.equal(a, b) for a, b in zip(before, networks.parameters, strict=True))


def test_an_error_inside_leaves_modules_and_optimizer_untouched():
    networks = Networks("gaussian")
    fused = networks.fused()
    too_wide = minibatch("gaussian", 16, 0, n_in=6)
    with fused.borrowed():
        fused.step(minibatch("gaussian", 16, 0))
    before = [p.detach().clone() for p in networks.parameters]

    def fail_at_the_second_step():
        with fused.borrowed():
            fused.step(minibatch("gaussian", 16, 0))
            fused.step(too_wide)

    with pytest.raises(ValueError, match="size 5 is different from 6"):
        fail_at_the_second_step()
    assert all(torch.equal(a, b) for a, b in zip(before, networks.parameters, strict=True))
    assert networks.optimizer.state[networks.parameters[0]]["step"] == 1


def test_a_gradient_that_is_not_finite_is_reported_with_its_parameters_before_anything_moves():
    networks = Networks("gaussian")
    reported = []
    fused = networks.fused(on_non_finite=lambda p, g: reported.append((p, g.isfinite().all())))
    rows = minibatch("gaussian", 16, 0)
    rows.value_target[3] = float("nan")
    with fused.borrowed():
        fused.step(rows)
    assert len(reported) == len(networks.parameters)
    broken = {id(p) for p, finite in reported if not finite}
    assert broken == {id(p) for layer in networks.layers.critic for p in layer.parameters()}


def test_log_std_stays_in_its_bounds():
    networks = Networks("gaussian")
    with torch.no_grad():
        networks.layers.log_std.fill_(50.0)
    fused = networks.fused()
    with fused.borrowed():
        fused.step(minibatch("gaussian", 16, 0))
    assert (networks.layers.log_std <= 2.0).all()


def test_what_it_supports():
    networks = Networks("gaussian")
    assert supports(networks.layers, networks.optimizer)
    others = [p for p in networks.parameters if p is not networks.layers.log_std]
    assert not supports(networks.layers, torch.optim.Adam(others))
    assert not supports(networks.layers, torch.optim.SGD(networks.parameters, lr=0.1))
    assert not supports(networks.layers, torch.optim.AdamW(networks.parameters))
    decayed = torch.optim.Adam(networks.parameters, weight_decay=0.1)
    assert not supports(networks.layers, decayed)
    wide = Networks("gaussian", (16, 9))
    mixed = networks.layers._replace(critic=wide.layers.critic)
    assert not supports(mixed, networks.optimizer)
    shallow = Networks("gaussian", ())
    assert not supports(shallow.layers, shallow.optimizer)


def test_draws_in_numpy_are_those_of_torch():
    generator = torch.Generator()
    for n_rows in (1, 7, 64):
        mean, log_std = torch.randn(n_rows, 3), torch.tensor([-1.0, 0.0, 0.5])
        generator.manual_seed(n_rows)
        noise = Noise.like((n_rows, 3))
        sample, log_prob = draw_gaussian(
            mean.numpy(), Spread.of(log_std.numpy()), noise, generator=generator
        )
        generator.manual_seed(n_rows)
        wanted = gaussian_sample_with_log_prob(mean, log_std, generator=generator)
        torch.testing.assert_close(torch.from_numpy(sample), wanted[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(torch.from_numpy(log_prob), wanted[1], rtol=1e-5, atol=1e-6)
        again = gaussian_log_prob(torch.from_numpy(sample), mean, log_std)
        torch.testing.assert_close(torch.from_numpy(log_prob), again, rtol=1e-4, atol=1e-5)
