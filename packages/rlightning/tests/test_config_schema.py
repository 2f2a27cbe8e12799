"""Every default of the documented configuration, and what is accepted, refused and suggested."""

import pytest

from rlightning.config import (
    BufferConfig,
    ClusterConfig,
    Config,
    EnvConfig,
    ExtensibleConfig,
    LogConfig,
    MainConfig,
    PlacementConfig,
    PolicyConfig,
    ResourcePoolConfig,
    SamplerConfig,
    StorageConfig,
    StrictConfig,
    TrainConfig,
    WeightBufferConfig,
    resolve_extras,
)
from rlightning.errors import ConfigError


def smallest(**changes):
    """The smallest configuration that is valid."""
    return {
        "env": {"name": "cp", "backend": "mujoco", "task": "CartPole-v1"},
        "buffer": {"type": "RolloutBuffer", "capacity": 1000},
        "policy": {"type": "MyPolicy"},
        "train": {"max_epochs": 2},
    } | changes


DEFAULTS = {
    EnvConfig: (
        {"name": "a", "backend": "b", "task": "t"},
        {
            "num_workers": 1,
            "num_envs": 1,
            "max_episode_steps": None,
            "num_cpus": 1,
            "num_gpus": 0.0,
            "env_kwargs": Config(),
            "init_params": None,
            "policy_setup": "widowx",
            "evaluate_cfg": None,
        },
    ),
    SamplerConfig: ({"type": "all"}, {}),
    StorageConfig: (
        {},
        {"mode": "circular", "type": "unified", "unit": "transition", "device": "cpu"},
    ),
    BufferConfig: (
        {"type": "RolloutBuffer", "capacity": 8},
        {
            "sampler": None,
            "auto_truncate_episode": False,
            "storage": StorageConfig(),
            "node_affinity_env": False,
            "node_affinity_train": False,
        },
    ),
    WeightBufferConfig: ({}, {"type": "WeightBuffer", "buffer_strategy": "Double"}),
    PolicyConfig: (
        {"type": "P"},
        {
            "backend": None,
            "train_num_gpus": 1.0,
            "eval_num_gpus": 1.0,
            "model_cfg": None,
            "optim_cfg": None,
            "rollout_mode": "sync",
            "router_type": "simple",
            "weight_buffer": WeightBufferConfig(),
            "policy_kwargs": None,
            "train_config": None,
        },
    ),
    TrainConfig: (
        {"max_epochs": 1},
        {
            "batch_size": 64,
            "max_rollout_steps": -1,
            "max_eval_rollout_steps": -1,
            "lr": 0.0003,
            "parallel": None,
            "eval_interval": -1,
            "save_interval": -1,
            "save_dir": None,
            "seed": None,
            "warm_up_rollout_steps": 10,
            "rollout_epoch": 1,
            "warm_up": False,
            "reset_each_rollout": False,
            "mini_batch_size": None,
            "micro_batch_size": None,
            "update_epoch": None,
            "ppo_epochs": None,
            "minibatch_size": None,
            "clip_ratio": None,
            "entropy_coef": None,
            "fused_update": None,
        },
    ),
    LogConfig: (
        {},
        {
            "level": "DEBUG",
            "backend": "tensorboard",
            "project": "default_project",
            "name": "default_exp",
            "log_dir": "./runs",
            "mode": None,
        },
    ),
    ResourcePoolConfig: ({"name": "p", "num_node": 1, "num_gpus": [1]}, {"node_ids": None}),
    PlacementConfig: ({}, {"mode": "auto", "strategy": "default", "env_strategy": "default"}),
    ClusterConfig: (
        {},
        {
            "ray_address": "auto",
            "train_worker_num": 1,
            "eval_worker_num": 1,
            "train_each_gpu_num": 1.0,
            "eval_each_gpu_num": 1.0,
            "buffer_worker_num": 1,
            "remote_train": True,
            "remote_eval": True,
            "remote_storage": True,
            "remote_env": True,
            "is_colocated": False,
            "enable_offload": False,
            "rollout_env_interaction": None,
            "placement": PlacementConfig(),
            "resource_pool": None,
        },
    ),
    MainConfig: (
        smallest(),
        {
            "engine": None,
            "cluster": None,
            "log": LogConfig(),
            "debug": True,
            "verbose": True,
            "imports": [],
        },
    ),
}


