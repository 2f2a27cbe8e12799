"""TD3: smoothed targets of the lower critic, a delayed policy, noise while exploring."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rlightning.config import PolicyConfig, TrainConfig
from rlightning.config.base import resolve_extras
from rlightning.policy.off_policy import Transitions
from rlightning.policy.policy_group import PolicyGroup
from rlightning.types import BatchedData, EnvMeta, EnvRet
from rlightning.utils.registry import POLICIES

VECTOR = spaces.Box(-np.inf, np.inf, (3,))

BOX = spaces.Box(-2, 2, (2,))


def make(kind, *, space, n_envs=4, observation_space=None, model=None, optim=None, **train):
    """One TRAIN and one EVAL instance with equal weights."""
    policy_class = POLICIES.get(kind)
    config = PolicyConfig.from_dict(
        {"type": kind, "model_cfg": {"hidden_sizes": [8]} | (model or {}), "optim_cfg": optim}
    )
    config.train_config = TrainConfig.from_dict(
        {"max_epochs": 10, "max_rollout_steps": 8, "batch_size": 4, "seed": 0} | train
    )
    resolve_extras(config.train_config, [policy_class.TrainExtras], path="train", owner=kind)
    torch.manual_seed(0)
    group = PolicyGroup([policy_class(config, "train")], [policy_class(config, "eval")], config)
    group.init(config.train_config, EnvMeta("e-0", space, observation_space or VECTOR, n_envs))
    group.sync_weights()
    return group


def constant(network, *answers):
    """Make linear output layers answer the same numbers whatever comes in."""
    layers = [module for module in network.modules() if isinstance(module, nn.Linear)]
    outputs = [layer for layer in layers if layer.out_features == len(answers[0])]
    with torch.no_grad():
        for layer, answer in zip(outputs, answers, strict=True):
            layer.weight.zero_()
            layer.bias.copy_(torch.tensor(answer))


def tensors_of(policy):
    return {name: t.clone() for name, t in nn.Module.state_dict(policy).items()}


def transitions(rows=4, **columns):
    columns = {
        "observation": torch.randn(rows, 3),
        "action": torch.zeros(rows, 2),
        "reward": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "discount": torch.tensor([0.9, 0.0, 0.81, 0.9]),
        "next_observation": torch.randn(rows, 3),
        "weight": None,
    } | columns
    return Transitions(**columns)


def test_the_target_is_the_lower_slow_critic_s_value():
    policy = make("TD3Policy", space=BOX).train_list[0]
    constant(policy.target_critic, [7.0], [6.0])
    target = policy._target(transitions())
    assert target.tolist() == pytest.approx([1 + 5.4, 2.0, 3 + 4.86, 4 + 5.4])
    assert not target.requires_grad


def test_target_actions_are_the_slow_actor_s_with_clipped_noise():
    policy = make("TD3Policy", space=BOX, target_noise=10.0, target_noise_clip=0.25).train_list[0]
    with torch.no_grad():
        policy.actor.body[-1].bias.fill_(9.0)  # the learning actor is elsewhere
    seen = []
    policy.target_critic.register_forward_hook(lambda module, inputs, out: seen.append(inputs[1]))
    batch = transitions()
    policy._target(batch)
    with torch.no_grad():
        slow = policy.target_actor(batch.next_observation)
    moved = (seen[0] - slow).abs()
    assert moved.max().item() == pytest.approx(0.25, abs=1e-6)
    assert moved.median() > 0.2


def test_td_errors_and_the_critic_loss_are_hand_computed():
    policy = make("TD3Policy", space=BOX).train_list[0]
    constant(policy.critic, [1.0], [3.0])
    constant(policy.target_critic, [7.0], [6.0])
    metrics, td_error = policy.update(transitions(), 1)
    target = np.array([6.4, 2.0, 7.86, 9.4])
    loss = ((target - 1) ** 2).mean() + ((target - 3) ** 2).mean()
    assert metrics["critic_loss"].item() == pytest.approx(loss, rel=1e-5)
    errors = (abs(target - 1) + abs(target - 3)) / 2
    assert td_error.tolist() == pytest.approx(errors.tolist(), rel=1e-5)


def test_policy_and_slow_networks_move_every_second_step():
    policy = make("TD3Policy", space=BOX, tau=0.25).train_list[0]
    before = tensors_of(policy)
    metrics, _ = policy.update(transitions(), 0)
    first = tensors_of(policy)
    assert "actor_loss" in metrics
    assert not torch.equal(first["actor.body.0.weight"], before["actor.body.0.weight"])
    for name in before:
        assert not name.startswith("target_") or torch.equal(first[name], before[name]), name
    metrics, _ = policy.update(transitions(), 1)
    second = tensors_of(policy)
    assert "actor_loss" not in metrics
    assert torch.equal(second["actor.body.0.weight"], first["actor.body.0.weight"])
    for name in [name for name in before if name.startswith("target_")]:
        fast = second[name.removeprefix("target_")]
        assert torch.allclose(second[name], before[name] + 0.25 * (fast - before[name])), name


def test_the_actor_s_step_gives_critics_no_gradient():
    policy = make("TD3Policy", space=BOX).train_list[0]
    policy._update_actor(torch.randn(4, 3))
    assert all(parameter.grad is None for parameter in policy.critic.parameters())
    assert any(p.grad.abs().sum() > 0 for p in policy.actor.parameters())


def test_exploration_noise_is_in_units_of_half_the_box():
    """Standard deviation 0.1 of actions in [-2, 2] is 0.2; evaluation has none."""
    group = make("TD3Policy", space=BOX, n_envs=4000)
    policy = group.train_list[0]
    policy.n_updates.fill_(1)
    group.sync_weights()
    no = np.zeros(4000, bool)
    observation = np.zeros((4000, 3), np.float32)
    env_ret = EnvRet("e-0", observation, np.zeros(4000, np.float32), no, no.copy())
    batch = BatchedData(["e-0"], [env_ret])
    assert group.rollout_batch(batch)["e-0"].action.std(0).tolist() == pytest.approx(
        [0.2, 0.2], abs=0.01
    )
    exact = group.rollout_batch(batch, deterministic=True)["e-0"].action
    assert exact.std(0).max() < 1e-6
