"""Configurations: every documented key can be set, kept and read back; wrong sizes are refused."""

import types
import typing

import pytest
import yaml
from gymnasium import spaces
from pydantic import BaseModel, PositiveInt

from rlightning.build import build_policy_group, check_config
from rlightning.config import Config, MainConfig, PolicyConfig, TrainConfig, compose_main
from rlightning.config.base import resolve_extras
from rlightning.errors import ConfigError
from rlightning.launch import launch
from rlightning.policy.ppo_config import PPOModelConfig, PPOOptimConfig, PPOTrainConfig
from rlightning.policy.ppo_policy import PPOPolicy
from rlightning.testing import check_policy
from rlightning.types import EnvMeta

SMALLEST = {
    "engine": "syncrl",
    "env": [{"name": "e", "backend": "gymnasium", "task": "CartPole-v1"}],
    "buffer": {"type": "RolloutBuffer", "capacity": 128},
    "policy": {"type": "PPOPolicy"},
    "train": {"max_epochs": 1},
    "cluster": {},
}

SPECIAL = {
    "buffer.storage.device": "cuda",  # not together with sharded storage
    "buffer.storage.type": "unified",
    "policy.weight_buffer.type": "CPUWeightBuffer",  # the class that its strategy needs
    "policy.weight_buffer.buffer_strategy": "Shared",
    "cluster.placement.mode": "auto",  # manual needs pools
    "log.level": "ERROR",
    "policy.activation": "relu",
    "policy.image_size": (48, 40),
    "policy.betas": (0.8, 0.99),
    "policy.compile": False,  # needs a compiler
}


def another_value(path, annotation, default):
    """Return a valid value of a field, where there is one another than its default."""
    if path in SPECIAL:
        return SPECIAL[path]
    options = [annotation]
    while any(typing.get_origin(item) in (typing.Union, types.UnionType) for item in options):
        options = [part for item in options for part in typing.get_args(item) or [item]]
    kind = next(item for item in options if item is not types.NoneType)
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)[-1 if typing.get_args(kind)[-1] != default else 0]
    if kind is bool:
        return not default
    if kind is float:
        return 0.75
    if kind is int:
        return 7 if default != 7 else 8
    return {str: "text", list[str]: ["json"], list[int]: [9], list[PositiveInt]: [9]}[kind]


def documented_keys(model, prefix=""):
    """Yield the dotted path and another value of every key of a section and those below it."""
    for name, field in model.model_fields.items():
        if field.exclude or name in ("env", "resource_pool"):
            continue
        path = f"{prefix}{name}"
        sections = [
            kind
            for kind in (field.annotation, *typing.get_args(field.annotation))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        if not sections:
            yield path, another_value(path, field.annotation, field.default)
        elif sections[0] is Config:
            yield f"{path}.mine", 5  # free-form
        else:
            yield from documented_keys(sections[0], f"{path}.")


def value_at(config, path):
    for part in path.split("."):
        config = config[int(part)] if part.isdigit() else config[part]
    return config


def every_key():
    env = MainConfig.model_fields["env"].annotation
    pairs = [*documented_keys(MainConfig), *documented_keys(typing.get_args(env)[0], "env.0.")]
    return {path: value for path, value in pairs if path not in ("policy.type", "buffer.type")}


def test_every_documented_key_can_be_set_on_the_command_line(tmp_path):
    """All of them at once, `a.b=c` each, over a file that leaves most of them out."""
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(SMALLEST))
    wanted = every_key()
    assert len(wanted) > 80
    overrides = [f"{path}={value!r}".replace(" ", "") for path, value in wanted.items()]
    config = compose_main(tmp_path, "a", overrides)
    assert {path: value_at(config, path) for path in wanted} == wanted


def test_every_documented_key_survives_the_file_that_a_run_and_its_checkpoints_keep(tmp_path):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(SMALLEST))
    overrides = [f"{path}={value!r}".replace(" ", "") for path, value in every_key().items()]
    config = compose_main(tmp_path, "a", overrides)
    (tmp_path / "kept.yaml").write_text(config.to_yaml())
    assert MainConfig.load_yaml(tmp_path / "kept.yaml") == config


def ppo_options():
    """Every key of PPO with another value than its default, one at a time."""
    for section, model in (
        ("model_cfg", PPOModelConfig),
        ("optim_cfg", PPOOptimConfig),
        ("train", PPOTrainConfig),
    ):
        for name, field in model.model_fields.items():
            yield section, name, another_value(f"policy.{name}", field.annotation, field.default)


@pytest.mark.parametrize(("section", "name", "value"), list(ppo_options()), ids=str)
def test_a_policy_with_any_option_comes_back_from_its_checkpoint(section, name, value):
    sections = {"model_cfg": {}, "optim_cfg": {}, "train": {"max_epochs": 1}}
    sections[section][name] = value
    train = TrainConfig.from_dict(sections.pop("train"))
    config = PolicyConfig.from_dict({"type": "PPOPolicy", **sections})
    config.train_config = train
    resolve_extras(train, [PPOPolicy.TrainExtras], path="train", owner="PPOPolicy")
    meta = EnvMeta("e-0", spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (3,)), 4)
    check_policy(PPOPolicy, config, meta)
    group = build_policy_group("PPOPolicy", config)
    group.init(train, meta)
    read = {
        "model_cfg": lambda: config.model_cfg[name],
        "optim_cfg": lambda: config.optim_cfg[name],
        "train": lambda: group.train_list[0].hyper[name],
    }[section]()
    assert read == value


@pytest.mark.parametrize("buffer", [{"type": "ReplayBuffer"}, {"sampler": {"type": "batch"}}])
def test_a_batch_that_the_buffer_can_never_hold_is_refused_before_anything_is_built(buffer):
    """It would never be sampled: a replay buffer of 100 rows and batches of 128."""
    sizes = {"buffer": {"type": "RolloutBuffer", **buffer, "capacity": 100}, "cluster": None}
    train = {"max_epochs": 1, "batch_size": 128}
    with pytest.raises(ConfigError, match=r"batch_size is 128 and buffer\.capacity is 100"):
        check_config(MainConfig.from_dict(SMALLEST | sizes | {"train": train}))
    train["batch_size"] = 100
    check_config(MainConfig.from_dict(SMALLEST | sizes | {"train": train}))


def test_of_file_default_and_command_line_the_command_line_wins_then_the_file(tmp_path):
    text = yaml.safe_dump(SMALLEST | {"cluster": None, "train": {"max_epochs": 1, "seed": 5}})
    (tmp_path / "a.yaml").write_text(text)
    config = compose_main(tmp_path, "a", ["train.max_epochs=9"])
    found = config.train.max_epochs, config.train.seed, config.train.eval_episodes
    assert found == (9, 5, 10)


@pytest.mark.parametrize("key", ["train.eval_episods=3", "polcy.type=x", "log.levle=INFO"])
def test_a_misspelt_key_ends_the_command_with_code_2_and_what_was_meant(tmp_path, capsys, key):
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(SMALLEST | {"cluster": None}))
    with pytest.raises(SystemExit) as caught:
        launch(print, tmp_path, ["--config-name", "a", key])
    assert caught.value.code == 2
    assert "Did you mean" in capsys.readouterr().err
