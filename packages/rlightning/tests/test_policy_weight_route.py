"""The way of weights from learners to actors, wherever they live and whoever dies."""

from multiprocessing import resource_tracker

import pytest
import torch
from torch import nn

from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
    open_cluster,
)
from rlightning.config import MainConfig, PolicyConfig, TrainConfig
from rlightning.errors import WorkerLostError
from rlightning.policy import BasePolicy
from rlightning.policy.policy_group import PolicyGroup
from rlightning.policy.policy_proxy import PolicyProxy
from rlightning.runtime import open_run
from rlightning.runtime.base import WorkerSpec
from rlightning.runtime.supervision import Supervised
from rlightning.testing import LocalRuntime
from rlightning.types import EnvMeta, PolicyResponse
from rlightning.utils.logger import close_logger
from rlightning.utils.registry import POLICIES
from rlightning.weights import CPUWeightBuffer, ShardedWeightBuffer, WeightBuffer

resource_tracker.ensure_running()  # lives as long as this process, whoever needs it first


@POLICIES.register("RoutedPolicy")
class Routed(BasePolicy):
    """Holds a value that its learner sets, and a normaliser beside it."""

    batched_rollout = True

    def construct_network(self, env_meta, *args, **kwargs):
        self.actor = nn.Linear(4, 2)
        self.critic = nn.Linear(4, 3)
        self.register_buffer("mean", torch.zeros(2))

    def setup_optimizer(self, optim_cfg):
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.01)

    def rollout_step(self, env_ret, **kwargs):
        logits = self.actor(env_ret.observation)
        return PolicyResponse(env_ret.env_id, action=logits.argmax(-1))

    def postprocess(self, env_ret=None, policy_resp=None): ...

    def update_dataset(self, data):
        self.data = data

    def train(self, *args, **kwargs):
        self.optimizer.zero_grad()
        rows = self.data["observation"].float()
        (self.actor(rows).square().mean() + self.critic(rows).square().mean()).backward()
        self.optimizer.step()

    def set_to(self, value):
        with torch.no_grad():
            for tensor in (*self.parameters(), *self.buffers()):
                tensor.fill_(value)

    @property
    def first_weight(self):
        return float(self.actor.weight.detach()[0, 0])

    def value(self):
        values = {
            float(v) for t in (*self.parameters(), *self.buffers()) for v in t.detach().flatten()
        }
        return values.pop() if len(values) == 1 else None


BUFFERS = {
    "None": lambda: None,
    "Double": WeightBuffer,
    "Shared": CPUWeightBuffer,
    "Sharded": lambda: ShardedWeightBuffer(2),
}


def group_of(strategy, *, remote, actors=2):
    """Two learners and their actors, in this process or behind proxies."""
    config = PolicyConfig.from_dict({"type": "RoutedPolicy"})
    config.train_config = TrainConfig.from_dict({"max_epochs": 1})
    runtime = LocalRuntime()

    def policy(role, index):
        if not remote:
            return Routed(config, role)

        def spawn(make, args):
            spec = WorkerSpec(name=f"{role}-{index}", make=make, args=args)
            if role == "train":
                return runtime.spawn(spec)
            return Supervised(runtime, spec, max_restarts=1)

        return PolicyProxy(Routed, config, role, spawn)

    made = PolicyGroup(
        [policy("train", index) for index in range(2)],
        [policy("eval", index) for index in range(actors)],
        config,
        weight_buffer=BUFFERS[strategy](),
    )
    for item in made.train_list:
        item.init_train(config.train_config, env_meta=EnvMeta())
    for item in made.eval_list:
        item.init_eval(None, env_meta=EnvMeta())
    return made


def call(policy, method, *args):
    return (
        policy._call(method, *args)
        if isinstance(policy, PolicyProxy)
        else getattr(policy, method)(*args)
    )


def learn(group, value):
    for learner in group.train_list:
        call(learner, "set_to", value)


def values(group):
    return [call(actor, "value") for actor in group.eval_list]


@pytest.fixture(params=list(BUFFERS))
def strategy(request):
    return request.param


@pytest.mark.parametrize("remote", [False, True])
def test_every_actor_gets_every_version_whole(strategy, remote):
    group = group_of(strategy, remote=remote)
    for version in range(4):
        learn(group, float(version))
        group.sync_weights()
        assert values(group) == [version, version]
        assert [actor.weights_version for actor in group.eval_list] == [version, version]


