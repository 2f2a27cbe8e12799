"""`train.anneal_lr` of off-policy algorithms: all learning rates fall over `max_epochs`."""

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces

SPACES = {
    "DQNPolicy": spaces.Discrete(2),
    "SACPolicy": spaces.Box(-2, 2, (2,)),
    "TD3Policy": spaces.Box(-2, 2, (2,)),
}
RATES = {
    "DQNPolicy": {"lr": 0.01},
    "SACPolicy": {"actor_lr": 0.01, "critic_lr": 0.01, "temperature_lr": 0.01},
    "TD3Policy": {"actor_lr": 0.01, "critic_lr": 0.01},
}
ALL = pytest.mark.parametrize("kind", SPACES)


def make(off_policy, kind, **options):
    options = {"optim": RATES[kind], "minibatch_size": 2, "max_epochs": 4} | options
    return off_policy.make(kind, space=SPACES[kind], anneal_lr=True, **options)


def batch_of(kind, seed=0):
    random = np.random.default_rng(seed)
    columns = {
        "observation": random.normal(size=(4, 3)),
        "action": random.uniform(-2, 2, (4, 2)),
        "reward": random.normal(size=4),
        "next_observation": random.normal(size=(4, 3)),
    }
    batch = {name: torch.tensor(value, dtype=torch.float32) for name, value in columns.items()}
    if kind == "DQNPolicy":
        batch["action"] = torch.tensor([0, 1, 1, 0])
    return batch | {"terminated": torch.zeros(4, dtype=torch.bool)}


def update(group, kind, seed=0):
    group.update_dataset([batch_of(kind, seed)])
    return group.train()


def rates_of(group):
    optimizers = group.train_list[0].optimizers
    return {name: optimizer.param_groups[0]["lr"] for name, optimizer in optimizers.items()}


@ALL
def test_the_learning_rates_fall_to_zero_over_max_epochs(off_policy, kind):
    """By epochs, not by gradient steps, of which each epoch has two."""
    group = make(off_policy, kind)
    expected = [0.01, 0.0075, 0.005, 0.0025, 0.0, 0.0]
    for rate in expected:
        metrics = update(group, kind)
        for name, found in rates_of(group).items():
            assert found == pytest.approx(rate)
            assert metrics[f"{name}_learning_rate"] == found


@ALL
def test_at_a_learning_rate_of_zero_nothing_moves(off_policy, kind):
    """So the rate reaches steps written by hand too."""
    group = make(off_policy, kind, max_epochs=1)
    update(group, kind)
    before = off_policy.tensors_of(group.train_list[0])
    update(group, kind)
    after = off_policy.tensors_of(group.train_list[0])
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert [name for name in moved if not name.startswith("target_")] == ["n_updates"]


@ALL
def test_a_resumed_policy_goes_on_where_the_rates_were(off_policy, kind):
    whole, resumed = make(off_policy, kind), make(off_policy, kind)
    update(whole, kind), update(whole, kind)
    resumed.import_state(copy.deepcopy(whole.export_state()))
    assert set(rates_of(resumed).values()) == {0.0075}
    update(resumed, kind)
    assert set(rates_of(resumed).values()) == {0.005}


def test_a_changed_rate_is_lowered_as_far_as_the_run_has_come(off_policy):
    first = make(off_policy, "DQNPolicy")
    update(first, "DQNPolicy"), update(first, "DQNPolicy")
    resumed = make(off_policy, "DQNPolicy", optim={"lr": 0.1})
    resumed.import_state(copy.deepcopy(first.export_state()))
    update(resumed, "DQNPolicy")
    assert rates_of(resumed) == {"q": pytest.approx(0.05)}


def test_rates_stay_unless_asked(off_policy):
    group = off_policy.make("DQNPolicy", space=SPACES["DQNPolicy"], optim={"lr": 0.01})
    metrics = update(group, "DQNPolicy")
    assert rates_of(group) == {"q": 0.01}
    assert not [name for name in metrics if name.endswith("learning_rate")]