@pytest.mark.parametrize("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_defaults_are_the_documented_ones(kind):
    required, expected = DEFAULTS[kind]
    section = kind.from_dict(required)
    for name, value in expected.items():
        assert getattr(section, name) == value, name
        assert section.get(name) == section[name] == value
    assert set(kind.model_fields) >= required.keys() | expected.keys()


@pytest.mark.parametrize("kind", DEFAULTS, ids=lambda kind: kind.__name__)
def test_required_keys_are_required(kind):
    required, _ = DEFAULTS[kind]
    for name in required:
        rest = {key: value for key, value in required.items() if key != name}
        with pytest.raises(ConfigError, match=f"field '{name}': Field required"):
            kind.from_dict(rest)


def test_policies_read_the_train_section_and_files_do_not_repeat_it():
    config = MainConfig.from_dict(smallest())
    assert config.policy.train_config is config.train
    assert "train_config" not in config.to_dict()["policy"]


def test_a_single_environment_is_a_list_of_one():
    assert [env.task for env in MainConfig.from_dict(smallest()).env] == ["CartPole-v1"]


def test_yaml_round_trip(tmp_path):
    config = MainConfig.from_dict(
        smallest(
            imports=["mypol"],
            cluster={
                "resource_pool": [{"name": "a", "num_node": 1, "num_gpus": 1, "train": "0-3"}]
            },
            policy={"type": "P", "model_cfg": {"hidden": [64, 64], "deep": {"er": None}}},
        )
    )
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    again = MainConfig.load_yaml(path)
    assert again == config
    assert again.to_dict() == config.to_dict()
    assert again.policy.model_cfg.deep.er is None
    assert again.cluster.resource_pool[0].train == "0-3"


def test_load_yaml_without_a_file_gives_the_defaults_and_refuses_a_list(tmp_path):
    assert LogConfig.load_yaml() == LogConfig()
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(ConfigError, match="expected a mapping, found a list"):
        LogConfig.load_yaml(tmp_path / "list.yaml")
    (tmp_path / "empty.yaml").write_text("")
    assert LogConfig.load_yaml(tmp_path / "empty.yaml") == LogConfig()


def test_errors_list_every_field_with_its_path():
    wrong = smallest(
        train={"max_epochs": "many"},
        env=[{"name": "a", "backend": "b", "task": "t", "num_envs": 0}],
    )
    with pytest.raises(ConfigError) as caught:
        MainConfig.from_dict(wrong)
    text = str(caught.value)
    assert "field 'train.max_epochs'" in text
    assert "field 'env.0.num_envs'" in text
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("changes", "place", "suggestion"),
    [
        ({"engin": "syncrl"}, "MainConfig", "'engine'"),
        ({"envs": []}, "MainConfig", "'env'"),
        ({"log": {"levl": "INFO"}}, "log", "'level'"),
        ({"cluster": {"remote_storge": True}}, "cluster", "'remote_storage'"),
        ({"cluster": {"placement": {"stratgy": "default"}}}, "cluster.placement", "'strategy'"),
        (
            {"buffer": {"type": "R", "capacity": 1, "storage": {"devic": "cpu"}}},
            "buffer.storage",
            "'device'",
        ),
        (
            {"buffer": {"type": "R", "capacity": 1, "sampler": {"type": "all", "tpye": 1}}},
            "buffer.sampler",
            "'type'",
        ),
        (
            {"policy": {"type": "P", "weight_buffer": {"buffer_stratgy": "None"}}},
            "policy.weight_buffer",
            "'buffer_strategy'",
        ),
    ],
)
def test_misspelt_keys_are_refused_with_a_suggestion(changes, place, suggestion):
    with pytest.raises(ConfigError) as caught:
        MainConfig.from_dict(smallest(**changes))
    text = str(caught.value)
    assert f"field '{place}': unknown key" in text
    assert f"Did you mean {suggestion}" in text
    assert "Known keys: " in text


