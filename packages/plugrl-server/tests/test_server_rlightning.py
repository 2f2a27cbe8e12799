"""Storing many frames at once is storing them one after another; only faster."""

import numpy as np
import pytest
import torch

from plugrl_server.algorithm.base_algorithm import FrameBatch, Sampled
from plugrl_server.algorithm.rlightning.parts import load_config
from plugrl_server.algorithm.rlightning.rlightning_algorithm import (
    RLightningAlgorithm,
    RLightningConfig,
)
from plugrl_server.algorithm.rlightning.served_policy import ServedPolicy
from rlightning.utils.seeding import seed_everything

SHOWN = {"cartpole_ppo": 4, "pendulum_sac": 3}


def served(name, folder, *overrides, **options):
    torch.set_num_threads(1)
    config = load_config(
        name,
        [f"log.log_dir={folder}", "verbose=false", "train.seed=0", "train.max_rollout_steps=64",
         "buffer.capacity=2048", *overrides],
    )  # fmt: skip
    seed_everything(0)
    return RLightningAlgorithm(RLightningConfig(**options), ServedPolicy(config))


class Clients:
    """Some environments whose frames are told all at once, or each on its own."""

    def __init__(self, algorithm, width, *, one_by_one):
        self.algorithm, self.width, self.one_by_one = algorithm, width, one_by_one
        self.rng = np.random.default_rng(0)
        self.seen = {}

    def wire(self, rows):
        states = {"obs": np.asarray(rows, np.float32)}
        return {"images": {}, "states": states, "text": np.full(len(rows), "")}

    def step(self, chains, *, ends=()):
        """Ask for some environments, and tell what came of it."""
        draw = self.rng.normal
        shown = self.wire([self.seen.get(chain, np.full(self.width, chain)) for chain in chains])
        self.algorithm.expect_chains(chains)
        torch.manual_seed(len(chains))  # whatever was drawn to bootstrap
        action, state = self.algorithm.infer(shown)
        following = draw(size=(len(chains), self.width))
        over = np.isin(chains, ends)
        batch = FrameBatch(
            sampled=Sampled(shown, state, self.algorithm.derive_train_state),
            chains=np.asarray(chains), was_terminated=over, was_truncated=over,
            next_obs=self.wire(following), rewards=draw(size=len(chains)).astype(np.float32),
            steps=np.ones(len(chains), np.int64), terminated=over & (np.asarray(chains) % 2 == 0),
            truncated=over & (np.asarray(chains) % 2 == 1), info={},
        )  # fmt: skip
        for rows in (
            np.arange(len(chains))[:, None] if self.one_by_one else [np.arange(len(chains))]
        ):
            self.algorithm.feedback_batch(batch.rows(rows))
        fresh = draw(size=following.shape)
        self.seen |= dict(zip(chains, np.where(over[:, None], fresh, following), strict=True))
        return action


def play(name, folder, *, one_by_one, overrides=()):
    """Two clients, of three environments and of one, whose frames come in various company."""
    algorithm = served(name, folder, *overrides)
    clients = Clients(algorithm, SHOWN[name], one_by_one=one_by_one)
    for step in range(6):
        clients.step([0, 1, 2], ends=[1] if step == 2 else [])
        clients.step([7], ends=[7] if step == 4 else [])
    clients.step([2, 0], ends=[0])
    clients.step([1])
    clients.step([0, 1, 2])
    algorithm.forget_chain(7)
    algorithm.forget_chain(1)
    clients.step([0, 2], ends=[2])
    clients.step([0, 2])
    for chain in (0, 2):
        algorithm.forget_chain(chain)
    assert len(algorithm._table) == 0
    return algorithm.buffer.get_all()


def by_row(batch):
    """Sort transitions, which two ways to store may order differently."""
    columns = {".".join(np.atleast_1d(key)): value for key, value in batch.items(True, True)}
    order = np.lexsort(columns["observation"].numpy().T)
    return {name: value[torch.from_numpy(order)] for name, value in columns.items()}


