"""The ``cluster`` section: what it says together with ``policy``, and what it refuses."""

import pytest

from rlightning.config import ClusterConfig, EnvConfig, MainConfig, ResourcePoolConfig
from rlightning.config.cluster import read_indices
from rlightning.errors import ConfigError


def run(cluster=None, **policy):
    return MainConfig.from_dict(
        {
            "env": {"name": "a", "backend": "b", "task": "t"},
            "buffer": {"type": "R", "capacity": 1},
            "policy": {"type": "P", **policy},
            "train": {"max_epochs": 1},
            "cluster": cluster,
        }
    )


@pytest.mark.parametrize(
    ("text", "indices"),
    [("3", [3]), ("0-3", [0, 1, 2, 3]), ("0-1, 8 - 9,5", [0, 1, 8, 9, 5]), ("2-2", [2])],
)
def test_an_index_string_is_numbers_and_ranges(text, indices):
    assert read_indices(text) == indices


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected numbers and ranges"),
        ("0-", "expected numbers and ranges"),
        ("a", "expected numbers and ranges"),
        ("-1", "expected numbers and ranges"),
        ("3-1", "its smaller end first"),
        ("0-2, 1", "each number once"),
    ],
)
def test_an_index_string_that_cannot_be_meant_is_refused(text, message):
    with pytest.raises(ConfigError, match=message):
        ResourcePoolConfig.from_dict({"name": "p", "num_node": 1, "num_gpus": 8, "train": text})


def test_a_pool_says_its_gpus_per_node_and_its_indices():
    pool = ResourcePoolConfig.from_dict({"name": "p", "num_node": 2, "num_gpus": 4, "train": 0})
    assert pool.gpus_per_node() == [4, 4]
    assert (pool.indices("train"), pool.indices("eval")) == ([0], [])
    listed = ResourcePoolConfig.from_dict({"name": "p", "num_node": 2, "num_gpus": [4, 2]})
    assert listed.gpus_per_node() == [4, 2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_gpus": [4]}, "num_gpus has 1 entries and num_node is 2"),
        ({"node_ids": ["a"]}, "node_ids has 1 entries and num_node is 2"),
        ({"num_gpus": -1}, "expected no negative number"),
        ({"num_gpus": [1, -1]}, "expected no negative number"),
        ({"trian": "0"}, "unknown key 'trian'. Did you mean 'train'"),
    ],
)
def test_a_pool_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ResourcePoolConfig.from_dict({"name": "p", "num_node": 2, "num_gpus": 4} | changes)


@pytest.mark.parametrize(
    ("cluster", "policy"),
    [
        ({"train_each_gpu_num": 0.5}, {}),
        ({}, {"train_num_gpus": 0.5}),
        ({"train_each_gpu_num": 0.5}, {"train_num_gpus": 0.5}),
    ],
)
def test_the_gpus_of_a_role_are_one_setting_wherever_it_is_given(cluster, policy):
    config = run(cluster, **policy)
    assert config.cluster.train_each_gpu_num == config.policy.train_num_gpus == 0.5
    assert config.cluster.eval_each_gpu_num == config.policy.eval_num_gpus == 1.0
    again = MainConfig.from_dict(config.to_dict())
    assert again.cluster.train_each_gpu_num == again.policy.train_num_gpus == 0.5


def test_two_numbers_for_one_setting_are_refused():
    with pytest.raises(ConfigError, match=r"cluster.eval_each_gpu_num is 1.0 and policy.eval_num"):
        run({"eval_each_gpu_num": 1.0}, eval_num_gpus=0.25)
    assert run(None, eval_num_gpus=0.25).policy.eval_num_gpus == 0.25


@pytest.mark.parametrize("value", [-1, 1.5])
def test_a_number_of_gpus_that_no_worker_can_have_is_refused(value):
    message = f"found {float(value)}; expected a share of one GPU"
    with pytest.raises(ConfigError, match=message):
        ClusterConfig.from_dict({"train_each_gpu_num": value})
    with pytest.raises(ConfigError, match=message):
        run({}, train_num_gpus=value)
    with pytest.raises(ConfigError, match=message):
        EnvConfig.from_dict({"name": "a", "backend": "b", "task": "t", "num_gpus": value})


@pytest.mark.parametrize(
    ("cluster", "strategy", "colocated"),
    [
        ({}, "default", False),
        ({"is_colocated": True}, "default", True),
        ({"placement": {"strategy": "colocate"}}, "colocate", True),
        ({"placement": {"strategy": "disaggregate"}, "is_colocated": True}, "disaggregate", False),
        (
            {
                "placement": {"mode": "manual", "strategy": "colocate"},
                "resource_pool": [{"name": "p", "num_node": 1, "num_gpus": 1}],
            },
            "manual",
            False,
        ),
    ],
)
def test_mode_and_strategy_are_read_as_one(cluster, strategy, colocated):
    config = ClusterConfig.from_dict(cluster)
    assert (config.strategy, config.colocated) == (strategy, colocated)


def test_manual_placement_needs_pools_with_names_of_their_own():
    with pytest.raises(ConfigError, match="needs `resource_pool`"):
        ClusterConfig.from_dict({"placement": {"mode": "manual"}})
    pool = {"name": "p", "num_node": 1, "num_gpus": 1}
    with pytest.raises(ConfigError, match="give each pool its own"):
        ClusterConfig.from_dict({"resource_pool": [pool, pool]})


def test_which_roles_are_remote():
    config = ClusterConfig.from_dict({"remote_storage": False})
    roles = ("train", "eval", "env", "buffer")
    assert [config.is_remote(role) for role in roles] == [True, True, True, False]


@pytest.mark.parametrize("value", [0, "many"])
def test_the_number_of_storages_is_a_number_or_auto(value):
    with pytest.raises(ConfigError, match="buffer_worker_num"):
        ClusterConfig.from_dict({"buffer_worker_num": value})
    assert ClusterConfig.from_dict({"buffer_worker_num": "auto"}).buffer_worker_num == "auto"
