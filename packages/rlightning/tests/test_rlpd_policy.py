"""RLPD: half of every batch from a dataset, many normalised critics, updates per step explicit."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
)
from rlightning.config import BufferConfig, MainConfig
from rlightning.datasets import Episode, write_minari
from rlightning.errors import ConfigError, ContractError
from rlightning.policy.off_policy import Transitions
from rlightning.runtime import open_run
from rlightning.testing import TargetEnv
from rlightning.types import BatchedData, EnvMeta, EnvRet, PolicyResponse
from rlightning.utils.logger import close_logger

pytest.importorskip("h5py")

gym.register("RLPDTarget-v0", TargetEnv, kwargs={"continuous": True})

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
BOX = spaces.Box(-2, 2, (2,), np.float32)
PRIOR = 1000.0
"""Observations of the dataset start here, those collected at 0."""


@pytest.fixture(autouse=True)
def _close():
    torch.set_num_threads(1)
    yield
    close_logger()


@pytest.fixture
def dataset(tmp_path):
    """Two episodes of 6 and 4 steps whose observations count on from `PRIOR`."""
    episodes = []
    for start, steps in ((0, 6), (10, 4)):
        rows = PRIOR + start + np.arange(steps + 1, dtype=np.float32)
        flags = np.zeros((2, steps), bool)
        flags[0, -1] = True
        actions = np.full((steps, 2), 0.5, np.float32)
        episodes.append(Episode(np.repeat(rows[:, None], 3, 1), actions, np.ones(steps), *flags))
    write_minari(tmp_path / "d", episodes, observation_space=VECTOR, action_space=BOX)
    return tmp_path / "d"


def make_buffer(folder, *, rows=40, extra=None, **options):
    """A buffer into which one environment has put `rows` transitions."""
    config = BufferConfig.from_dict(
        {"type": "PriorReplayBuffer", "capacity": 200, "dataset": str(folder)} | options
    )
    buffer = build_data_buffer("PriorReplayBuffer", config, seed=0)
    buffer.init([EnvMeta("e-0", BOX, VECTOR, 1)], ["e-0"])
    for step in range(rows + 1):
        env_ret = EnvRet("e-0", np.full(3, step, np.float32), 0.0, False, False)
        answer = PolicyResponse("e-0", action=np.zeros(2, np.float32), **(extra or {}))
        buffer.add_batched_transition(
            BatchedData(["e-0"], [env_ret]), BatchedData(["e-0"], [answer])
        )
    return buffer


def is_prior(batch):
    return (batch["observation"][:, 0] >= PRIOR).tolist()


def test_every_minibatch_is_half_prior(dataset):
    """Rows alternate, so that each slice of an even length holds as many of both."""
    buffer = make_buffer(dataset)
    for _ in range(5):
        (batch,) = buffer.sample(32)
        assert is_prior(batch) == [False, True] * 16
        for part in range(0, 32, 8):
            assert sum(is_prior(batch[part : part + 8])) == 4
        assert torch.equal(batch["action"][1::2], torch.full((16, 2), 0.5))


@pytest.mark.parametrize(("fraction", "prior"), [(0.25, 8), (0.75, 24), (0.1, 3)])
def test_the_share_may_be_another(dataset, fraction, prior):
    (batch,) = make_buffer(dataset, prior_fraction=fraction).sample(32)
    flags = np.array(is_prior(batch))
    assert flags.sum() == prior
    for start in range(0, 32, 8):  # evenly spread, give or take one row
        assert abs(flags[start : start + 8].sum() - prior / 4) < 1


def test_all_prior_rows_are_drawn_with_what_followed_them(dataset):
    buffer = make_buffer(dataset)
    seen = {}
    for _ in range(20):
        (batch,) = buffer.sample(32)
        for row in batch[1::2]:
            seen[float(row["observation"][0])] = float(row["next_observation"][0])
            ends = row["observation"][0] in (PRIOR + 5, PRIOR + 13)
            assert bool(row["terminated"]) == bool(ends)
    assert seen == {PRIOR + n: PRIOR + n + 1 for n in (0, 1, 2, 3, 4, 5, 10, 11, 12, 13)}


def test_several_steps_are_summed_in_both_halves(dataset):
    """Prior rewards are 1: a three-step sum that meets no end is 1 + 0.9 + 0.81."""
    (batch,) = make_buffer(dataset, n_step=3, gamma=0.9).sample(32)
    prior = batch[1::2]
    whole = prior["discount"] > 0
    assert torch.allclose(prior["reward"][whole], torch.tensor(2.71))
    assert (prior["discount"][whole] - 0.729).abs().max() < 1e-6
    assert batch["reward"][::2].abs().max() == 0


def test_only_what_is_collected_has_to_wait(dataset):
    buffer = make_buffer(dataset, rows=15)
    assert not buffer.can_sample(32)
    assert len(buffer) == 15
    buffer = make_buffer(dataset, rows=16)
    assert buffer.can_sample(32)
    assert len(buffer.sample(32)[0]) == 32


def test_draws_go_on_after_a_restart(dataset):
    buffer = make_buffer(dataset, save_contents=True)
    buffer.sample(32)
    again = make_buffer(dataset, rows=0, save_contents=True)
    again.load_state_dict(buffer.state_dict())
    expected, found = buffer.sample(32)[0], again.sample(32)[0]
    for name in ("observation", "next_observation", "reward"):
        assert torch.equal(expected[name], found[name]), name


def test_fields_of_the_policy_that_no_dataset_has_are_left_out(dataset):
    (batch,) = make_buffer(dataset, extra={"log_prob": np.float32(0)}).sample(8)
    assert "log_prob" not in batch.keys()  # noqa: SIM118  # a TensorDict


@pytest.mark.parametrize("option", [{"prioritized": True}, {"sequence_length": 2}])
def test_what_does_not_go_with_two_sources_is_refused(dataset, option):
    with pytest.raises(ConfigError, match="mixes single transitions"):
        make_buffer(dataset, **option)
    with pytest.raises(ConfigError, match=r"buffer\.dataset is not set"):
        make_buffer(dataset, dataset=None)
    with pytest.raises(ValueError, match="needs a batch size"):
        make_buffer(dataset).sample()


@pytest.mark.parametrize("kind", ["PriorReplayBuffer", "DatasetBuffer"])
@pytest.mark.parametrize(
    ("space", "takes"),
    [(spaces.Box(-2, 2, (3,), np.float32), r"float32\[3\]"), (spaces.Discrete(2), r"int64\[\]")],
    ids=["another size", "another kind"],
)
def test_a_dataset_of_other_actions_is_refused_with_both_sides_named(dataset, kind, space, takes):
    """For RLPD and for behaviour cloning, before anything is learned."""
    config = BufferConfig.from_dict({"type": kind, "capacity": 200, "dataset": str(dataset)})
    buffer = build_data_buffer(kind, config, seed=0)
    with pytest.raises(ConfigError, match=f"takes actions .*{takes}.* has actions float32.2."):
        buffer.init([EnvMeta("e-0", space, VECTOR, 1)], ["e-0"])


def test_chunks_of_actions_are_refused(dataset):
    buffer = make_buffer(dataset)
    (collected,) = buffer.sample(4)
    collected["steps"] = torch.ones(4)
    from rlightning.buffer.prior_replay_buffer import _interleave

    with pytest.raises(ContractError, match="chunks of actions"):
        _interleave(collected, buffer.prior.sample(4)[0])


# ---- the policy ------------------------------------------------------------------------------


def transitions(rows=4):
    now, later = torch.randn(2, rows, 3)
    discount = torch.full((rows,), 0.9)
    return Transitions(now, torch.zeros(rows, 2), torch.ones(rows), discount, later, None)


def make_policy(off_policy, **options):
    return off_policy.make("RLPDPolicy", space=BOX, **options).train_list[0]


def test_ten_normalised_critics_by_default(off_policy):
    policy = make_policy(off_policy)
    assert len(policy.critic.critics) == 10
    for member in policy.critic.critics:
        assert [type(layer) for layer in member][:3] == [nn.Linear, nn.LayerNorm, nn.ReLU]
    assert not any(isinstance(layer, nn.LayerNorm) for layer in policy.actor.modules())


def test_the_target_is_the_lowest_of_as_many_drawn_critics(off_policy):
    """Critics say 0 to 9: the lowest of two is 11 / 3 - 1 on average, and 8 at most."""
    policy = make_policy(off_policy, temperature=0.5)
    values = torch.arange(10.0)[:, None].repeat(1, 4)
    log_prob = torch.full((4,), -2.0)
    torch.manual_seed(0)
    drawn = torch.stack([policy._next_value(values, log_prob) for _ in range(4000)])
    assert (drawn == drawn[:, :1]).all()  # one draw for the whole batch
    assert drawn.mean().item() - 1.0 == pytest.approx(8 / 3, abs=0.1)
    assert drawn.max() - 1.0 == 8.0
    every = make_policy(off_policy, temperature=0.5, target_critics=10)
    assert every._next_value(values, log_prob).tolist() == [1.0] * 4


def test_the_entropy_of_what_follows_may_be_left_out(off_policy):
    policy = make_policy(off_policy, backup_entropy=False, target_critics=10)
    assert policy._next_value(torch.ones(10, 4), torch.full((4,), -2.0)).tolist() == [1.0] * 4


def test_the_actor_follows_the_mean_of_the_ensemble(off_policy):
    policy = make_policy(off_policy, temperature=1e-6)
    off_policy.constant(policy.critic, *[[float(n)] for n in range(10)])
    metrics = policy._update_actor(torch.randn(4, 3))
    assert metrics["actor_loss"].item() == pytest.approx(-4.5, abs=1e-3)


def test_critics_learn_and_slow_ones_follow(off_policy):
    policy = make_policy(off_policy, actor_interval=3, tau=0.5)
    before = off_policy.tensors_of(policy)
    learned = ["actor_loss" in policy.update(transitions(), step)[0] for step in range(3)]
    assert learned == [True, False, False]
    after = off_policy.tensors_of(policy)
    moved = {name.split(".")[0] for name, t in after.items() if not torch.equal(t, before[name])}
    assert moved == {"actor", "critic", "target_critic", "log_alpha"}


def test_a_run_by_configuration_says_its_updates_per_step(tmp_path, off_policy):
    """Four steps of two environments and 16 updates of 32 rows: two per step."""
    env = TargetEnv(continuous=True)
    rows, actions = [env.reset(seed=0)[0]], []
    for _ in range(8):
        actions.append(env.action_space.sample())
        rows.append(env.step(actions[-1])[0])
    flags = np.zeros((2, 8), bool)
    one = Episode(np.stack(rows), np.stack(actions), np.zeros(8), *flags)
    spaces_of = {"observation_space": env.observation_space, "action_space": env.action_space}
    write_minari(tmp_path / "d", [one] * 4, **spaces_of)
    config = MainConfig.from_dict(
        {
            "engine": "syncrl",
            "debug": False,
            "verbose": False,
            "env": {
                "name": "t", "backend": "gymnasium", "task": "RLPDTarget-v0", "num_envs": 2,
            },
            "buffer": {
                "type": "PriorReplayBuffer", "capacity": 1000, "dataset": str(tmp_path / "d"),
            },
            "policy": {"type": "RLPDPolicy", "model_cfg": {"hidden_sizes": [8], "n_critics": 3}},
            "train": {
                "max_epochs": 36, "max_rollout_steps": 4, "batch_size": 512, "minibatch_size": 32,
                "eval_episodes": 2, "seed": 0, "save_best": False,
            },
            "log": {"level": "ERROR", "log_dir": str(tmp_path)},
        }
    )  # fmt: skip
    check_config(config)
    config.attach_run(open_run(config))
    engine = build_engine(
        config,
        build_env_group(config.env),
        build_policy_group(config.policy.type, config.policy),
        build_data_buffer(config.buffer.type, config.buffer),
    )
    engine.run()
    assert engine.last_metrics["train/updates_per_step"] == 2.0
    assert engine.last_metrics["train/updates"] > 0
