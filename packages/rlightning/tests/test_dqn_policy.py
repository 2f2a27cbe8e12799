"""DQN: double and plain targets, dueling networks, epsilon, clipped gradients."""

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlightning.policy.off_policy import Transitions
from rlightning.types import BatchedData, EnvRet

SPACE = spaces.Discrete(3, start=2)


def transitions(rows=4, **columns):
    columns = {
        "observation": torch.randn(rows, 3),
        "action": torch.tensor([2, 3, 4, 2]),
        "reward": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "discount": torch.tensor([0.9, 0.0, 0.81, 0.9]),
        "next_observation": torch.randn(rows, 3),
        "weight": None,
    } | columns
    return Transitions(**columns)


@pytest.mark.parametrize(("double", "value"), [(True, 5.0), (False, 8.0)])
def test_double_targets_judge_what_the_learning_network_chose(off_policy, double, value):
    """The learning network prefers action 2, which the slow one values 5; its best is 8."""
    policy = off_policy.make("DQNPolicy", space=SPACE, double=double).train_list[0]
    off_policy.constant(policy.q_network, [0.0, 1.0, 9.0])
    off_policy.constant(policy.target_network, [8.0, 7.0, 5.0])
    target = policy._target(transitions())
    expected = [1 + 0.9 * value, 2.0, 3 + 0.81 * value, 4 + 0.9 * value]
    assert target.tolist() == pytest.approx(expected)
    assert not target.requires_grad


def test_the_loss_is_of_the_action_taken_counted_from_the_space_s_start(off_policy):
    """Values 0, 1, 9 of actions 2, 3, 4; targets [5.5, 2, 7.05, 8.5] minus those, Huber."""
    policy = off_policy.make("DQNPolicy", space=SPACE).train_list[0]
    off_policy.constant(policy.q_network, [0.0, 1.0, 9.0])
    off_policy.constant(policy.target_network, [8.0, 7.0, 5.0])
    metrics, td_error = policy.update(transitions(), 0)
    errors = np.array([0 - 5.5, 1 - 2.0, 9 - 7.05, 0 - 8.5])
    assert td_error.tolist() == pytest.approx(errors.tolist(), rel=1e-5)
    huber = np.where(abs(errors) < 1, errors**2 / 2, abs(errors) - 0.5).mean()
    assert metrics["q_loss"].item() == pytest.approx(huber, rel=1e-5)


def test_the_gradient_s_norm_is_clipped(off_policy):
    policy = off_policy.make("DQNPolicy", space=SPACE, max_grad_norm=0.01).train_list[0]
    policy.update(transitions(reward=torch.full((4,), 100.0)), 0)
    norm = torch.stack([p.grad.norm() for p in policy.q_network.parameters()]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-3)


def test_the_target_network_is_copied_at_its_interval(off_policy):
    policy = off_policy.make("DQNPolicy", space=SPACE, target_interval=3).train_list[0]
    equal = []
    for step in range(6):
        policy.update(transitions(), step)
        pairs = zip(policy.target_network.parameters(), policy.q_network.parameters(), strict=True)
        equal.append(all(torch.equal(slow, fast) for slow, fast in pairs))
    assert equal == [False, False, True] * 2


def test_a_dueling_network_learns_through_value_and_advantages(off_policy):
    policy = off_policy.make("DQNPolicy", space=SPACE, model={"dueling": True}).train_list[0]
    before = off_policy.tensors_of(policy.q_network)
    assert before["body.2.bias"].shape == (4,)
    policy.update(transitions(), 0)
    assert (off_policy.tensors_of(policy.q_network)["body.2.bias"] != before["body.2.bias"]).all()


def test_epsilon_falls_linearly_with_gradient_steps_and_travels_with_the_weights(off_policy):
    options = {"epsilon_start": 0.9, "epsilon_end": 0.1, "epsilon_updates": 4}
    group = off_policy.make("DQNPolicy", space=SPACE, **options)
    actor = group.eval_list[0]
    found = [actor.epsilon]
    for done in (1, 2, 4, 100):
        group.train_list[0].n_updates.fill_(done)
        group.sync_weights()
        found.append(actor.epsilon)
    assert found == pytest.approx([1.0, 0.7, 0.5, 0.1, 0.1])
    actor.deterministic = True
    assert actor.epsilon == 0.0


def test_actions_are_random_as_often_as_epsilon_says(off_policy):
    group = off_policy.make(
        "DQNPolicy", space=SPACE, n_envs=6000, epsilon_end=0.3, epsilon_updates=1
    )
    off_policy.constant(group.train_list[0].q_network, [0.0, 1.0, 0.0])
    group.train_list[0].n_updates.fill_(5)
    group.sync_weights()
    no = np.zeros(6000, bool)
    observation = np.zeros((6000, 3), np.float32)
    env_ret = EnvRet("e-0", observation, np.zeros(6000, np.float32), no, no.copy())
    action = group.rollout_batch(BatchedData(["e-0"], [env_ret]))["e-0"].action.numpy()
    share = np.bincount(action, minlength=5)[2:] / 6000
    assert share == pytest.approx([0.1, 0.8, 0.1], abs=0.02)


def test_images_are_taken_too(off_policy):
    image = spaces.Box(0, 255, (36, 38, 3), np.uint8)
    model = {"image_size": [36, 36], "image_features": 4}
    group = off_policy.make("DQNPolicy", space=SPACE, observation_space=image, model=model)
    observation = torch.randint(0, 255, (4, 36, 38, 3), dtype=torch.uint8)
    batch = transitions(observation=observation, next_observation=observation)
    assert group.train_list[0].update(batch, 0)[0]["q_loss"].isfinite()
