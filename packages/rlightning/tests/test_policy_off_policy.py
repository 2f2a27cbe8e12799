"""What SAC, TD3 and DQN share: minibatches, counts, exploration, priorities, resuming, learning."""

import os
import pathlib
import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlightning.buffer.replay_buffer import ReplayBuffer
from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
)
from rlightning.config import BufferConfig, MainConfig
from rlightning.errors import ConfigError, ContractError, NonFiniteError
from rlightning.policy.policy_group import PolicyGroup
from rlightning.runtime import open_run
from rlightning.testing import TargetEnv, check_engine, check_policy
from rlightning.types import BatchedData, EnvMeta, EnvRet
from rlightning.utils.logger import close_logger
from rlightning.utils.registry import POLICIES

gym.register("OffPolicyDiscreteTarget-v0", TargetEnv)
gym.register("OffPolicyContinuousTarget-v0", TargetEnv, kwargs={"continuous": True})

VECTOR, BOX = spaces.Box(-np.inf, np.inf, (3,)), spaces.Box(-2, 2, (2,))
SPACES = {"SACPolicy": BOX, "TD3Policy": BOX, "DQNPolicy": spaces.Discrete(3, start=2)}
ALL = pytest.mark.parametrize("kind", SPACES)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    yield
    close_logger()


def configuration(kind, folder="runs", *, buffer=None, env=None, model=None, optim=None, **train):
    target = "Discrete" if kind == "DQNPolicy" else "Continuous"
    model = {"hidden_sizes": [16]} | (model or {})
    config = MainConfig.from_dict(
        {
            "engine": "syncrl",
            "debug": False,
            "verbose": False,
            "env": {
                "name": "t",
                "backend": "gymnasium",
                "task": f"OffPolicy{target}Target-v0",
                "num_envs": 4,
                **(env or {}),
            },
            "buffer": {"type": "ReplayBuffer", "capacity": 5000, **(buffer or {})},
            "policy": {"type": kind, "model_cfg": model, "optim_cfg": optim},
            "train": {
                "max_epochs": 6,
                "max_rollout_steps": 4,
                "batch_size": 32,
                "eval_episodes": 4,
                "seed": 3,
                "save_best": False,
                **train,
            },
            "log": {"log_dir": str(folder), "project": "p", "name": "n", "level": "ERROR"},
        }
    )
    check_config(config)
    return config


def engine_of(config, *, resume_from=None):
    open_run(config, resume_from=resume_from)
    return build_engine(
        config,
        build_env_group(config.env),
        build_policy_group(config.policy.type, config.policy),
        build_data_buffer(config.buffer.type, config.buffer, seed=config.train.seed),
    )


def run(config, *, resume_from=None):
    engine = engine_of(config, resume_from=resume_from)
    engine.run()
    close_logger()
    return engine


def group_of(kind, *, space=None, n_envs=4, **options):
    config = configuration(kind, **options)
    torch.manual_seed(0)
    policy_class = POLICIES.get(kind)
    group = PolicyGroup(
        [policy_class(config.policy, "train")], [policy_class(config.policy, "eval")], config.policy
    )
    meta = EnvMeta("e-0", SPACES[kind] if space is None else space, VECTOR, n_envs)
    group.init(config.train, meta)
    group.sync_weights()
    return group, meta


def env_ret_of(n=4, seed=0):
    observation = np.random.default_rng(seed).normal(size=(n, 3)).astype(np.float32)
    no = np.zeros(n, bool)
    return EnvRet("e-0", observation, np.zeros(n, np.float32), no, no.copy())


def batch_of(kind, rows=32, seed=0, **columns):
    """A batch as a ReplayBuffer gives it; rewards are their row numbers."""
    random = torch.Generator().manual_seed(seed)
    if kind == "DQNPolicy":
        action = torch.randint(2, 5, (rows,), generator=random)
    else:
        action = torch.rand(rows, 2, generator=random) * 4 - 2
    return {
        "observation": torch.randn(rows, 3, generator=random),
        "action": action,
        "reward": torch.arange(rows, dtype=torch.float32),
        "terminated": torch.rand(rows, generator=random) < 0.2,
        "truncated": torch.rand(rows, generator=random) < 0.2,
        "next_observation": torch.randn(rows, 3, generator=random),
        **columns,
    }


def update(group, batch):
    group.update_dataset([batch])
    metrics = group.train()
    group.sync_weights()
    return metrics


def tensors_of(policy):
    return {name: t.clone() for name, t in torch.nn.Module.state_dict(policy).items()}


