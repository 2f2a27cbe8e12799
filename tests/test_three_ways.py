"""One policy, seed and environment: in process, on Ray and over the wire, the same weights."""

import functools

import pytest

SLOW = pytest.mark.slow
CASES = {
    # Episodes end inside and at the border of rollouts, and observations are normalised.
    "ppo": (
        "cartpole_ppo",
        "env.num_envs=1", "train.max_epochs=4", "train.max_rollout_steps=64",
        "train.minibatch_size=32", "train.eval_episodes=1",
        "policy.model_cfg={normalize_observations: true}",
    ),
    # Every episode is truncated, inside a rollout: 200 steps, rollouts of 128.
    "truncated": (
        "pendulum_ppo",
        "env.num_envs=1", "train.max_epochs=4", "train.max_rollout_steps=128",
        "train.ppo_epochs=2", "train.eval_interval=-1", "train.eval_episodes=1", "train.seed=3",
    ),
    "recurrent": (
        "cartpole_ppo",
        "env.num_envs=1", "train.max_epochs=3", "train.max_rollout_steps=64",
        "train.minibatch_size=32", "train.eval_episodes=1", "policy.type=RecurrentPPOPolicy",
        "train.ppo_epochs=2",
    ),
    "sac": (
        "pendulum_sac",
        "train.max_epochs=40", "buffer.min_size=100", "train.batch_size=64",
        "train.minibatch_size=32", "train.eval_episodes=1", "train.seed=1",
    ),
    "dqn": (
        "cartpole_dqn",
        "env.num_envs=1",
        "train.max_epochs=30", "buffer.min_size=50", "train.batch_size=32",
        "train.minibatch_size=16", "train.eval_episodes=1", "train.seed=1",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def in_process(bridge, tmp_path_factory):
    """Return what a case ends with in one process."""

    @functools.cache
    def train(case):
        name, *overrides = CASES[case]
        return bridge.train_in_process(name, tmp_path_factory.mktemp(case), *overrides)

    return train


@pytest.mark.parametrize("case", CASES)
def test_in_process_and_over_the_wire_both_ways_end_with_the_same_weights(
    case, in_process, tmp_path, monkeypatch, bridge
):
    name, *overrides = CASES[case]
    remote = bridge.train_remotely(name, tmp_path / "two", monkeypatch, *overrides)
    bridge.assert_same_weights(in_process(case), remote)
    served = bridge.train_served(name, tmp_path / "three", *overrides)
    bridge.assert_same_weights(in_process(case), served)


ON_RAY = [case if case == "ppo" else pytest.param(case, marks=SLOW) for case in CASES]


@pytest.mark.ray
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", ON_RAY)
def test_one_worker_of_each_kind_on_ray_ends_with_the_same_weights(
    case, in_process, ray_cluster, tmp_path, bridge
):
    name, *overrides = CASES[case]
    on_ray = bridge.train_on_ray(name, tmp_path, *overrides)
    bridge.assert_same_weights(in_process(case), on_ray)


def test_another_seed_gives_other_weights(tmp_path, bridge):
    name, *overrides = CASES["ppo"]
    overrides.append("train.max_epochs=1")
    one = bridge.train_in_process(name, tmp_path / "one", *overrides, "train.seed=1")
    two = bridge.train_in_process(name, tmp_path / "two", *overrides, "train.seed=2")
    with pytest.raises(AssertionError):
        bridge.assert_same_weights(one, two)
