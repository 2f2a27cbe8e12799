"""DQN: double and plain targets, dueling networks, epsilon, clipped gradients."""

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

SPACE = spaces.Discrete(3, start=2)


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
        "action": torch.tensor([2, 3, 4, 2]),
        "reward": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "discount": torch.tensor([0.9, 0.0, 0.81, 0.9]),
        "next_observation": torch.randn(rows, 3),
        "weight": None,
    } | columns
    return Transitions(**columns)


@pytest.mark.parametrize(("double", "value"), [(True, 5.0), (False, 8.0)])
def test_double_targets_judge_what_the_learning_network_chose(double, value):
    """The learning network prefers action 2, which the slow one values 5; its best is 8."""
    policy = make("DQNPolicy", space=SPACE, double=double).train_list[0]
    constant(policy.q_network, [0.0, 1.0, 9.0])
    constant(policy.target_network, [8.0, 7.0, 5.0])
    target = policy._target(transitions())
    expected = [1 + 0.9 * value, 2.0, 3 + 0.81 * value, 4 + 0.9 * value]
    assert target.tolist() == pytest.approx(expected)
    assert not target.requires_grad


def test_the_loss_is_of_the_action_taken_counted_from_the_space_s_start():
    """Values 0, 1, 9 of actions 2, 3, 4; targets [5.5, 2, 7.05, 8.5] minus those, Huber."""
    policy = make("DQNPolicy", space=SPACE).train_list[0]
    constant(policy.q_network, [0.0, 1.0, 9.0])
    constant(policy.target_network, [8.0, 7.0, 5.0])
    metrics, td_error = policy.update(transitions(), 0)
    errors = np.array([0 - 5.5, 1 - 2.0, 9 - 7.05, 0 - 8.5])
    assert td_error.tolist() == pytest.approx(errors.tolist(), rel=1e-5)
    huber = np.where(abs(errors) < 1, errors**2 / 2, abs(errors) - 0.5).mean()
    assert metrics["q_loss"].item() == pytest.approx(huber, rel=1e-5)


def test_the_gradient_s_norm_is_clipped():
    policy = make("DQNPolicy", space=SPACE, max_grad_norm=0.01).train_list[0]
    policy.update(transitions(reward=torch.full((4,), 100.0)), 0)
    norm = torch.stack([p.grad.norm() for p in policy.q_network.parameters()]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-3)


def test_the_target_network_is_copied_at_its_interval():
    policy = make("DQNPolicy", space=SPACE, target_interval=3).train_list[0]
    equal = []
    for step in range(6):
        policy.update(transitions(), step)
        pairs = zip(policy.target_network.parameters(), policy.q_network.parameters(), strict=True)
        equal.append(all(torch.equal(slow, fast) for slow, fast in pairs))
    assert equal == [False, False, True] * 2


def test_a_dueling_network_learns_through_value_and_advantages():
    policy = make("DQNPolicy", space=SPACE, model={"dueling": True}).train_list[0]
    before = tensors_of(policy.q_network)
    assert before["body.2.bias"].shape == (4,)
    policy.update(transitions(), 0)
    assert (tensors_of(policy.q_network)["body.2.bias"] != before["body.2.bias"]).all()


def test_epsilon_falls_linearly_with_gradient_steps_and_travels_with_the_weights():
    options = {"epsilon_start": 0.9, "epsilon_end": 0.1, "epsilon_updates": 4}
    group = make("DQNPolicy", space=SPACE, **options)
    actor = group.eval_list[0]
    found = [actor.epsilon]
    for done in (1, 2, 4, 100):
        group.train_list[0].n_updates.fill_(done)
        group.sync_weights()
        found.append(actor.epsilon)
    assert found == pytest.approx([1.0, 0.7, 0.5, 0.1, 0.1])
    actor.deterministic = True
    assert actor.epsilon == 0.0


def test_actions_are_random_as_often_as_epsilon_says():
    group = make("DQNPolicy", space=SPACE, n_envs=6000, epsilon_end=0.3, epsilon_updates=1)
    constant(group.train_list[0].q_network, [0.0, 1.0, 0.0])
    group.train_list[0].n_updates.fill_(5)
    group.sync_weights()
    no = np.zeros(6000, bool)
    observation = np.zeros((6000, 3), np.float32)
    env_ret = EnvRet("e-0", observation, np.zeros(6000, np.float32), no, no.copy())
    action = group.rollout_batch(BatchedData(["e-0"], [env_ret]))["e-0"].action.numpy()
    share = np.bincount(action, minlength=5)[2:] / 6000
    assert share == pytest.approx([0.1, 0.8, 0.1], abs=0.02)


def test_images_are_taken_too():
    image = spaces.Box(0, 255, (36, 38, 3), np.uint8)
    model = {"image_size": [36, 36], "image_features": 4}
    group = make("DQNPolicy", space=SPACE, observation_space=image, model=model)
    observation = torch.randint(0, 255, (4, 36, 38, 3), dtype=torch.uint8)
    batch = transitions(observation=observation, next_observation=observation)
    assert group.train_list[0].update(batch, 0)[0]["q_loss"].isfinite()