# ---- the contract ------------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("rows", [1, 3])
def test_the_policies_pass_the_conformance_checks(kind, rows):
    config = configuration(kind)
    check_policy(POLICIES.get(kind), config.policy, EnvMeta("e-0", SPACES[kind], VECTOR, rows))


@ALL
def test_a_run_with_the_engine_passes_the_conformance_checks(kind):
    check_engine(configuration(kind, max_epochs=4, minibatch_size=16))


@ALL
def test_actions_lie_in_the_space_before_and_after_learning_and_in_evaluation(kind):
    group, meta = group_of(kind)
    for _ in range(2):
        for deterministic in (False, True):
            batch = BatchedData(["e-0"], [env_ret_of()])
            action = group.rollout_batch(batch, deterministic=deterministic)["e-0"].action.numpy()
            assert all(meta.action_space.contains(row) for row in action)
        update(group, batch_of(kind))


@ALL
def test_evaluation_repeats_itself(kind):
    group, _ = group_of(kind)
    batch = BatchedData(["e-0"], [env_ret_of()])
    one, two = (group.rollout_batch(batch, deterministic=True)["e-0"].action for _ in range(2))
    assert torch.equal(one, two)


@ALL
def test_actions_are_uniform_until_the_first_gradient_step(kind):
    group, _ = group_of(kind, n_envs=3000)
    batch = BatchedData(["e-0"], [env_ret_of(3000)])
    first = group.rollout_batch(batch)["e-0"].action.numpy()
    if kind == "DQNPolicy":
        assert np.bincount(first, minlength=5)[2:] == pytest.approx([1000] * 3, abs=120)
    else:
        assert first.mean(0) == pytest.approx([0, 0], abs=0.1)
        assert first.var(0) == pytest.approx([4 / 3, 4 / 3], abs=0.1)
        update(group, batch_of(kind))
        later = group.rollout_batch(batch)["e-0"].action.numpy()
        assert abs(later.var(0) - 4 / 3).min() > 0.15, "not the uniform spread, which is within 0.1"


# ---- updates to data ---------------------------------------------------------------------------


@ALL
def test_four_gradient_steps_see_four_distinct_sets_of_rows(kind):
    group, _ = group_of(kind, minibatch_size=8)
    policy, seen = group.train_list[0], []
    original = policy.update

    def spy(batch, step):
        seen.append((step, batch.reward.tolist()))
        return original(batch, step)

    policy.update = spy
    metrics = update(group, batch_of(kind))
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert [rows for _, rows in seen] == [list(range(i, i + 8)) for i in (0, 8, 16, 24)]
    assert (metrics["updates"], metrics["updates_per_step"]) == (4, 4 / 16)
    assert update(group, batch_of(kind))["updates"] == 8
    assert seen[4][0] == 4


@ALL
def test_a_batch_that_minibatches_do_not_divide_is_refused_at_the_start(kind):
    with pytest.raises(ConfigError, match=r"batch_size is 32, train\.minibatch_size 12"):
        group_of(kind, minibatch_size=12)


@ALL
def test_every_step_moves_weights_that_reach_the_acting_instance(kind):
    group, _ = group_of(kind)
    before = tensors_of(group.train_list[0])
    update(group, batch_of(kind))
    after, acting = tensors_of(group.train_list[0]), tensors_of(group.eval_list[0])
    assert acting["n_updates"] == 1
    for name, tensor in after.items():
        assert torch.equal(tensor, acting[name]), name
    assert any(not torch.equal(before[n], after[n]) for n in after if n.startswith(("critic", "q")))


@ALL
def test_no_target_network_or_action_bound_is_learned_by_an_optimizer(kind):
    group, _ = group_of(kind)
    policy = group.train_list[0]
    learned = [
        id(p)
        for optimizer in policy.optimizers.values()
        for param_group in optimizer.param_groups
        for p in param_group["params"]
    ]
    named = {n: id(p) for n, p in policy.named_parameters()}
    assert len(learned) == len(set(learned)), "a parameter in two optimizers"
    assert set(learned) == {i for n, i in named.items() if not n.startswith("target_")}


# ---- n-step and prioritised replay -------------------------------------------------------------


@ALL
def test_the_buffer_s_discount_is_used_where_there_is_one(kind):
    group, _ = group_of(kind, gamma=0.5)
    policy = group.train_list[0]
    batch = batch_of(kind)
    one_step = policy._transitions(batch).discount
    assert torch.equal(one_step, 0.5 * (~batch["terminated"]).float())
    discount = torch.full((32,), 0.125)
    assert torch.equal(policy._transitions(batch | {"discount": discount}).discount, discount)


