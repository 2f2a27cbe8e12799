"""A2C: one step along the policy gradient, the same that Stable-Baselines3 takes."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import A2C
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.utils import configure_logger
from tensordict import TensorDict

from rlightning.config import PolicyConfig, TrainConfig
from rlightning.config.base import resolve_extras
from rlightning.errors import ConfigError
from rlightning.policy.a2c_policy import A2CPolicy
from rlightning.types import EnvMeta

ROWS = 20


def make_policy(optim=None, observation_space=None, action_space=None, **train):
    torch.manual_seed(0)
    train_config = TrainConfig.from_dict({"max_epochs": 10, "seed": 0} | train)
    config = PolicyConfig.from_dict({"type": "A2CPolicy", "optim_cfg": optim})
    config.train_config = train_config
    resolve_extras(train_config, [A2CPolicy.TrainExtras], path="train", owner="A2CPolicy")
    policy = A2CPolicy(config, "train")
    observation_space = observation_space or spaces.Box(-1, 1, (3,))
    meta = EnvMeta("e-0", action_space or spaces.Discrete(2), observation_space, 4)
    policy.init_train(train_config, meta)
    return policy


def rows(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "observation": torch.randn(ROWS, 3, generator=generator),
        "action": torch.randint(2, (ROWS,), generator=generator),
        "log_prob": torch.full((ROWS,), float(np.log(0.5))),
        "value": torch.zeros(ROWS),
        "advantage": torch.randn(ROWS, generator=generator),
        "return": torch.randn(ROWS, generator=generator),
    }


def parameters_of(policy):
    return torch.cat([p.detach().flatten() for p in policy.parameters()])


def pairs(ours, theirs):
    """Yield our linear layers beside Stable-Baselines3's."""
    actor = [layer for layer in ours.actor_trunk.modules() if isinstance(layer, torch.nn.Linear)]
    critic = [layer for layer in ours.critic_trunk.modules() if isinstance(layer, torch.nn.Linear)]
    extractor = theirs.mlp_extractor
    yield from zip(actor, [extractor.policy_net[0], extractor.policy_net[2]], strict=True)
    yield from zip(critic, [extractor.value_net[0], extractor.value_net[2]], strict=True)
    yield ours.value_head, theirs.value_net
    head = ours.action_head
    yield (head.mean if hasattr(head, "mean") else head.logits), theirs.action_net


@pytest.mark.parametrize("task", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("optimizer", ["rmsprop", "adam"])
@pytest.mark.parametrize("normalize", [True, False])
def test_updates_are_those_of_stable_baselines3(task, optimizer, normalize):
    env = make_vec_env(task, n_envs=4, seed=0)
    theirs = A2C(
        "MlpPolicy",
        env,
        n_steps=5,
        ent_coef=0.01,
        normalize_advantage=normalize,
        use_rms_prop=optimizer == "rmsprop",
        policy_kwargs={"optimizer_kwargs": {"eps": 1e-5}} if optimizer == "adam" else None,
        seed=0,
        device="cpu",
    )
    theirs.set_logger(configure_logger(verbose=0))
    _, callback = theirs._setup_learn(10_000)
    ours = make_policy(
        {"optimizer": optimizer},
        env.observation_space,
        env.action_space,
        entropy_coef=0.01,
        normalize_advantage=normalize,
    )
    with torch.no_grad():
        for layer, other in pairs(ours.actor_critic, theirs.policy):
            layer.weight.copy_(other.weight)
            layer.bias.copy_(other.bias)
    for _ in range(3):
        theirs.collect_rollouts(env, callback, theirs.rollout_buffer, n_rollout_steps=5)
        buffer = theirs.rollout_buffer
        columns = {
            "observation": buffer.observations,
            "action": buffer.actions,
            "log_prob": buffer.log_probs,
            "value": buffer.values,
            "advantage": buffer.advantages,
            "return": buffer.returns,
        }
        data = {
            name: torch.from_numpy(column.copy()).flatten(0, 1) for name, column in columns.items()
        }
        if isinstance(env.action_space, spaces.Discrete):
            data["action"] = data["action"].reshape(ROWS).long()
        ours.update_dataset(data)
        metrics = ours.train()
        theirs.train()
        for layer, other in pairs(ours.actor_critic, theirs.policy):
            assert torch.allclose(layer.weight, other.weight, atol=1e-5)
            assert torch.allclose(layer.bias, other.bias, atol=1e-5)
        logged = theirs.logger.name_to_value
        assert metrics["policy_loss"] == pytest.approx(logged["train/policy_loss"], abs=1e-5)
        assert metrics["value_loss"] == pytest.approx(logged["train/value_loss"], rel=1e-4)
        assert -metrics["entropy"] == pytest.approx(logged["train/entropy_loss"], rel=1e-5)


def test_a_rollout_is_learned_from_in_one_step():
    policy, steps = make_policy(), []
    policy.optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    policy.update_dataset(rows())
    metrics = policy.train()
    assert len(steps) == 1
    assert {"policy_loss", "value_loss", "entropy", "grad_norm"} <= metrics.keys()
    assert "clip_fraction" not in metrics


def test_the_learning_rate_falls_where_asked():
    policy = make_policy({"lr": 0.01}, anneal_lr=True, max_epochs=4)
    policy.update_dataset(rows())
    rates = [policy.train()["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([0.01, 0.0075, 0.005, 0.0025, 0.0])


def test_a_key_of_ppo_is_unknown_to_it():
    config = TrainConfig.from_dict({"max_epochs": 1, "target_kl": 0.1})
    with pytest.raises(ConfigError, match="unknown key 'target_kl'"):
        resolve_extras(config, [A2CPolicy.TrainExtras], path="train", owner="A2CPolicy")


def test_training_state_goes_on_where_it_was_saved():
    through, first, second = (make_policy() for _ in range(3))
    for policy in (through, first):
        policy.update_dataset(rows(1))
        policy.train()
    second.import_weights(0, first.export_weights())
    second.import_training_state(first.export_training_state())
    for policy in (through, second):
        policy.update_dataset(rows(2))
        policy.train()
    assert torch.equal(parameters_of(through), parameters_of(second))


def test_it_takes_images_and_vectors():
    space = spaces.Dict(
        {"camera": spaces.Box(0, 255, (36, 38, 3), np.uint8), "joints": spaces.Box(-1, 1, (3,))}
    )
    policy = make_policy(observation_space=space)
    data = rows()
    space.seed(0)
    samples = [space.sample() for _ in range(ROWS)]
    batch = gym.vector.utils.create_empty_array(space, ROWS)
    batch = gym.vector.utils.concatenate(space, samples, batch)
    columns = {name: torch.from_numpy(value) for name, value in batch.items()}
    data["observation"] = TensorDict(columns, batch_size=[ROWS])
    before = parameters_of(policy)
    policy.update_dataset(data)
    policy.train()
    assert not torch.equal(before, parameters_of(policy))
