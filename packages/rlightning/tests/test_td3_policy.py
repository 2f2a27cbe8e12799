"""TD3: smoothed targets of the lower critic, a delayed policy, noise while exploring."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlightning.policy.off_policy import Transitions
from rlightning.types import BatchedData, EnvRet

BOX = spaces.Box(-2, 2, (2,))


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


def test_the_target_is_the_lower_slow_critic_s_value(off_policy):
    policy = off_policy.make("TD3Policy", space=BOX).train_list[0]
    off_policy.constant(policy.target_critic, [7.0], [6.0])
    target = policy._target(transitions())
    assert target.tolist() == pytest.approx([1 + 5.4, 2.0, 3 + 4.86, 4 + 5.4])
    assert not target.requires_grad


def test_target_actions_are_the_slow_actor_s_with_clipped_noise(off_policy):
    policy = off_policy.make(
        "TD3Policy", space=BOX, target_noise=10.0, target_noise_clip=0.25
    ).train_list[0]
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


def test_td_errors_and_the_critic_loss_are_hand_computed(off_policy):
    policy = off_policy.make("TD3Policy", space=BOX).train_list[0]
    off_policy.constant(policy.critic, [1.0], [3.0])
    off_policy.constant(policy.target_critic, [7.0], [6.0])
    metrics, td_error = policy.update(transitions(), 1)
    target = np.array([6.4, 2.0, 7.86, 9.4])
    loss = ((target - 1) ** 2).mean() + ((target - 3) ** 2).mean()
    assert metrics["critic_loss"].item() == pytest.approx(loss, rel=1e-5)
    errors = (abs(target - 1) + abs(target - 3)) / 2
    assert td_error.tolist() == pytest.approx(errors.tolist(), rel=1e-5)


def test_policy_and_slow_networks_move_every_second_step(off_policy):
    policy = off_policy.make("TD3Policy", space=BOX, tau=0.25).train_list[0]
    before = off_policy.tensors_of(policy)
    metrics, _ = policy.update(transitions(), 0)
    first = off_policy.tensors_of(policy)
    assert "actor_loss" in metrics
    assert not torch.equal(first["actor.body.0.weight"], before["actor.body.0.weight"])
    for name in before:
        assert not name.startswith("target_") or torch.equal(first[name], before[name]), name
    metrics, _ = policy.update(transitions(), 1)
    second = off_policy.tensors_of(policy)
    assert "actor_loss" not in metrics
    assert torch.equal(second["actor.body.0.weight"], first["actor.body.0.weight"])
    for name in [name for name in before if name.startswith("target_")]:
        fast = second[name.removeprefix("target_")]
        assert torch.allclose(second[name], before[name] + 0.25 * (fast - before[name])), name


def test_the_actor_s_step_gives_critics_no_gradient(off_policy):
    policy = off_policy.make("TD3Policy", space=BOX).train_list[0]
    policy._update_actor(torch.randn(4, 3))
    assert all(parameter.grad is None for parameter in policy.critic.parameters())
    assert any(p.grad.abs().sum() > 0 for p in policy.actor.parameters())


def test_exploration_noise_is_in_units_of_half_the_box(off_policy):
    """Standard deviation 0.1 of actions in [-2, 2] is 0.2; evaluation has none."""
    group = off_policy.make("TD3Policy", space=BOX, n_envs=4000)
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
