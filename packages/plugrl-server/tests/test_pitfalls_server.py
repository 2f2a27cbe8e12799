"""Soft actor-critic: its temperature, and a run that goes on without its transitions."""

import logging

import numpy as np
import pytest
import torch

from plugrl_server.algorithm.registration import make_algo
from plugrl_server.algorithm.sac import SACConfig
from plugrl_server.policy.registration import make_policy
from plugrl_server.policy.sac import SACPolicyConfig
from plugrl_server.testing import IdentityTask, train_in_process


def sac(**changes):
    torch.manual_seed(0)
    np.random.seed(0)
    policy = SACPolicyConfig(state_dim=2, action_dim=2, hidden_dims=(8, 8), device="cpu")
    sizes = {"buffer_size": 5000, "batch_size": 64, "learning_starts": 100, "update_every": 4}
    config = SACConfig(**{**sizes, "global_steps": 400, "update_to_data_ratio": 0.5, **changes})
    algorithm = make_algo("sac", make_policy("sac-policy", policy), config=config)
    algorithm.init_optimizers()
    return algorithm


@pytest.mark.parametrize("entropy", [1e6, -1e6])
def test_the_temperature_falls_above_the_target_entropy_and_is_always_positive(entropy):
    """Three thousand steps of the temperature alone, ten times as long as usual, all one way."""
    algorithm = sac(q_lr=1e-2)
    log_alpha, step = algorithm.policy.log_alpha, algorithm._step
    algorithm._critic_loss = lambda batch: torch.zeros(())
    algorithm._actor_loss = lambda obs: (torch.zeros(()), torch.tensor(entropy))
    skipped = {"q": [0.0], "policy": [0.0, 0.0]}
    algorithm._step = lambda name, *args: skipped.get(name) or step(name, *args)
    algorithm.config.policy_frequency = algorithm.config.target_network_frequency = 300
    before = log_alpha.item()
    for _ in range(10):  # each takes three hundred steps
        algorithm.updates += 299
        algorithm._update({"obs": torch.zeros(1, 2), "reward": torch.zeros(1)})
        assert log_alpha.exp().item() > 0
    assert abs(log_alpha.item() - before) > 3
    assert (log_alpha.item() < before) == (entropy > 0)


def test_a_run_that_goes_on_without_its_transitions_collects_before_it_learns(caplog):
    """A hundred new steps again, not a batch of 64 drawn from the first 4; and no burst after."""
    first = sac(save_replay_buffer=False)
    train_in_process(first, IdentityTask(4, discrete=False))
    assert first.global_step == 400
    resumed = sac(save_replay_buffer=False, global_steps=600)
    with caplog.at_level(logging.WARNING):
        resumed.load_checkpoint(first.create_checkpoint())
    assert "holds no transitions" in caplog.text
    stored, sample = [], resumed.replay.sample

    def watched(batch_size):
        stored.append(len(resumed.replay))
        return sample(batch_size)

    resumed.replay.sample = watched
    train_in_process(resumed, IdentityTask(4, discrete=False))
    assert resumed.global_step == 600
    assert stored[0] == 100
    assert resumed.updates - first.updates == 51  # steps 500 to 600, one for two
    assert max(stored.count(size) for size in stored) <= 2


def test_a_run_that_goes_on_with_its_transitions_learns_at_once():
    first = sac()
    train_in_process(first, IdentityTask(4, discrete=False))
    resumed = sac(global_steps=440)
    resumed.load_checkpoint(first.create_checkpoint())
    train_in_process(resumed, IdentityTask(4, discrete=False))
    assert resumed.updates - first.updates == 20
