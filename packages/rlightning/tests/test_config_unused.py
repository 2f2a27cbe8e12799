"""Keys that are set and that a run does not read are said, once, and no others."""

import pytest

from rlightning.build import check_config
from rlightning.config import MainConfig, compose_main
from rlightning.config.compose import CONFIGS
from rlightning.config.unused import unused_keys
from rlightning.policy.a2c_policy import A2CPolicy
from rlightning.policy.base_policy import BasePolicy
from rlightning.policy.ppo_policy import PPOPolicy
from rlightning.utils.registry import BUFFERS, ENVS, POLICIES

REPLAY = {"buffer": {"type": "ReplayBuffer", "capacity": 100}, "policy": {"type": "SACPolicy"}}
PRIORITY = "buffer.priority_exponent changes nothing: buffer.prioritized is false"


def said(config):
    check_config(config)
    return list(
        unused_keys(
            config,
            policy=POLICIES.get(config.policy.type),
            buffer=BUFFERS.get(config.buffer.type),
            envs=[ENVS.get(entry.backend) for entry in config.env],
        )
    )


def configuration(changes):
    base = {
        "engine": "syncrl",
        "env": {"name": "e", "backend": "gymnasium", "task": "CartPole-v1"},
        "buffer": {"type": "RolloutBuffer", "capacity": 100},
        "policy": {"type": "PPOPolicy"},
        "train": {"max_epochs": 1},
    }
    for name, value in changes.items():
        base[name] = base.get(name, {}) | value if isinstance(value, dict) else value
    return MainConfig.from_dict(base)


def replay(**buffer):
    return REPLAY | {"buffer": REPLAY["buffer"] | buffer}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"train": {"lr": 1.0}}, "train.lr changes nothing: PPOPolicy does not read it; set"),
        ({"train": {"mini_batch_size": 8}}, "train.mini_batch_size changes nothing: PPOPolicy"),
        (REPLAY | {"train": {"clip_ratio": 0.1}}, "train.clip_ratio changes nothing: SACPolicy"),
        ({"policy": {"policy_kwargs": {"a": 1}}}, "policy.policy_kwargs changes nothing: PPOP"),
        ({"env": {"policy_setup": "google"}}, "env.policy_setup changes nothing: backend gymn"),
        ({"train": {"batch_size": 32}}, "train.batch_size changes nothing: the sampler `all`"),
        ({"train": {"warm_up_rollout_steps": 3}}, "train.warm_up_rollout_steps changes nothing"),
        (
            {"engine": "asyncrl", "train": {"rollout_epoch": 2}},
            "train.rollout_epoch changes nothing: engine asyncrl collects all the time",
        ),
        (
            REPLAY | {"engine": "supervised", "train": {"reset_each_rollout": True}},
            "train.reset_each_rollout changes nothing: engine supervised collects nothing",
        ),
        (replay(priority_exponent=0.9), PRIORITY),
        (replay(gamma=0.9), "buffer.gamma changes nothing: buffer.n_step is 1; the discount"),
        (
            {"policy": {"weight_buffer": {"type": "CPUWeightBuffer", "buffer_strategy": "None"}}},
            "policy.weight_buffer.type changes nothing",
        ),
        ({"log": {"mode": "offline"}}, "log.mode changes nothing: log.backend tensorboard"),
        ({"buffer": {"node_affinity_env": True}}, "buffer.node_affinity_env changes nothing"),
        (
            {"cluster": {"rollout_env_interaction": "batched"}},
            "cluster.rollout_env_interaction changes nothing",
        ),
    ],
    ids=lambda value: value.split()[0] if isinstance(value, str) else "",
)
def test_a_key_that_changes_nothing_is_said(changes, sentence):
    (found,) = said(configuration(changes))
    assert found.startswith(sentence)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train": {"minibatch_size": 8, "ppo_epochs": 2, "clip_ratio": 0.1}},
        {"engine": "asyncrl", "train": {"batch_size": 32}},
        {"buffer": {"sampler": {"type": "batch"}}, "train": {"batch_size": 32}},
        {"train": {"warm_up": True, "warm_up_rollout_steps": 3}},
        replay(prioritized=True, priority_exponent=0.9),
        replay(n_step=3, gamma=0.9),
        replay(gamma=0.9) | {"train": {"gamma": 0.9}},
        {"log": {"backend": "wandb", "mode": "offline"}},
        {"engine": "eval", "train": {"lr": 1.0, "checkpoint": "c"}},
    ],
    ids=str,
)
def test_a_key_that_is_read_is_not(changes):
    assert said(configuration(changes)) == []


def test_what_a_policy_of_the_users_own_reads_is_not_known():
    class Own(PPOPolicy):
        """Reads `train.lr` where nobody sees it."""

    Own.__module__ = "my_project"
    config = configuration({"train": {"lr": 1.0}})
    check_config(config)
    kinds = {"buffer": BUFFERS.get("RolloutBuffer"), "envs": [ENVS.get("gymnasium")]}
    assert list(unused_keys(config, policy=Own, **kinds)) == []


@pytest.mark.parametrize(
    ("base", "module", "words"),
    [
        (PPOPolicy, "rlightning.policy.p", "a gradient step's rows are train.minibatch_size"),
        (PPOPolicy, "my_project", "a gradient step's rows are train.minibatch_size"),
        (A2CPolicy, "rlightning.policy.p", "Policy takes them whole"),
        (BasePolicy, "my_project", "unless Policy reads the key itself; for batches of that size"),
    ],
    ids=str,
)
def test_what_a_gradient_step_takes_is_said_as_the_policy_takes_it(base, module, words):
    kind = type("Policy", (base,), {"__module__": module})
    config = configuration({"train": {"batch_size": 32}})
    check_config(config)
    kinds = {"buffer": BUFFERS.get("RolloutBuffer"), "envs": [ENVS.get("gymnasium")]}
    (found,) = [item for item in unused_keys(config, policy=kind, **kinds) if ".batch" in item]
    assert words in found
    assert ("minibatch_size" in found) == ("minibatch_size" in base.TrainExtras.model_fields)


@pytest.mark.parametrize("name", sorted(path.stem for path in CONFIGS.glob("*.yaml")))
def test_a_shipped_configuration_says_nothing_in_vain_also_as_a_run_wrote_it(name):
    config = compose_main(CONFIGS, name)
    assert said(config) == []
    assert said(MainConfig.from_dict(config.to_dict())) == []
