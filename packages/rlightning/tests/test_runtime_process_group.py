"""Ranks meet, agree, stay equal and end: two processes that learn with gloo on one machine."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import nn

from rlightning.config import MainConfig
from rlightning.errors import ContractError
from rlightning.policy import BasePolicy
from rlightning.policy.over_ranks import check_same_weights
from rlightning.runtime import process_group
from rlightning.types import EnvMeta

ROWS = (28, 20)
MINIBATCH = 4


class Learner(BasePolicy):
    """A user's policy: one gradient step per minibatch of whatever it is given."""

    def construct_network(self, env_meta, *args, **kwargs):
        self.actor = nn.Linear(3, 1)

    def setup_optimizer(self, optim_cfg):
        self.steps = 0
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def rollout_step(self, env_ret, **kwargs): ...
    def postprocess(self, env_ret=None, policy_resp=None): ...

    def update_dataset(self, data):
        self.data = data

    def loss(self, x):
        return self.actor(x).square().mean()

    def train(self, *args, **kwargs):
        for part in self.data["x"].split(MINIBATCH):
            self.optimizer.zero_grad()
            self.loss(part).backward()
            self.optimizer.step()
            self.steps += 1
        return {"rows": float(len(self.data))}


class Careful(Learner):
    """Takes one step whatever the number of rows, and says so."""

    uneven_batches = True

    def train(self, *args, **kwargs):
        self.optimizer.zero_grad()
        self.loss(self.data["x"]).backward()
        self.optimizer.step()
        return {"rows": float(len(self.data))}


class Bypassing(Learner):
    """Computes its loss beside the wrapper."""

    def loss(self, x):
        return self.actor.module(x).square().mean()


class Bare(Learner):
    """Trains a parameter that no module of `model_list` holds."""

    def construct_network(self, env_meta, *args, **kwargs):
        super().construct_network(env_meta)
        self.scale = nn.Parameter(torch.ones(1))

    def loss(self, x):
        return (self.actor(x) * self.scale).square().mean()


def made(kind, group):
    config = MainConfig.from_dict(
        {
            "env": {"name": "a", "backend": "b", "task": "t"},
            "buffer": {"type": "R", "capacity": 1},
            "policy": {"type": "P"},
            "train": {"max_epochs": 1},
        }
    )
    policy = kind(config.policy, "train")
    policy.process_group = group
    policy.init_train(config.train, EnvMeta())
    return policy


def batch(rank, rows, seed=0):
    rng = torch.Generator().manual_seed(10 * rank + seed)
    return TensorDict({"x": torch.randn(rows, 3, generator=rng) + rank}, batch_size=[rows])


def update(policy, data):
    policy._update_dataset(data)
    return policy._train()


def uneven(rank, group):
    torch.manual_seed(rank)
    policy = made(Learner, group)
    metrics = [update(policy, batch(rank, ROWS[rank], seed)) for seed in range(2)]
    even = update(policy, batch(rank, 8))
    idle = update(policy, batch(rank, 4 * rank))
    more = update(policy, batch(rank, 8))
    weight = policy.get_trainable_parameters()["actor"]["weight"].flatten().tolist()
    return {
        "metrics": [*metrics, even, idle, more],
        "steps": policy.steps,
        "weight": weight,
        "careful": update(made(Careful, group), batch(rank, ROWS[rank])),
    }


def diverging(kind, rank, group):
    torch.manual_seed(0)
    with pytest.raises(ContractError) as caught:
        update(made(kind, group), batch(rank, 8))
    return str(caught.value)


def keep_comparing(group):
    for _ in range(1000):
        check_same_weights(nn.Linear(3, 3), group)


