"""Data parallelism on CPU: two learners with half the batch each learn like one with all of it."""

import os
import subprocess
import sys

import torch
from torch import nn

from rlightning.config import MainConfig
from rlightning.policy import BasePolicy
from rlightning.types import EnvMeta

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from rlightning.config import MainConfig
from rlightning.policy import BasePolicy
from rlightning.types import EnvMeta

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)

class Learner(BasePolicy):
    def construct_network(self, env_meta, *args, **kwargs):
        torch.manual_seed(rank)  # the wrapper makes all start like rank 0
        self.actor = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.unused = nn.Linear(2, 2)

    def setup_optimizer(self, optim_cfg):
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def rollout_step(self, env_ret, **kwargs): ...
    def postprocess(self, env_ret=None, policy_resp=None): ...

    def update_dataset(self, data):
        self.data = data

    def train(self, *args, **kwargs):
        self.optimizer.zero_grad()
        self.actor(self.data["x"]).square().mean().backward()
        self.optimizer.step()

class Custom(Learner):
    def wrap_with_ddp(self, logic_gpu_id, process_group):
        self.wrapped_with = (logic_gpu_id, process_group)

class Renamed(Learner):
    def construct_network(self, env_meta, *args, **kwargs):
        super().construct_network(env_meta)
        self.parts = nn.ModuleList([self.actor])
        self.model_list = [("learned", self.actor)]

class Unheld(Learner):
    def construct_network(self, env_meta, *args, **kwargs):
        super().construct_network(env_meta)
        self.hidden = [nn.Linear(2, 2)]
        self.model_list = [("hidden", self.hidden[0])]

config = MainConfig.from_dict({
    "env": {"name": "a", "backend": "b", "task": "t"},
    "buffer": {"type": "R", "capacity": 1},
    "policy": {"type": "P"},
    "train": {"max_epochs": 1},
})
policy = Learner(config.policy, "train")
policy.process_group = dist.group.WORLD
policy.init_train(config.train, EnvMeta())
exported = policy.get_trainable_parameters()["actor"]
start = {name: tensor.clone() for name, tensor in exported.items()}
x = torch.arange(24, dtype=torch.float32).view(8, 3) / 10
policy._update_dataset({"x": x[rank::2]})
policy._train()
gradients = {name: p.grad.clone() for name, p in policy.model_list[0][1].named_parameters()}
policy.save_checkpoint(f"{folder}/policy_{rank}.pt")

custom = Custom(config.policy, "train")
custom.process_group = dist.group.WORLD
custom.init_train(config.train, EnvMeta())
gpu, group = custom.wrapped_with

renamed = Renamed(config.policy, "train")
renamed.process_group = dist.group.WORLD
renamed.init_train(config.train, EnvMeta())
unheld = Unheld(config.policy, "train")
unheld.process_group = dist.group.WORLD
try:
    unheld.init_train(config.train, EnvMeta())
    refused = ""
except ValueError as error:
    refused = str(error)
torch.save({
    "start": start,
    "gradients": gradients,
    "after": policy.get_trainable_parameters()["actor"],
    "world_size": policy.world_size,
    "wrapped": type(policy.actor).__name__,
    "listed": type(policy.model_list[0][1]).__name__,
    "custom": (gpu is None, group is dist.group.WORLD, type(custom.actor).__name__),
    "renamed": [type(item).__name__ for item in (renamed.actor, renamed.parts[0])],
    "renamed_exports": sorted(renamed.get_trainable_parameters()),
    "refused": refused,
    "exported": sorted(policy.export_weights()["extra"]),
}, f"{folder}/rank_{rank}.pt")
dist.destroy_process_group()
"""


def test_two_learners_equal_one_with_the_joined_batch(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(rank), str(tmp_path)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        errors = [process.communicate(timeout=90)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], errors
    zero, one = (torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in (0, 1))
    assert zero["world_size"] == one["world_size"] == 2
    assert (zero["wrapped"], zero["listed"]) == ("DistributedDataParallel", "Sequential")
    assert zero["custom"] == one["custom"] == (True, True, "Sequential")
    assert zero["exported"] == []
    assert zero["renamed"] == one["renamed"] == ["DistributedDataParallel"] * 2
    assert zero["renamed_exports"] == ["learned"]
    assert "'hidden' is no attribute of Unheld" in zero["refused"] == one["refused"]
    for name, gradient in zero["gradients"].items():
        assert torch.equal(gradient, one["gradients"][name])
        assert torch.equal(zero["start"][name], one["start"][name])
        assert torch.equal(zero["after"][name], one["after"][name])

    joined = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    joined.load_state_dict(zero["start"])
    joined(torch.arange(24, dtype=torch.float32).view(8, 3) / 10).square().mean().backward()
    for name, parameter in joined.named_parameters():
        assert torch.allclose(zero["gradients"][name], parameter.grad, atol=1e-6), name
    saved = torch.load(tmp_path / "policy_1.pt", weights_only=True)
    assert saved["actor"].keys() == zero["after"].keys(), "a wrapper's prefix is in the file"


def test_a_single_learner_is_not_wrapped():
    class Alone(BasePolicy):
        def construct_network(self, env_meta, *args, **kwargs):
            self.actor = nn.Linear(1, 1)

        def setup_optimizer(self, optim_cfg): ...
        def rollout_step(self, env_ret, **kwargs): ...
        def postprocess(self, env_ret=None, policy_resp=None): ...
        def update_dataset(self, data): ...
        def train(self, *args, **kwargs): ...
        def wrap_with_ddp(self, logic_gpu_id, process_group):
            raise AssertionError("called without a process group")

    config = MainConfig.from_dict(
        {
            "env": {"name": "a", "backend": "b", "task": "t"},
            "buffer": {"type": "R", "capacity": 1},
            "policy": {"type": "P"},
            "train": {"max_epochs": 1, "parallel": "ddp"},
        }
    )
    policy = Alone(config.policy, "train")
    policy.init_train(config.train, EnvMeta())
    assert type(policy.actor) is nn.Linear
