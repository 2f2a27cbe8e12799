"""SAC: targets, losses and directions, the learned and the fixed temperature."""

import copy
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlightning.policy.off_policy import Transitions
from rlightning.types import BatchedData, EnvRet

BOX = spaces.Box(np.float32([0.0, -3.0]), np.float32([5.0, -1.0]))


def transitions(rows=4, **columns):
    columns = {
        "observation": torch.randn(rows, 3),
        "action": torch.tensor([[2.5, -2.0]]).repeat(rows, 1),
        "reward": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "discount": torch.tensor([0.9, 0.0, 0.81, 0.9]),
        "next_observation": torch.randn(rows, 3),
        "weight": None,
    } | columns
    return Transitions(**columns)


def test_the_target_is_the_lower_slow_critic_s_soft_value(off_policy):
    """Slow critics say 7 and 5, log-probability -2, temperature 0.5: the soft value is 6."""
    policy = off_policy.make("SACPolicy", space=BOX, temperature=0.5).train_list[0]
    off_policy.constant(policy.target_critic, [7.0], [5.0])
    policy._sample = lambda observation: (torch.zeros(4, 2), torch.full((4,), -2.0))
    target = policy._target(transitions())
    assert target.tolist() == pytest.approx([1 + 5.4, 2.0, 3 + 4.86, 4 + 5.4])
    assert not target.requires_grad


def test_td_errors_and_the_critic_loss_are_hand_computed(off_policy):
    """Critics say 1 and 3, targets are [6.4, 2, 7.86, 9.4]."""
    policy = off_policy.make("SACPolicy", space=BOX, temperature=0.5).train_list[0]
    off_policy.constant(policy.critic, [1.0], [3.0])
    off_policy.constant(policy.target_critic, [7.0], [5.0])
    original = policy._sample
    policy._sample = lambda observation: (torch.zeros(4, 2), torch.full((4,), -2.0))
    policy._update_actor = lambda observation: {}
    metrics, td_error = policy.update(transitions(), 0)
    target = np.array([6.4, 2.0, 7.86, 9.4])
    loss = ((target - 1) ** 2).mean() + ((target - 3) ** 2).mean()
    assert metrics["critic_loss"].item() == pytest.approx(loss, rel=1e-5)
    errors = (abs(target - 1) + abs(target - 3)) / 2
    assert td_error.tolist() == pytest.approx(errors.tolist(), rel=1e-5)
    assert original(torch.zeros(2, 3))[0].shape == (2, 2)


def test_slow_critics_follow_by_tau_at_their_interval(off_policy):
    policy = off_policy.make("SACPolicy", space=BOX, tau=0.25, target_interval=2).train_list[0]
    before = off_policy.tensors_of(policy.target_critic)
    policy.update(transitions(), 0)
    unmoved = off_policy.tensors_of(policy.target_critic)
    assert all(torch.equal(unmoved[name], tensor) for name, tensor in before.items())
    policy.update(transitions(), 1)
    after, fast = off_policy.tensors_of(policy.target_critic), off_policy.tensors_of(policy.critic)
    for name, tensor in after.items():
        assert torch.allclose(tensor, before[name] + 0.25 * (fast[name] - before[name])), name


def test_critics_see_actions_scaled_to_minus_one_and_one(off_policy):
    policy = off_policy.make("SACPolicy", space=BOX).train_list[0]
    seen = []
    policy.critic.register_forward_hook(lambda module, inputs, out: seen.append(inputs[1]))
    corners = torch.tensor([[0.0, -3.0], [5.0, -1.0], [2.5, -2.0], [5.0, -3.0]])
    policy.update(transitions(action=corners), 0)
    assert seen[0].tolist() == [[-1, -1], [1, 1], [0, 0], [1, -1]]


