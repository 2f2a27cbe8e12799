"""The composition root: workers, functions, buffers and what a configuration cannot ask for."""

import logging

import pytest

from rlightning.buffer import DataBuffer
from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
    define_env_instance_cfgs,
)
from rlightning.config import BufferConfig, Config, EnvConfig, MainConfig, PolicyConfig
from rlightning.engine import BaseEngine
from rlightning.env import BaseEnv, EnvGroup
from rlightning.errors import ConfigError
from rlightning.policy import BasePolicy
from rlightning.types import EnvMeta, PolicyRole
from rlightning.utils.registry import BUFFERS, ENGINE, ENVS, POLICIES
from rlightning.weights import WeightBuffer


class Toy(BaseEnv):
    class Extras(Config):
        gravity: float = 9.81

    def get_metadata(self):
        return EnvMeta(env_id=self.env_id, num_envs=self.num_envs)

    def reset(self, *args, **kwargs): ...
    def step(self, policy_resp): ...


class ToyPolicy(BasePolicy):
    class Extras(Config):
        horizon: int = 5

    class TrainExtras(Config):
        target_kl: float = 0.01
        ppo_epochs: int = 4

    def construct_network(self, env_meta, *args, **kwargs): ...
    def setup_optimizer(self, optim_cfg): ...
    def rollout_step(self, env_ret, **kwargs): ...
    def postprocess(self, env_ret=None, policy_resp=None): ...
    def update_dataset(self, data): ...
    def train(self, *args, **kwargs): ...


class ToyEngine(BaseEngine):
    class TrainExtras(Config):
        patience: int = 3

    def run(self): ...
    def rollout(self): ...
    def update_dataset(self): ...
    def train(self): ...


class ToyBuffer(BUFFERS.get("RolloutBuffer")):
    class Extras(BUFFERS.get("RolloutBuffer").Extras):
        half_life: float = 2.0


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    for registry, name, kind in (
        (ENVS, "toy", Toy),
        (POLICIES, "ToyPolicy", ToyPolicy),
        (ENGINE, "toy", ToyEngine),
        (BUFFERS, "ToyBuffer", ToyBuffer),
    ):
        monkeypatch.setitem(registry.module_dict, name, kind)


def env_config(**keys):
    return EnvConfig.from_dict({"name": "a", "backend": "toy", "task": "t", **keys})


def main_config(**changes):
    sections = {
        "engine": "toy",
        "env": {"name": "a", "backend": "toy", "task": "t"},
        "buffer": {"type": "ToyBuffer", "capacity": 4},
        "policy": {"type": "ToyPolicy"},
        "train": {"max_epochs": 1},
    }
    return MainConfig.from_dict(sections | changes)


def test_keys_of_ones_own_classes_get_defaults_and_values():
    config = main_config(
        train={"max_epochs": 1, "patience": 9}, policy={"type": "ToyPolicy", "horizon": 7}
    )
    check_config(config)
    assert config.env[0].gravity == 9.81
    assert config.policy.horizon == 7
    assert (config.train.target_kl, config.train.patience, config.train.ppo_epochs) == (0.01, 9, 4)
    assert config.buffer.half_life == 2.0
    assert config.policy.train_config is config.train
    again = MainConfig.from_dict(config.to_dict())
    check_config(again)
    assert again.to_dict() == config.to_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": {"type": "ToyPolicy", "horizn": 7}}, "key 'horizn'.*ToyPolicy"),
        ({"train": {"max_epochs": 1, "patienc": 7}}, "`train`: unknown key 'patienc'.*ToyEngine"),
        ({"buffer": {"type": "ToyBuffer", "capacity": 4, "halflife": 1}}, "'half_life'.*ToyBuffer"),
        (
            {"env": {"name": "a", "backend": "toy", "task": "t", "gravty": 1}},
            "`env`: unknown key 'gravty'.*Toy",
        ),
        ({"policy": {"type": "ToyPolicy", "horizon": "far"}}, r"field 'policy\.horizon'"),
    ],
)
def test_keys_that_no_class_declares_are_refused_naming_the_class(changes, message):
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        check_config(main_config(**changes))


