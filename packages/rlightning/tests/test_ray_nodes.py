"""Several machines, as several Ray nodes on this one: where workers go, and a node that leaves."""

import logging
import sys
import time

import numpy as np
import pytest

from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
    open_cluster,
)
from rlightning.config import MainConfig
from rlightning.env import BaseEnv
from rlightning.runtime import open_run
from rlightning.types import EnvRet
from rlightning.utils.logger import close_logger
from rlightning.utils.registry import ENVS

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


@ENVS.register("ray_counting")
class Counting(BaseEnv):
    """Shows how many steps it has taken, twenty a second."""

    def __init__(self, config, worker_index=0, preprocess_fn=None):
        super().__init__(config, worker_index, preprocess_fn)
        import gymnasium as gym

        self.env = gym.make("CartPole-v1")
        self.total = 0

    def reset(self, *args, **kwargs):
        self.total = 0
        return EnvRet(self.env_id, np.full(4, self.total, np.float32))

    def step(self, policy_resp):
        time.sleep(0.05)
        self.total += 1
        return EnvRet(self.env_id, np.full(4, self.total, np.float32), 1.0)

    def close(self): ...


@pytest.fixture
def two_nodes():
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 6})
    other = cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    head = ray.get_runtime_context().get_node_id()
    [second] = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != head]
    yield cluster, other, head, second
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    ray.shutdown()
    cluster.shutdown()


def configuration(folder, head, second):
    return MainConfig.from_dict(
        {
            "engine": "syncrl",
            "debug": False,
            "verbose": False,
            "env": {"name": "e", "backend": "ray_counting", "task": "none"},
            "buffer": {"type": "RolloutBuffer", "capacity": 64},
            "policy": {"type": "PPOPolicy"},
            "train": {
                "max_epochs": 3,
                "max_rollout_steps": 40,
                "eval_episodes": 1,
                "max_eval_rollout_steps": 2,
                "seed": 1,
                "torch_threads": 1,
                "minibatch_size": 16,
            },
            "log": {"log_dir": str(folder), "project": "p", "name": "n", "level": "ERROR"},
            "cluster": {
                "placement": {"mode": "manual"},
                "remote_storage": False,
                "resource_pool": [
                    {
                        "name": "learn",
                        "num_node": 1,
                        "num_gpus": 0,
                        "node_ids": [head],
                        "train": "0",
                        "eval": "0",
                    },
                    {
                        "name": "play",
                        "num_node": 1,
                        "num_gpus": 0,
                        "node_ids": [second],
                        "env": "0",
                    },
                ],
            },
        }
    )


def test_a_node_that_leaves_costs_the_episodes_on_it(two_nodes, tmp_path):
    cluster, other, head, second = two_nodes
    config = configuration(tmp_path, head, second)
    check_config(config)
    open_run(config)
    try:
        with open_cluster(config):
            env_group = build_env_group(config.env)
            policy_group = build_policy_group(config.policy.type, config.policy, config.cluster)
            buffer = build_data_buffer(config.buffer.type, config.buffer, seed=1)
            engine = build_engine(config, env_group, policy_group, buffer)
            assert env_group.env_list[0].worker.node == second
            engine.collect(5)
            cluster.remove_node(other)
            begin_s = time.monotonic()
            engine.collect(1)
            assert time.monotonic() - begin_s < 120
            assert engine.lost_episodes == 1
            engine.run()
    finally:
        close_logger()
    log = (tmp_path / "p" / "n" / "run.log").read_text()
    assert "worker env-0 is lost" in log
    assert "has left the cluster; env-0 goes elsewhere" in log
    assert engine.epoch == 3