@ALL
def test_a_buffer_with_another_gamma_is_refused(kind):
    group, _ = group_of(kind, gamma=0.995)
    wrong = torch.full((32,), 0.99**3)
    with pytest.raises(ConfigError, match=r"train\.gamma is 0\.995.*buffer\.gamma"):
        group.update_dataset([batch_of(kind, discount=wrong)])
    update(group, batch_of(kind, discount=torch.full((32,), 0.995**3)))


@ALL
def test_weights_of_zero_switch_rows_off(kind):
    """Row 0 is absurd; with weight zero the critics' loss does not see it."""
    batch = batch_of(kind, weight=torch.ones(32), index=torch.arange(32))
    batch["reward"][0] = 1e6
    batch["weight"][0] = 0.0
    group, _ = group_of(kind)
    metrics = update(group, batch)
    loss = metrics["q_loss" if kind == "DQNPolicy" else "critic_loss"]
    assert loss < 5000
    assert group.train_list[0].priorities().errors[0] > 1e5


@ALL
def test_priorities_name_the_rows_of_the_batch_once(kind):
    group, _ = group_of(kind, minibatch_size=8)
    policy = group.train_list[0]
    assert policy.priorities() is None
    names = torch.arange(100, 132)
    update(group, batch_of(kind, weight=torch.ones(32), index=names))
    priorities = policy.priorities()
    assert torch.equal(priorities.names, names)
    assert priorities.errors.shape == (32,)
    assert (priorities.errors >= 0).all()
    assert priorities.errors[-8:].mean() > priorities.errors[:8].mean(), "rewards grow by row"
    assert policy.priorities() is None
    update(group, batch_of(kind))
    assert policy.priorities() is None


@ALL
def test_priorities_that_nobody_takes_are_warned_about_once(kind, caplog):
    group, _ = group_of(kind)
    caplog.set_level("WARNING", logger="rlightning")
    batch = batch_of(kind, weight=torch.ones(32), index=torch.arange(32))
    for _ in range(3):
        update(group, batch)
    said = [r for r in caplog.records if "update_priorities" in r.getMessage()]
    assert len(said) == 1


def replay_of(meta, *, n_step=1, **options):
    config = {"type": "ReplayBuffer", "capacity": 400, "n_step": n_step, **options}
    buffer = ReplayBuffer(BufferConfig.from_dict(config), seed=0)
    buffer.init([meta])
    return buffer


@ALL
def test_a_prioritised_three_step_buffer_goes_round_with_the_policy(kind):
    group, meta = group_of(kind, gamma=0.9)
    buffer = replay_of(meta, n_step=3, gamma=0.9, prioritized=True)
    for step in range(30):
        env_ret = env_ret_of(4, seed=step)
        batch = BatchedData(["e-0"], [env_ret])
        buffer.add_batched_transition(batch, group.rollout_batch(batch), [False])
    for _ in range(3):
        group.update_dataset(buffer.sample(batch_size=32))
        group.train()
        assert buffer.update_priorities(*group.train_list[0].priorities()) == 32


@ALL
def test_a_truncated_transition_bootstraps_from_its_own_last_observation(kind):
    """Through the buffer: only the terminated row has discount zero; the truncated one keeps it."""
    group, meta = group_of(kind, n_envs=2, gamma=0.9)
    buffer = replay_of(meta)
    for step in range(3):
        terminated, truncated = np.array([step == 1, False]), np.array([False, step == 1])
        info = {}
        if step == 1:
            last = np.array([[7.0] * 3, [8.0] * 3], np.float32)
            info = {"final_obs": last, "_final_obs": np.array([True, True])}
        observation = np.full((2, 3), step, np.float32)
        env_ret = EnvRet("e-0", observation, np.ones(2, np.float32), terminated, truncated, info)
        response = group.rollout_batch(BatchedData(["e-0"], [env_ret]))["e-0"]
        buffer.add_transition("e-0", env_ret, response, False)
    policy = group.train_list[0]
    policy.update_dataset(buffer.get_all())
    rows = policy._transitions(policy.dataset)
    found = sorted(zip(rows.next_observation[:, 0].tolist(), rows.discount.tolist(), strict=True))
    assert [n for n, _ in found] == [2.0, 2.0, 7.0, 8.0]
    assert [d for _, d in found] == pytest.approx([0.9, 0.9, 0.0, 0.9])


# ---- errors ------------------------------------------------------------------------------------