@pytest.mark.parametrize("value", [1, {"lr": 1.0}], ids=["number", "section"])
def test_the_train_section_is_set_in_its_own_place_alone(value):
    with pytest.raises(ConfigError, match=r"policy\.train_config.*set train\.KEY instead"):
        MainConfig.from_dict(smallest(policy={"type": "P", "train_config": value}))


def test_known_keys_are_those_that_users_write():
    section = MainConfig.from_dict(smallest(policy={"type": "P", "tpye": 1})).policy
    with pytest.raises(ConfigError) as caught:
        resolve_extras(section, [], path="policy", owner="P.Extras")
    assert "optim_cfg" in str(caught.value)
    assert "train_config" not in str(caught.value)


def test_free_form_sections_accept_any_key_and_nest():
    config = MainConfig.from_dict(
        smallest(
            policy={
                "type": "P",
                "model_cfg": {"copy": 1, "model_type": "x", "deep": {"list": [{"a": 1}]}},
                "optim_cfg": {"lr": 0.1},
                "policy_kwargs": {"algorithm": "PPO"},
                "backend": {"backend_name": "x"},
            },
            env={
                "name": "a",
                "backend": "b",
                "task": "t",
                "env_kwargs": {"goal": 3},
                "init_params": {"x": 1},
                "evaluate_cfg": {"y": 2},
            },
        )
    )
    model = config.policy.model_cfg
    assert model.get("copy") == model["copy"] == 1
    assert model.model_type == "x"
    assert isinstance(model.deep, Config)
    assert model.deep.list == [{"a": 1}]
    assert dict(**config.policy.optim_cfg) == {"lr": 0.1}
    assert {**config.env[0].env_kwargs} == {"goal": 3}
    assert "goal" in config.env[0].env_kwargs
    assert model.get("absent", 7) == 7
    with pytest.raises(KeyError, match=r"'dep' is not set\. Did you mean 'deep'"):
        model["dep"]


def test_a_key_that_is_no_string_is_named_not_a_type_error():
    with pytest.raises(ConfigError, match="keys must be strings"):
        MainConfig.from_dict(smallest(policy={"type": "P", "model_cfg": {"deep": {1: 2}}}))


@pytest.mark.parametrize(
    ("given", "level"),
    [("WARINING", "WARNING"), ("WARNING", "WARNING"), ("info", "INFO"), ("CRITICAL", "CRITICAL")],
)
def test_log_levels_are_accepted(given, level):
    assert LogConfig.from_dict({"level": given}).level == level


def test_a_wrong_log_level_lists_the_right_ones():
    with pytest.raises(ConfigError, match="expected one of DEBUG, INFO, WARNING, ERROR, CRITICAL"):
        LogConfig.from_dict({"level": "LOUD"})


@pytest.mark.parametrize(
    "field", ["max_rollout_steps", "max_eval_rollout_steps", "eval_interval", "save_interval"]
)
@pytest.mark.parametrize("value", [0, -2])
def test_intervals_are_positive_or_minus_one(field, value):
    with pytest.raises(ConfigError, match=f"found {value}; expected a positive number, or -1"):
        TrainConfig.from_dict({"max_epochs": 1, field: value})


def test_sharded_storage_on_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="set device: cpu"):
        StorageConfig.from_dict({"type": "sharded", "device": "cuda"})
    assert StorageConfig.from_dict({"type": "sharded"}).type == "sharded"


