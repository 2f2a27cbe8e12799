"""The hand-written TD3 step equals autograd and torch's Adam, and borrows without a trace."""

import copy
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlightning.errors import NonFiniteError
from rlightning.policy.off_policy import Transitions

BOX = spaces.Box(np.float32([0.0, -3.0]), np.float32([5.0, -1.0]))


def make_policy(off_policy, **options):
    model = {"hidden_sizes": [16, 12]} | options.pop("model", {})
    return off_policy.make("TD3Policy", space=BOX, model=model, **options).train_list[0]


def minibatch(seed, rows=12, *, weighted=False):
    rng = torch.Generator().manual_seed(seed)
    low, width = torch.tensor([0.0, -3.0]), torch.tensor([5.0, 2.0])
    over = torch.rand(rows, generator=rng) < 0.3
    return Transitions(
        torch.randn(rows, 3, generator=rng),
        low + width * torch.rand(rows, 2, generator=rng),
        torch.randn(rows, generator=rng),
        torch.where(over, 0.0, 0.99),
        torch.randn(rows, 3, generator=rng),
        torch.rand(rows, generator=rng) + 0.5 if weighted else None,
    )


def stepped(policy, batch, step, *, fused):
    torch.manual_seed(1000 + step)
    if not fused:
        return policy.update(batch, step)
    with policy._fused.borrowed():
        return policy.update(batch, step)


VARIANTS = {
    "plain": {},
    "tanh": {"model": {"activation": "tanh"}},
    "one hidden layer": {"model": {"hidden_sizes": [10]}},
    "no hidden layer": {"model": {"hidden_sizes": []}},
    "every step": {"actor_interval": 1, "target_interval": 1, "tau": 0.3},
    "three critics": {"model": {"n_critics": 3}, "target_noise_clip": 0.01},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("weighted", [False, True])
def test_ten_steps_are_those_of_autograd(off_policy, variant, weighted):
    """Same noise, same metrics, same TD errors, same parameters and optimizer state."""
    slow, fast = (make_policy(off_policy, **copy.deepcopy(VARIANTS[variant])) for _ in range(2))
    assert fast._fused is not None
    for step in range(10):
        batch = minibatch(step, weighted=weighted)
        expected, errors = stepped(slow, batch, step, fused=False)
        metrics, fused_errors = stepped(fast, batch, step, fused=True)
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.allclose(metrics[name], value, rtol=1e-4, atol=1e-5), name
        assert torch.allclose(fused_errors, errors, rtol=1e-4, atol=1e-5)
    for name, tensor in off_policy.tensors_of(slow).items():
        assert torch.allclose(off_policy.tensors_of(fast)[name], tensor, rtol=1e-4, atol=1e-5), name
    for name, optimizer in slow.optimizers.items():
        theirs, ours = optimizer.state_dict(), fast.optimizers[name].state_dict()
        for index, state in theirs["state"].items():
            for key, value in state.items():
                mine = ours["state"][index][key]
                assert torch.allclose(mine, value, rtol=1e-3, atol=1e-6), (name, index, key)


def test_the_paths_can_take_turns(off_policy):
    mixed, plain = make_policy(off_policy), make_policy(off_policy)
    for step in range(8):
        batch = minibatch(step)
        stepped(mixed, batch, step, fused=step % 3 == 1)
        stepped(plain, batch, step, fused=False)
    for name, tensor in off_policy.tensors_of(plain).items():
        assert torch.allclose(off_policy.tensors_of(mixed)[name], tensor, atol=1e-5), name


def test_a_gradient_that_is_not_finite_moves_nothing_and_is_named(off_policy):
    policy = make_policy(off_policy)
    before = off_policy.tensors_of(policy)
    batch = minibatch(0)._replace(reward=torch.full((12,), math.inf))
    with pytest.raises(NonFiniteError, match=r"gradient of critic\.critics\.0\.0\.weight"):
        stepped(policy, batch, 0, fused=True)
    for name, tensor in off_policy.tensors_of(policy).items():
        assert torch.equal(tensor, before[name]), name


def test_train_takes_the_fused_step(off_policy):
    """And its parameters are the modules' own again when it returns."""
    policy = make_policy(off_policy, batch_size=12, minibatch_size=6)
    batch = minibatch(0)._asdict()
    del batch["weight"], batch["discount"]
    batch["terminated"] = torch.zeros(12, dtype=torch.bool)
    taken = []
    original = policy._fused.step
    policy._fused.step = lambda *args, **kwargs: taken.append(1) or original(*args, **kwargs)
    before = off_policy.tensors_of(policy)
    policy.update_dataset(batch)
    policy.train()
    assert len(taken) == 2
    now = off_policy.tensors_of(policy)
    moved = {name.split(".")[0] for name in now if not torch.equal(now[name], before[name])}
    assert moved == {"actor", "critic", "target_actor", "target_critic", "n_updates"}


def test_other_networks_keep_the_general_path(off_policy):
    assert make_policy(off_policy, model={"activation": "gelu"})._fused is None
    assert make_policy(off_policy, model={"layer_norm": True})._fused is None