def test_log_probabilities_are_those_of_the_tanh_of_a_gaussian(off_policy):
    """Against torch's own transformed distribution, in double precision."""
    policy = off_policy.make("SACPolicy", space=BOX).train_list[0]
    observation = torch.randn(50, 3)
    action, log_prob = policy._sample(observation)
    mean, log_std = (x.double() for x in policy.actor(observation))
    base = torch.distributions.Normal(mean, log_std.exp())
    squashed = torch.distributions.TransformedDistribution(
        base, [torch.distributions.TanhTransform()]
    )
    expected = squashed.log_prob(action.double()).sum(-1)
    assert torch.allclose(log_prob.double(), expected, atol=1e-3)


def test_the_actor_s_step_gives_critics_no_gradient(off_policy):
    policy = off_policy.make("SACPolicy", space=BOX).train_list[0]
    before = off_policy.tensors_of(policy.critic)
    policy._update_actor(torch.randn(4, 3))
    assert all(parameter.grad is None for parameter in policy.critic.parameters())
    assert all(torch.equal(before[n], t) for n, t in off_policy.tensors_of(policy.critic).items())
    assert any(p.grad.abs().sum() > 0 for p in policy.actor.parameters())


@pytest.mark.parametrize(("target", "direction"), [(-100.0, -1), (100.0, 1)])
def test_the_temperature_falls_while_entropy_is_above_its_target(off_policy, target, direction):
    policy = off_policy.make("SACPolicy", space=BOX, target_entropy=target).train_list[0]
    metrics, _ = policy.update(transitions(), 0)
    moved = float(policy.log_alpha.detach())
    assert math.copysign(1, moved) == direction
    assert metrics["temperature"].item() == pytest.approx(math.exp(moved))


def test_the_target_entropy_is_minus_the_number_of_action_dimensions(off_policy):
    assert off_policy.make("SACPolicy", space=BOX).train_list[0].target_entropy == -2.0
    chosen = off_policy.make("SACPolicy", space=BOX, target_entropy=-0.5).train_list[0]
    assert chosen.target_entropy == -0.5


@pytest.mark.parametrize("learned", [True, False])
def test_learned_and_fixed_temperatures_travel_and_survive_a_checkpoint(
    off_policy, tmp_path, learned
):
    options = {"space": BOX, "temperature": 0.2, "learn_temperature": learned}
    group = off_policy.make("SACPolicy", **options)
    policy = group.train_list[0]
    policy.update(transitions(), 0)
    assert (float(policy.temperature) == pytest.approx(0.2, rel=1e-6)) is not learned
    group.sync_weights()
    assert torch.equal(group.eval_list[0].log_alpha, policy.log_alpha)
    policy.save_checkpoint(str(tmp_path / "p.pt"))
    state = copy.deepcopy(policy.export_training_state())
    again = off_policy.make("SACPolicy", **options).train_list[0]
    again.load_checkpoint(str(tmp_path / "p.pt"))
    again.import_training_state(state)
    assert torch.equal(again.log_alpha, policy.log_alpha)
    batch = transitions()
    for each in (policy, again):
        torch.manual_seed(5)
        each.update(batch, 1)
    for name, tensor in off_policy.tensors_of(policy).items():
        assert torch.equal(tensor, off_policy.tensors_of(again)[name]), name


def test_the_actor_learns_at_its_interval(off_policy):
    policy = off_policy.make("SACPolicy", space=BOX, actor_interval=3).train_list[0]
    learned = ["actor_loss" in policy.update(transitions(), step)[0] for step in range(6)]
    assert learned == [True, False, False] * 2


def test_deterministic_actions_are_the_tanh_of_the_mean_in_the_environment_s_units(off_policy):
    group = off_policy.make("SACPolicy", space=BOX)
    observation = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    no = np.zeros(4, bool)
    env_ret = EnvRet("e-0", observation, np.zeros(4, np.float32), no, no.copy())
    batch = BatchedData(["e-0"], [env_ret])
    action = group.rollout_batch(batch, deterministic=True)["e-0"].action
    with torch.no_grad():
        unit = group.eval_list[0].actor(torch.as_tensor(observation))[0].tanh()
    expected = torch.tensor([2.5, -2.0]) + torch.tensor([2.5, 1.0]) * unit
    assert torch.allclose(action, expected)