@pytest.mark.parametrize(
    ("strategy", "kind"), [("Shared", "CPUWeightBuffer"), ("Sharded", "ShardedWeightBuffer")]
)
def test_weight_strategies_have_their_class(strategy, kind):
    with pytest.raises(ConfigError, match=f"buffer_strategy {strategy} needs type: {kind}"):
        WeightBufferConfig.from_dict({"buffer_strategy": strategy})
    fine = WeightBufferConfig.from_dict({"buffer_strategy": strategy, "type": kind})
    assert fine.buffer_strategy == strategy


def test_the_none_strategy_is_the_string():
    assert WeightBufferConfig.from_dict({"buffer_strategy": "None"}).buffer_strategy == "None"
    with pytest.raises(ConfigError, match="buffer_strategy"):
        WeightBufferConfig.from_dict({"buffer_strategy": None})


# ---- keys that registered classes declare -------------------------------------------------------


class Nested(Config):
    width: int = 3


class Extras(Config):
    gamma: float = 0.99
    net: Nested = Nested()
    clip: float | None = 0.2


def section(**keys):
    return ExtensibleConfig.from_dict(keys)


def test_declared_keys_get_their_defaults():
    config = section(gamma=0.5)
    resolve_extras(config, [Extras], path="buffer", owner="Mine.Extras")
    assert (config.gamma, config.clip, config.net.width) == (0.5, 0.2, 3)
    assert config.to_dict() == {"gamma": 0.5, "net": {"width": 3}, "clip": 0.2}


def test_declared_nested_sections_are_read_from_mappings():
    config = section(net={"width": 8})
    resolve_extras(config, [Extras], path="buffer", owner="Mine.Extras")
    assert isinstance(config.net, Nested)
    assert config.net.width == 8


def test_null_stays_where_the_declaration_has_null_and_gives_way_where_not():
    config = section(clip=None, gamma=None)
    resolve_extras(config, [Extras], path="buffer", owner="Mine.Extras")
    assert (config.clip, config.gamma) == (None, 0.99)


def test_resolving_twice_changes_nothing():
    config = section(net={"width": 8}, clip=0.3)
    resolve_extras(config, [Extras], path="buffer", owner="Mine.Extras")
    first = config.to_dict()
    resolve_extras(config, [Extras], path="buffer", owner="Mine.Extras")
    assert config.to_dict() == first


def test_keys_that_nobody_declares_are_refused_naming_the_class():
    with pytest.raises(ConfigError) as caught:
        resolve_extras(section(gama=1), [Extras], path="buffer", owner="Mine.Extras")
    text = str(caught.value)
    assert text.startswith("`buffer`: unknown key 'gama'. Did you mean 'gamma'?")
    assert "(Mine.Extras)" in text


def test_unknown_keys_pass_where_others_declare_later():
    config = section(later=1)
    resolve_extras(config, [Extras], path="train", owner="P", refuse_others=False)
    assert (config.later, config.gamma) == (1, 0.99)


def test_a_declared_key_of_the_wrong_type_names_its_path():
    with pytest.raises(ConfigError, match=r"field 'buffer\.gamma'"):
        resolve_extras(section(gamma="x"), [Extras], path="buffer", owner="Mine.Extras")


def test_a_class_gives_defaults_to_the_sections_own_optional_fields():
    class Mine(Config):
        ppo_epochs: int = 4

    unset = TrainConfig.from_dict({"max_epochs": 1})
    resolve_extras(unset, [Mine], path="train", owner="P")
    assert unset.ppo_epochs == 4
    given = TrainConfig.from_dict({"max_epochs": 1, "ppo_epochs": 9})
    resolve_extras(given, [Mine], path="train", owner="P")
    assert given.ppo_epochs == 9


def test_two_classes_may_declare_keys_of_one_section():
    class Other(Config):
        horizon: int = 5

    config = section()
    resolve_extras(config, [Extras, Other], path="train", owner="P and E")
    assert (config.gamma, config.horizon) == (0.99, 5)


def test_open_and_strict_sections_differ():
    assert Config.from_dict({"anything": 1}).anything == 1
    with pytest.raises(ConfigError, match="unknown key 'anything'"):
        StrictConfig.from_dict({"anything": 1})
