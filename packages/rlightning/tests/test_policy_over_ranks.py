"""Two gloo ranks agree on statistics, on how many steps to take, and end with equal weights."""

import faulthandler
import gc
import pathlib
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from gymnasium import spaces
from tensordict import TensorDict

from rlightning.config import PolicyConfig, TrainConfig
from rlightning.ops.normalization import batch_moments, merge_moments
from rlightning.policy.over_ranks import least_over_ranks, mean_over_ranks, pooled_over_ranks
from rlightning.policy.ppo_policy import PPOPolicy
from rlightning.types import EnvMeta

ROWS = (70, 50)
TARGET_KLS = (None, 0.01)
LIMIT_S = 240
"""For what takes five seconds: a machine at work may give a process a fiftieth of a core."""

pytestmark = pytest.mark.timeout(LIMIT_S + 60)


def test_alone_everything_is_the_identity():
    moments = [batch_moments(torch.randn(5, 2))]
    assert least_over_ranks(3, None) == 3
    assert mean_over_ranks(0.5, None) == 0.5
    assert pooled_over_ranks(moments, None) == moments


def rollout(rank: int, epoch: int, n_rows: int) -> TensorDict:
    rng = torch.Generator().manual_seed(100 * rank + epoch)
    return TensorDict(
        {
            "observation": torch.randn(n_rows, 3, generator=rng) + 5 * rank,
            "action": torch.randn(n_rows, 2, generator=rng),
            # Rank 0's recorded log-probabilities are far off: its KL estimate is large.
            "log_prob": torch.full((n_rows,), -8.0 if rank == 0 else -3.0),
            "value": torch.randn(n_rows, generator=rng),
            "advantage": torch.randn(n_rows, generator=rng),
            "return": torch.randn(n_rows, generator=rng) * (1 + rank),
        },
        batch_size=[n_rows],
    )


def learn(rank: int, target_kl: float | None) -> dict:
    """Three updates with different data on each rank; returns what the ranks must agree on."""
    train_config = TrainConfig.from_dict(
        {"max_epochs": 3, "seed": 0, "target_kl": target_kl, "minibatch_size": 16}
    )
    config = PolicyConfig.from_dict(
        {
            "type": "PPOPolicy",
            "model_cfg": {"normalize_observations": True, "normalize_returns": True},
        }
    )
    config.train_config = train_config
    torch.manual_seed(rank)  # different initial weights, which wrapping must make equal
    policy = PPOPolicy(config, "train")
    policy.process_group = dist.group.WORLD
    policy.init_train(
        train_config, EnvMeta("e-0", spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (3,)), 1)
    )
    steps = [0]
    policy.optimizer.register_step_post_hook(lambda *_: steps.__setitem__(0, steps[0] + 1))
    for epoch in range(3):
        policy._update_dataset(rollout(rank, epoch, ROWS[rank]))
        policy._train()
    return {
        "steps": steps[0],
        "weights": torch.cat([p.detach().flatten() for p in policy.parameters()]),
        "mean": policy.observation_normalizer.statistics[0].mean.clone(),
        "count": policy.observation_normalizer.statistics[0].count.clone(),
        "return_std": policy.return_scale.std.clone(),
        "fused": policy._fused is not None,
    }


def one_rank(rank: int, folder: pathlib.Path) -> None:
    faulthandler.dump_traceback_later(LIMIT_S - 10, exit=True)  # says where it waits
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.save({kl: learn(rank, kl) for kl in TARGET_KLS}, folder / f"rank_{rank}.pt")
    gc.collect()  # wrapped modules hold the group, in cycles
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes found, by target KL."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, __file__, str(folder)]
    processes = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    try:
        assert [process.wait(timeout=LIMIT_S) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [torch.load(folder / f"rank_{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize(("target_kl", "steps"), [(None, 90), (0.01, 3)])
def test_two_ranks_with_different_data_stay_equal(ranks, target_kl, steps):
    """Unequal numbers of rows, and a KL target that only rank 0 exceeds: both stop together.

    50 rows make 3 minibatches of at least 16; ten passes, three updates.
    """
    first, second = (found[target_kl] for found in ranks)
    assert not first["fused"]
    assert first["steps"] == second["steps"] == steps
    for name in ("weights", "mean", "count", "return_std"):
        assert torch.equal(first[name], second[name]), name


def test_their_statistics_are_those_of_all_rows_counted_once(ranks):
    rows = [rollout(rank, epoch, ROWS[rank]) for epoch in range(3) for rank in range(2)]
    pooled = merge_moments([batch_moments(part["observation"]) for part in rows])
    assert ranks[0][None]["count"].item() == pooled.n_samples.item() == 360
    assert torch.allclose(ranks[0][None]["mean"], pooled.mean)


if __name__ == "__main__":
    one_rank(int(sys.argv[2]), pathlib.Path(sys.argv[1]))