@ALL
def test_a_batch_of_an_on_policy_buffer_says_which_buffer_is_needed(kind):
    group, _ = group_of(kind)
    batch = batch_of(kind)
    del batch["next_observation"]
    with pytest.raises(ContractError, match=rf"lacks next_observation.*{kind}.*ReplayBuffer"):
        group.update_dataset([batch])


@ALL
def test_a_wrong_action_space_is_refused_with_what_takes_it(kind):
    other = BOX if kind == "DQNPolicy" else spaces.Discrete(3)
    with pytest.raises(ConfigError, match=r"action space is .*PPOPolicy"):
        group_of(kind, space=other)


@ALL
def test_unknown_keys_are_refused_with_a_suggestion(kind):
    with pytest.raises(ConfigError, match=r"hiden_sizes.*hidden_sizes"):
        group_of(kind, model={"hiden_sizes": [8]})
    with pytest.raises(ConfigError, match=r"learning_rate"):
        group_of(kind, optim={"learning_rate": 1.0})
    with pytest.raises(ConfigError, match=r"target_intervall.*target_interval"):
        group_of(kind, target_intervall=2)


@ALL
def test_a_nan_in_the_network_stops_before_the_optimizer_moves(kind):
    group, _ = group_of(kind)
    policy = group.train_list[0]
    network = policy.q_network if kind == "DQNPolicy" else policy.critic
    with torch.no_grad():
        next(network.parameters())[0, 0] = float("nan")
    before = tensors_of(policy)
    with pytest.raises(NonFiniteError, match="gradient of"):
        update(group, batch_of(kind))
    for name, tensor in tensors_of(policy).items():
        assert torch.equal(before[name].nan_to_num(7.0), tensor.nan_to_num(7.0)), name


# ---- resuming ----------------------------------------------------------------------------------


@ALL
def test_a_resumed_run_ends_bit_for_bit_like_one_that_never_stopped(tmp_path, kind):
    """Networks, slow copies, temperature, optimizers, exploration and sampling all go on."""
    options = {
        "buffer": {"save_contents": True, "min_size": 40, "n_step": 2, "gamma": 0.99},
        "env": {"task": "CartPole-v1" if kind == "DQNPolicy" else "Pendulum-v1"},
        "minibatch_size": 16,
    }
    if kind == "DQNPolicy":
        options |= {"target_interval": 3, "epsilon_updates": 12}
    through = run(configuration(kind, tmp_path / "1", max_epochs=10, **options))
    first = run(configuration(kind, tmp_path / "2", max_epochs=5, **options))
    resumed = engine_of(
        configuration(kind, tmp_path / "2", max_epochs=10, **options),
        resume_from=first.run_context.checkpoint_dir / "epoch_last",
    )
    resumed.run()
    want, have = (tensors_of(e.policy_group.train_list[0]) for e in (through, resumed))
    assert want["n_updates"] > first.policy_group.train_list[0].n_updates > 0
    for name, tensor in want.items():
        assert torch.equal(tensor, have[name]), name
    if kind == "DQNPolicy":
        epsilons = [e.policy_group.eval_list[0].epsilon for e in (through, resumed)]
        assert epsilons[0] == epsilons[1] < 1.0


@ALL
def test_a_resumed_run_without_its_transitions_fills_the_buffer_before_it_learns(tmp_path, kind):
    options = {"buffer": {"save_contents": False, "min_size": 40}}
    first = run(configuration(kind, tmp_path, max_epochs=5, **options))
    done = int(first.policy_group.train_list[0].n_updates)
    engine = engine_of(
        configuration(kind, tmp_path, max_epochs=7, **options),
        resume_from=first.run_context.checkpoint_dir / "epoch_last",
    )
    engine.run()
    assert engine.buffer.size() < 40
    assert int(engine.policy_group.train_list[0].n_updates) == done > 0
    assert not engine.policy_group.eval_list[0].acts_randomly


# ---- several learners --------------------------------------------------------------------------