@pytest.mark.parametrize("strategy", ["Double", "Shared", "Sharded"])
@pytest.mark.parametrize("remote", [False, True])
def test_what_is_published_waits_until_it_is_loaded(strategy, remote):
    group = group_of(strategy, remote=remote)
    learn(group, 1.0)
    group.sync_weights()
    learn(group, 2.0)
    group.send_weights()
    assert values(group) == [1, 1]
    learn(group, 3.0)
    group.update_eval_weights()
    assert values(group) == [2, 2]


def test_an_actor_that_dies_comes_back_with_the_newest_weights(strategy):
    group = group_of(strategy, remote=True)
    for value in (1.0, 2.0):
        learn(group, value)
        group.sync_weights()
    actor = group.eval_list[0]
    actor.restore(WorkerLostError("eval-0", reason="test"))
    assert values(group) == [2, 2]
    learn(group, 3.0)
    group.sync_weights()
    assert values(group) == [3, 3]


@pytest.mark.parametrize("strategy", ["Shared", "Sharded"])
def test_weights_in_shared_memory_do_not_pass_through_this_process(strategy, monkeypatch):
    group = group_of(strategy, remote=True)
    learn(group, 1.0)
    group.sync_weights()
    for name in ("get", "read", "pack", "publish"):
        monkeypatch.setattr(group.weight_buffer, name, None)
    learn(group, 2.0)
    group.sync_weights()
    assert values(group) == [2, 2]


@pytest.mark.parametrize("strategy", ["Shared", "Sharded"])
def test_actors_of_another_machine_are_sent_a_copy(strategy, monkeypatch):
    group = group_of(strategy, remote=True)
    from rlightning.policy.policy_worker import PolicyWorker

    monkeypatch.setattr(PolicyWorker, "open_weights", lambda self, address: False)
    for value in (1.0, 2.0):
        learn(group, value)
        group.sync_weights()
        assert values(group) == [value, value]
    group.eval_list[1].restore(WorkerLostError("eval-1", reason="test"))
    assert values(group) == [2, 2]


@pytest.mark.parametrize("strategy", ["Double", "Shared", "Sharded"])
def test_actors_that_have_the_newest_version_are_not_asked(strategy, monkeypatch):
    group = group_of(strategy, remote=False)
    learn(group, 1.0)
    group.sync_weights()
    monkeypatch.setattr(group.weight_buffer, "read", None)
    monkeypatch.setattr(group.weight_buffer, "get", None)
    group.update_eval_weights()


def test_a_property_of_a_policy_elsewhere_is_read_there():
    group = group_of("Double", remote=True)
    learn(group, 4.0)
    group.sync_weights()
    assert [policy.first_weight for policy in (*group.train_list, *group.eval_list)] == [4.0] * 4


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_strategies_end_a_run_on_ray_with_the_same_weights(ray_cluster, tmp_path):
    found = []
    for name, kind in {
        "Double": "WeightBuffer",
        "Shared": "CPUWeightBuffer",
        "Sharded": "ShardedWeightBuffer",
    }.items():
        config = MainConfig.from_dict(
            {
                "engine": "syncrl",
                "verbose": False,
                "env": {"name": "e", "backend": "gymnasium", "task": "CartPole-v1"},
                "buffer": {"type": "RolloutBuffer", "capacity": 64},
                "policy": {
                    "type": "RoutedPolicy",
                    "weight_buffer": {"type": kind, "buffer_strategy": name},
                },
                "train": {"max_epochs": 2, "max_rollout_steps": 8, "seed": 3, "save_best": False},
                "log": {"log_dir": str(tmp_path), "project": "p", "name": name, "level": "ERROR"},
                "cluster": {
                    "train_worker_num": 2,
                    "eval_worker_num": 2,
                    "remote_env": False,
                    "remote_storage": False,
                },
            }
        )
        check_config(config)
        open_run(config)
        try:
            with open_cluster(config):
                engine = build_engine(
                    config,
                    build_env_group(config.env),
                    build_policy_group("RoutedPolicy", config.policy, config.cluster),
                    build_data_buffer("RolloutBuffer", config.buffer, seed=3),
                )
                engine.run()
                group = engine.policy_group
                prints = [p.get_param_fingerprint() for p in (*group.train_list, *group.eval_list)]
        finally:
            close_logger()
        assert all(item == prints[0] for item in prints)
        found.append(prints[0])
    assert found[0] == found[1] == found[2]