def test_each_entry_becomes_its_number_of_workers_with_their_index():
    group = build_env_group([env_config(num_workers=2, num_envs=3), env_config(name="b")])
    assert isinstance(group, EnvGroup)
    assert [env.num_envs for env in group.env_list] == [3, 3, 1]
    assert [env_id.rsplit("-", 1)[1] for env_id in group.env_ids] == ["0", "1", "2"]
    assert len(set(group.env_ids)) == 3
    assert group.env_list[0].config is not group.env_list[1].config
    assert group.env_list[0].config.gravity == 9.81


def test_one_entry_needs_no_list():
    assert build_env_group(env_config()).size() == 1


def test_functions_are_shared_or_given_per_entry():
    def one(response): ...
    def two(response): ...

    entries = [env_config(num_workers=2), env_config()]
    assert [e._preprocess_fn for e in build_env_group(entries, one).env_list] == [one] * 3
    functions = [e._preprocess_fn for e in build_env_group(entries, [one, two]).env_list]
    assert functions == [one, one, two]
    with pytest.raises(ConfigError, match="1 functions for 2 env entries"):
        build_env_group(entries, [one])
    with pytest.raises(ValueError, match="at least one"):
        build_env_group([])


def test_copies_of_a_workers_configuration_are_independent():
    copies = define_env_instance_cfgs(env_config(env_kwargs={"x": 1}), 2)
    copies[0].env_kwargs.x = 5
    assert copies[1].env_kwargs.x == 1


def test_a_policy_group_has_one_instance_of_each_role_and_a_buffer():
    config = PolicyConfig.from_dict({"type": "ToyPolicy"})
    group = build_policy_group("ToyPolicy", config)
    assert [policy.role_type for policy in (*group.train_list, *group.eval_list)] == [
        PolicyRole.TRAIN,
        PolicyRole.EVAL,
    ]
    assert isinstance(group.weight_buffer, WeightBuffer)
    assert config.horizon == 5


def test_a_policy_group_for_a_cluster_is_refused_by_name():
    config = main_config(cluster={})
    with pytest.raises(ConfigError, match="cluster"):
        build_policy_group("ToyPolicy", config.policy, config.cluster)


def test_a_buffer_is_built_by_name_or_path():
    config = BufferConfig.from_dict({"type": "ToyBuffer", "capacity": 4})
    assert isinstance(build_data_buffer("ToyBuffer", config), ToyBuffer)
    path = "rlightning.buffer.rollout_buffer:RolloutBuffer"
    plain = BufferConfig.from_dict({"type": path, "capacity": 4})
    assert isinstance(build_data_buffer(path, plain), DataBuffer)


@pytest.mark.parametrize(("kind", "lines"), [("sharded", 1), ("unified", 0)])
def test_a_local_run_says_that_its_sharded_storage_is_one(kind, lines, caplog):
    config = BufferConfig.from_dict(
        {"type": "RolloutBuffer", "capacity": 4, "storage": {"type": kind}}
    )
    with caplog.at_level(logging.INFO, logger="rlightning"):
        build_data_buffer("RolloutBuffer", config)
    said = [
        record for record in caplog.records if "one storage per buffer worker" in record.message
    ]
    assert len(said) == lines


def test_an_engine_is_built_by_its_name_and_keys_that_change_nothing_are_said(tmp_path, caplog):
    from rlightning.utils.logger import close_logger

    config = main_config(log={"log_dir": str(tmp_path), "level": "ERROR"})
    config.buffer.node_affinity_env = True
    try:
        group = build_policy_group("ToyPolicy", config.policy)
        env_group = build_env_group(config.env)
        with caplog.at_level(logging.WARNING, logger="rlightning"):
            engine = build_engine(config, env_group, group)
        (said,) = [record.message for record in caplog.records]
        assert said.startswith("buffer.node_affinity_env changes nothing")
        assert type(engine) is ToyEngine
        assert config.train.patience == 3
        assert engine.run_context.run_dir.parent == tmp_path / "default_project"
    finally:
        close_logger()


def test_the_public_paths_lead_to_the_same_functions():
    from rlightning.launch import launch
    from rlightning.utils import builders
    from rlightning.utils import config as config_door
    from rlightning.utils import launch as launch_door

    assert builders.build_env_group is build_env_group
    assert builders.build_engine is build_engine
    assert config_door.MainConfig is MainConfig
    assert launch_door.launch is launch