CASES = {
    "on policy": ("cartpole_ppo", ()),
    "with a memory": (
        "cartpole_ppo", ("policy.type=RecurrentPPOPolicy", "policy.model_cfg={memory_size: 4}"),
    ),
    "off policy": ("pendulum_sac", ("train.random_steps=0",)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_frames_that_come_together_are_stored_as_if_each_came_alone(case, tmp_path):
    name, overrides = CASES[case]
    together = by_row(play(name, tmp_path, one_by_one=False, overrides=overrides))
    alone = by_row(play(name, tmp_path, one_by_one=True, overrides=overrides))
    assert together.keys() == alone.keys()
    assert len(together["action"]) == 6 * 4 + 3 + 3 + 2 + 2
    for key in together.keys() - {"step", "episode_step"}:
        # The values that are bootstrapped from come of batches of another size.
        near = 1e-5 if key in ("return", "advantage") else 0.0
        torch.testing.assert_close(together[key], alone[key], rtol=near, atol=near)


EPISODES = ("train.random_steps=0", "+buffer.storage={unit: episode}")


@pytest.mark.parametrize(
    ("name", "overrides", "on_policy"),
    [
        ("cartpole_ppo", (), True),
        ("pendulum_sac", (), False),
        ("pendulum_sac", EPISODES, False),
    ],
    ids=["rollouts", "transitions", "episodes"],
)
def test_what_is_sampled_again_counts_as_off_policy(name, overrides, on_policy, tmp_path):
    """A replay by finished segments closes them with the policy's answer, and still is a replay."""
    algorithm = served(name, tmp_path, *overrides)
    assert algorithm.on_policy == on_policy
    assert algorithm.max_staleness == (0 if on_policy else None)


def test_a_replay_of_episodes_learns_from_the_same_rows_again(tmp_path):
    sizes_of = "train.batch_size=2", "train.minibatch_size=1", "train.max_rollout_steps=4"
    overrides = (*sizes_of, *EPISODES)
    algorithm = served("pendulum_sac", tmp_path, *overrides)
    clients = Clients(algorithm, SHOWN["pendulum_sac"], one_by_one=False)
    sizes = []
    for _ in range(2):
        while not algorithm.should_learn():
            clients.step([0, 1])
        algorithm.pre_learn()
        algorithm.learn_impl()
        algorithm.post_learn()
        sizes.append(algorithm.buffer.size())
    assert sizes[1] > sizes[0] > 0


def test_a_policy_that_only_serves_forgets_what_it_remembered_at_an_episode_s_end(tmp_path):
    overrides = ("policy.type=RecurrentPPOPolicy", "policy.model_cfg={memory_size: 4}")
    algorithm = served("cartpole_ppo", tmp_path, *overrides, learns=False)
    memory = algorithm.served.group.eval_list[0].episode_memory
    clients = Clients(algorithm, 4, one_by_one=False)
    clients.seen = {0: np.ones(4), 1: np.ones(4)}
    clients.step([0, 1], ends=[1])
    clients.seen = {0: np.ones(4), 1: np.ones(4)}
    first = memory()["env-1"]["vector"].clone()
    clients.step([0, 1])
    assert torch.equal(memory()["env-1"]["vector"], first), "the same first observation again"
    assert not torch.equal(memory()["env-0"]["vector"], first), "the second of its episode"


@pytest.mark.parametrize(
    ("overrides", "level", "keys"),
    [
        ((), "INFO", "a server does not evaluate: all its clients train"),
        (
            ("train.eval_interval=2", "+env.evaluate_cfg={num_envs: 3}"),
            "WARNING",
            "(train.eval_interval, env.evaluate_cfg of the configuration)",
        ),
    ],
)
def test_a_start_says_that_nobody_evaluates(overrides, level, keys, tmp_path, caplog):
    caplog.set_level("INFO")
    served("cartpole_ppo", tmp_path, *overrides, learns=False)
    assert "evaluate" not in caplog.text
    served("cartpole_ppo", tmp_path, *overrides)
    (record,) = [item for item in caplog.records if "evaluate" in item.getMessage()]
    assert record.levelname == level
    assert keys in record.getMessage()
    assert "`rlightning eval CHECKPOINT`" in record.getMessage()