RANKS = """
import sys
import torch
import torch.distributed as dist
sys.path.insert(0, sys.argv[3])
import test_policy_off_policy as shared

rank, folder = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
for kind, space in shared.SPACES.items():
    config = shared.configuration(kind, minibatch_size=16)
    torch.manual_seed(rank)
    policy = shared.POLICIES.get(kind)(config.policy, "train")
    policy.process_group = dist.group.WORLD
    policy.init_train(config.train, shared.EnvMeta("e-0", space, shared.VECTOR, 4))
    for seed in range(3):
        policy._update_dataset(shared.batch_of(kind, seed=10 * seed + rank))
        policy._train()
    weights = policy.export_weights()
    torch.save(weights, f"{folder}/{kind}_{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_learners_with_different_data_stay_equal(tmp_path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    folder = os.path.dirname(__file__)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(tmp_path), folder],
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
    for kind in SPACES:
        zero, one = (torch.load(tmp_path / f"{kind}_{r}.pt", weights_only=True) for r in (0, 1))
        for name, tensor in zero["extra"].items():
            assert torch.equal(tensor, one["extra"][name]), (kind, name)
        for module, weights in zero["weights"].items():
            for name, tensor in weights.items():
                assert torch.equal(tensor, one["weights"][module][name]), (kind, module, name)


# ---- learning ----------------------------------------------------------------------------------


@ALL
def test_it_learns_the_target_environment(tmp_path, kind):
    """Random play scores about -6.7 (continuous) or 3.3 (discrete) of at most 0 or 10."""
    options = {"actor_lr": 0.003, "critic_lr": 0.003}
    engine = run(
        configuration(
            kind,
            tmp_path,
            buffer={"min_size": 200},
            env={"num_envs": 8},
            model={"hidden_sizes": [32]},
            optim={"lr": 0.003} if kind == "DQNPolicy" else options,
            max_epochs=70,
            max_rollout_steps=5,
            batch_size=640,
            minibatch_size=64,
            gamma=0.5,
            tau=0.02,
            target_interval=1,
            eval_episodes=40,
        )
    )
    score = engine.last_metrics["eval/episode_return"]
    assert score > (9.5 if kind == "DQNPolicy" else -0.5)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["sac", "td3"])
def test_pendulum_swings_up_within_six_thousand_steps(tmp_path, kind):
    """Random play scores about -1,200; the packaged configuration, seed 0."""
    program = pathlib.Path(sys.executable).with_name("rlightning")
    command = [program, "train", f"pendulum_{kind}", "train.seed=0"]
    subprocess.run([*command, f"log.log_dir={tmp_path}", "log.name=n", "verbose=false"], check=True)
    from rlightning.utils.logger.files import read_rows

    rows = read_rows(tmp_path / "pendulum" / "n" / "metrics.jsonl")
    final = [row for row in rows if row["stream"] == "eval"][-1]
    assert final["env_step"] == 6000
    assert final["eval/episode_return"] >= -300


# ---- normalised observations -----------------------------------------------------------------


def far_away(kind, observation):
    rows = len(observation)
    action = torch.zeros(rows, 2) if kind != "DQNPolicy" else torch.full((rows,), 3)
    return {
        "observation": observation,
        "action": action,
        "reward": torch.ones(rows),
        "terminated": torch.zeros(rows, dtype=torch.bool),
        "next_observation": observation + 2.0,
    }


@ALL
def test_raw_replay_is_normalised_by_the_same_statistics_for_learning_and_acting(off_policy, kind):
    """Observations around 100 with a spread of 4: networks see zero mean and unit variance."""
    model = {"normalize_observations": True}
    group = off_policy.make(kind, space=SPACES[kind], model=model, batch_size=64)
    policy, actor = group.train_list[0], group.eval_list[0]
    torch.manual_seed(1)
    data = far_away(kind, 100.0 + 4.0 * torch.randn(64, 3))
    seen = []
    original = policy.update
    policy.update = lambda batch, step: seen.append(batch) or original(batch, step)
    policy.update_dataset(data)
    policy.train()
    first = seen[0]
    assert first.observation.mean(0).abs().max() < 0.05
    assert (first.observation.std(0) - 1.0).abs().max() < 0.05
    shift = (first.next_observation - first.observation) * data["observation"].std(0)
    assert torch.allclose(shift, torch.full_like(shift, 2.0), rtol=0.05)
    assert data["observation"].mean() > 90  # what the buffer holds stays raw
    group.sync_weights()
    wanted = policy.normalized(data["observation"][:4])
    assert torch.allclose(actor.normalized(data["observation"][:4]), wanted)
    inputs = []
    network = actor.q_network if kind == "DQNPolicy" else actor.actor
    network.register_forward_hook(lambda _, args, __: inputs.append(args[0]))
    no = np.zeros(4, bool)
    actor._rollout(EnvRet("e-0", data["observation"][:4], np.zeros(4, np.float32), no, no))
    assert torch.allclose(inputs[0], wanted)


@ALL
def test_observations_stay_as_they_are_unless_asked(off_policy, kind):
    policy = off_policy.make(kind, space=SPACES[kind]).train_list[0]
    observation = 100.0 + torch.randn(4, 3)
    assert policy.normalized(observation) is observation