def one_rank(rank, folder, address, second_address):
    torch.set_num_threads(1)
    group = process_group.init(rank, 2, address, timeout_s=60)
    assert (dist.get_rank(group), dist.get_world_size(group)) == (rank, 2)
    assert dist.get_backend(group) == "gloo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    found = uneven(rank, group)
    found["bypassing"] = diverging(Bypassing, rank, group)
    found["bare"] = diverging(Bare, rank, group)
    process_group.destroy()
    process_group.destroy()
    group = process_group.init(rank, 2, second_address, timeout_s=60)
    (folder / f"rank_{rank}.json").write_text(json.dumps(found))
    if rank == 1:
        os._exit(0)  # in the middle of things
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        keep_comparing(group)
    found["noticed_s"] = time.monotonic() - started
    (folder / "rank_0.json").write_text(json.dumps(found))
    os._exit(0)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    addresses = [process_group.free_address() for _ in range(2)]
    environment = {key: value for key, value in os.environ.items() if "GLOO" not in key}
    command = [sys.executable, __file__, str(folder), *addresses]
    processes = [
        subprocess.Popen([*command, str(rank)], env=environment | {"OMP_NUM_THREADS": "1"})
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=100) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(2)]


def test_ranks_with_uneven_batches_take_the_same_steps_and_stay_equal(ranks):
    """28 and 20 rows twice, then 8 each, then none and 4, then 8 each: 5 + 5 + 2 + 0 + 2 steps."""
    first, second = ranks
    assert first["steps"] == second["steps"] == 14
    assert first["weight"] == second["weight"]
    assert [m.get("rows") for m in first["metrics"]] == [20, 20, 8, None, 8]
    assert [m.get("rows") for m in second["metrics"]] == [20, 20, 8, None, 8]
    assert [m.get("dropped_rows") for m in first["metrics"]] == [8, 8, None, None, None]
    assert not any("dropped_rows" in m for m in second["metrics"])
    assert first["metrics"][3] == second["metrics"][3] == {"skipped_updates": 1.0}


def test_a_policy_that_copes_with_uneven_batches_gets_all_its_rows(ranks):
    assert [found["careful"] for found in ranks] == [{"rows": 28.0}, {"rows": 20.0}]


@pytest.mark.parametrize(
    ("mistake", "parameter"), [("bypassing", "actor.weight"), ("bare", "scale")]
)
def test_gradients_that_were_not_exchanged_are_noticed_after_the_first_update(
    ranks, mistake, parameter
):
    for found in ranks:
        assert "differ between the 2 train workers" in found[mistake]
        assert f"first '{parameter}'" in found[mistake]
        assert "their gradients were not exchanged" in found[mistake]


def test_a_rank_that_ended_is_noticed_by_the_others_at_once(ranks):
    assert ranks[0]["noticed_s"] < 20


def test_ranks_that_nobody_joins_give_up_in_time_and_say_where_they_waited():
    address = process_group.free_address()
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank 0 of 2 did not meet the others at {address}"):
        process_group.init(0, 2, address, timeout_s=1)
    with pytest.raises(RuntimeError, match="rank 1 of 2 did not meet the others"):
        process_group.init(1, 2, process_group.free_address(), timeout_s=1)
    assert time.monotonic() - started < 30
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("rank", "address", "message"),
    [
        (2, "127.0.0.1:1", "found rank 2 of 2; expected 0 to 1"),
        (-1, "127.0.0.1:1", "found rank -1"),
        (0, "127.0.0.1", "expected host:port"),
        (0, "somewhere:else", "expected host:port"),
    ],
)
def test_what_cannot_be_meant_is_refused(rank, address, message):
    with pytest.raises(ValueError, match=message):
        process_group.init(rank, 2, address, timeout_s=1)


@pytest.mark.parametrize(
    ("gpus", "backend"),
    [
        (["a", "b"], "nccl"),
        (["a"], "nccl"),
        (["a", "a"], "gloo"),
        (["", ""], "gloo"),
        (["a", ""], "gloo"),
    ],
)
def test_nccl_is_for_ranks_with_a_gpu_each(gpus, backend):
    assert process_group.choose_backend(gpus) == backend


def test_a_free_address_can_be_listened_at():
    host, port = process_group.free_address().rsplit(":", 1)
    assert host == "127.0.0.1"
    assert 1024 <= int(port) < 65536


def test_alone_nothing_is_compared():
    check_same_weights(nn.Linear(2, 2), None)


if __name__ == "__main__":
    one_rank(int(sys.argv[4]), pathlib.Path(sys.argv[1]), *sys.argv[2:4])
