"""Whole runs of PPO: resuming, what buffers keep of actions and ends, what the optimizer holds."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from rlightning.buffer import ReplayBuffer
from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
)
from rlightning.config import BufferConfig, EnvConfig, MainConfig
from rlightning.env import EnvGroup
from rlightning.errors import RLightningError
from rlightning.policy.state import find_optimizers
from rlightning.runtime import open_run
from rlightning.types import BatchedData, EnvRet, PolicyResponse
from rlightning.utils.logger import close_logger
from rlightning.utils.logger.files import read_rows

NORMALISED = {"normalize_observations": True, "normalize_returns": True}


@pytest.fixture(autouse=True)
def _logs_end_with_each_test():
    torch.set_num_threads(1)
    yield
    close_logger()


def engine_of(
    folder,
    *,
    task="CartPole-v1",
    policy="PPOPolicy",
    buffer=None,
    model=None,
    env=None,
    resume_from=None,
    **train,
):
    own = {"minibatch_size": 16, "ppo_epochs": 2} if policy.endswith("PPOPolicy") else {}
    optim = {"lr": train.pop("lr", 3e-3)} if "PPO" in policy else None
    config = MainConfig.from_dict(
        {
            "engine": "syncrl",
            "debug": False,
            "verbose": False,
            "env": {
                "name": "e",
                "backend": "gymnasium",
                "task": task,
                "num_envs": 2,
                **(env or {}),
            },
            "buffer": {"type": "RolloutBuffer", "capacity": 128, **(buffer or {})},
            "policy": {
                "type": policy,
                "model_cfg": {"hidden_sizes": [8], **(model or {})},
                "optim_cfg": optim,
            },
            "train": {
                "max_epochs": 4,
                "max_rollout_steps": 16,
                "eval_episodes": 2,
                "max_eval_rollout_steps": 20,
                "save_best": False,
                "seed": 11,
                **own,
                **train,
            },
            "log": {"log_dir": str(folder), "project": "p", "name": "n", "level": "ERROR"},
        }
    )
    check_config(config)
    open_run(config, resume_from=resume_from)
    return build_engine(
        config,
        build_env_group(config.env),
        build_policy_group(config.policy.type, config.policy),
        build_data_buffer(config.buffer.type, config.buffer, seed=config.train.seed),
    )


def run(folder, **keys):
    engine = engine_of(folder, **keys)
    engine.run()
    close_logger()
    return engine


def state_of(engine):
    """The learner: tensors of networks and normalisers, moments of Adam, the learning rate."""
    policy = engine.policy_group.train_list[0]
    tensors = dict(nn.Module.state_dict(policy))
    for index, entry in policy.optimizer.state_dict()["state"].items():
        tensors |= {f"{index}.{name}": torch.as_tensor(value) for name, value in entry.items()}
    tensors["lr"] = torch.tensor(policy.optimizer.param_groups[0]["lr"])
    return {name: tensor.clone() for name, tensor in tensors.items()}


def answers_of(engine):
    """What the acting policy says to six fixed observations, without exploration."""
    observation = np.random.default_rng(3).normal(size=(6, 4)).astype(np.float32)
    no = np.zeros(6, bool)
    batch = BatchedData(["e-0"], [EnvRet("e-0", observation, np.zeros(6, np.float32), no, no)])
    response = engine.policy_group.rollout_batch(batch, deterministic=True)["e-0"]
    return response.action.tolist(), response.value.tolist()


# ---- resuming ------------------------------------------------------------------------------------


def test_a_stopped_and_resumed_run_ends_bit_for_bit_like_one_that_went_through(tmp_path):
    """PPO with both normalisers and a learning rate that falls: 4 epochs are 2 and 2 more."""
    keys = {"model": NORMALISED, "anneal_lr": True}
    through = run(tmp_path / "through", **keys)
    stopped = engine_of(tmp_path / "halves", **keys)
    original = stopped.sync_weights

    def stop_after_two():
        original()
        if stopped.epoch == 1:
            stopped.run_context.stop.request()

    stopped.sync_weights = stop_after_two
    stopped.run()
    before = state_of(stopped), answers_of(stopped)
    close_logger()
    assert stopped.epoch == 2
    last = stopped.run_context.checkpoint_dir / "epoch_last"
    resumed = engine_of(tmp_path / "halves", resume_from=last, **keys)
    after = state_of(resumed), answers_of(resumed)
    assert before[0].keys() == after[0].keys()
    assert all(torch.equal(tensor, after[0][name]) for name, tensor in before[0].items())
    assert before[1] == after[1], "an EVAL policy acts otherwise than before the save"
    resumed.run()
    expected, found = state_of(through), state_of(resumed)
    assert resumed.env_steps == through.env_steps == 4 * 16 * 2
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert expected["lr"].item() == pytest.approx(3e-3 * 0.25)


@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("PPOPolicy", "CartPole-v1"),
        ("A2CPolicy", "CartPole-v1"),
        ("RecurrentPPOPolicy", "CartPole-v1"),
        ("VTracePPOPolicy", "CartPole-v1"),
        ("DQNPolicy", "CartPole-v1"),
        ("SACPolicy", "Pendulum-v1"),
        ("TD3Policy", "Pendulum-v1"),
    ],
)
def test_every_module_and_optimizer_starts_as_the_checkpoint_holds_it(tmp_path, kind, task):
    on_policy = kind.endswith(("PPOPolicy", "A2CPolicy"))
    buffer = {"type": "RolloutBuffer" if on_policy else "ReplayBuffer"}
    keys = {"task": task, "policy": kind, "buffer": buffer, "batch_size": 32, "seed": None}
    first = run(tmp_path, max_epochs=3, **keys)
    saved = contents(first)
    resumed = engine_of(
        tmp_path, resume_from=first.run_context.checkpoint_dir / "epoch_last", **keys
    )
    restored = contents(resumed)
    random = contents(engine_of(tmp_path / "other", **keys | {"seed": 12}))
    assert saved.keys() == restored.keys()
    assert any(name.startswith("moments") for name in saved), "no optimizer has learned"
    for name, tensor in saved.items():
        assert torch.equal(tensor, restored[name]), name
    weights = [name for name in random if name.endswith("weight")]
    assert weights
    assert not any(torch.equal(random[name], restored[name]) for name in weights)


def contents(engine):
    """Every tensor of both instances of the policy, and the moments of every optimizer."""
    train, acting = engine.policy_group.train_list[0], engine.policy_group.eval_list[0]
    tensors = {f"train.{name}": item for name, item in nn.Module.state_dict(train).items()}
    tensors |= {f"eval.{name}": item for name, item in nn.Module.state_dict(acting).items()}
    for name, optimizer in find_optimizers(train).items():
        for index, entry in optimizer.state_dict()["state"].items():
            tensors |= {
                f"moments.{name}.{index}.{key}": torch.as_tensor(value)
                for key, value in entry.items()
            }
    return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("saved", "now"), [({}, NORMALISED), (NORMALISED, {}), ({}, {"hidden_sizes": [8, 8]})]
)
def test_a_part_that_only_one_of_checkpoint_and_policy_has_is_an_error(tmp_path, saved, now):
    """A module that starts at random although the run was resumed would go unnoticed."""
    first = run(tmp_path, max_epochs=1, model=saved)
    last = first.run_context.checkpoint_dir / "epoch_last"
    with pytest.raises((RLightningError, RuntimeError), match=r"(?i)state|missing key"):
        engine_of(tmp_path, resume_from=last, model=now)


def test_what_changed_since_the_checkpoint_is_said_line_by_line(tmp_path):
    first = run(tmp_path, max_epochs=1)
    last = first.run_context.checkpoint_dir / "epoch_last"
    run(tmp_path, max_epochs=2, lr=1e-3, ppo_epochs=3, resume_from=last)
    log = (first.run_context.run_dir / "run.log").read_text()
    lines = [line.split("changed: ")[1] for line in log.splitlines() if "changed: " in line]
    assert lines == [
        "policy.optim_cfg.lr was 0.003, is 0.001",
        "train.ppo_epochs was 2, is 3",
    ]


@pytest.mark.parametrize("anneal", [False, True])
def test_what_changed_since_the_checkpoint_takes_effect(tmp_path, anneal):
    """The line in the log is no promise that the restored optimizer breaks."""
    first = run(tmp_path, max_epochs=1, anneal_lr=anneal)
    last = first.run_context.checkpoint_dir / "epoch_last"
    resumed = engine_of(tmp_path, max_epochs=4, lr=1e-3, anneal_lr=anneal, resume_from=last)
    assert learning_rate(resumed) == pytest.approx(1e-3)
    resumed.run()
    assert learning_rate(resumed) == pytest.approx(1e-3 * 0.25 if anneal else 1e-3)


def learning_rate(engine):
    return engine.policy_group.train_list[0].optimizer.param_groups[0]["lr"]


# ---- what the optimizer holds --------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"model": {"shared_encoder": True}},
        {"model": NORMALISED, "fused_update": "auto"},
        {"warm_up": True},
    ],
    ids=str,
)
def test_the_optimizer_holds_exactly_the_parameters_of_the_module(tmp_path, keys):
    """Before and after updates, a weight sync, a save and a resume."""
    first = engine_of(tmp_path, max_epochs=1, **keys)
    engines = [first]
    first.run()
    close_logger()
    last = first.run_context.checkpoint_dir / "epoch_last"
    engines.append(engine_of(tmp_path, max_epochs=2, resume_from=last, **keys))
    engines[1].run()
    for engine in engines:
        policy = engine.policy_group.train_list[0]
        held = [id(p) for group in policy.optimizer.param_groups for p in group["params"]]
        assert len(held) == len(set(held)) > 0
        assert set(held) == {id(p) for p in policy.parameters() if p.requires_grad}


# ---- actions -------------------------------------------------------------------------------------


class Boxed(gym.Env):
    """Keeps the actions it receives; episodes of five steps."""

    received: list = []  # noqa: RUF012
    observation_space = gym.spaces.Box(-1, 1, (2,))

    def __init__(self, low=-1.0, high=1.0):
        self.action_space = gym.spaces.Box(float(low), float(high), (2,), np.float32)
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.uniform(-1, 1, 2).astype(np.float32), {}

    def step(self, action):
        self.received.append(np.array(action))
        self.steps += 1
        observation = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return observation, float(-np.square(action).sum()), False, self.steps == 5, {}


gym.register("pitfalls/Boxed-v0", entry_point=Boxed)


@pytest.mark.parametrize(("low", "high"), [(0, 5), (-2, 0), (-np.inf, np.inf)])
def test_actions_are_clipped_for_the_environment_alone(tmp_path, low, high):
    """Learned from is what was sampled: its density is the recorded one, ratios start at 1."""
    env = {"env_kwargs": {"low": low, "high": high}}
    engine = engine_of(
        tmp_path, task="pitfalls/Boxed-v0", env=env, model={"log_std_init": 1.0}, max_epochs=1
    )
    Boxed.received.clear()
    engine.rollout()
    received = np.stack(Boxed.received)
    [data] = engine.buffer.sample(shuffle=False)
    policy = engine.policy_group.train_list[0]
    with torch.no_grad():
        distribution, _ = policy.actor_critic(data["observation"])
    ratio = (distribution.log_prob(data["action"]) - data["log_prob"]).exp()
    assert (ratio - 1).abs().max() < 1e-5
    stored = data["action"].reshape(2, 16, 2).transpose(0, 1).reshape(32, 2).numpy()
    np.testing.assert_array_equal(received, stored.clip(low, high))
    assert ((stored < low) | (stored > high)).any() == np.isfinite(high)

    with torch.no_grad():  # an evaluated mean far outside
        for parameter in engine.policy_group.eval_list[0].parameters():
            parameter.add_(30.0)
    Boxed.received.clear()
    engine.evaluate()
    evaluated = np.stack(Boxed.received)
    assert len(evaluated) >= 10
    assert ((evaluated >= low) & (evaluated <= high)).all()
    engine.close()


# ---- ends of episodes ----------------------------------------------------------------------------


@pytest.mark.parametrize("n_step", [1, 3])
def test_time_limits_are_never_terminal_in_a_replay_buffer(n_step):
    """Pendulum only ever truncates: of 57 stored transitions none is terminal, 9 end in a cut.

    Three rows, twenty steps, a limit of 6: each row is cut after steps 6, 12 and 18.
    """
    env = EnvConfig.from_dict(
        {
            "name": "p",
            "backend": "gymnasium",
            "task": "Pendulum-v1",
            "num_envs": 3,
            "max_episode_steps": 6,
        }
    )
    group = EnvGroup([env])
    keys = {"capacity": 300, "n_step": n_step, "gamma": 0.9, "sampler": {"type": "all"}}
    buffer = ReplayBuffer(BufferConfig.from_dict({"type": "ReplayBuffer", **keys}))
    buffer.init(group.init(seed=0), group.env_ids)
    batch = group.first_env_rets
    for _ in range(20):
        answer = PolicyResponse(group.env_ids[0], action=np.zeros((3, 1), np.float32))
        responses = BatchedData(group.env_ids, [answer])
        buffer.add_batched_transition(batch, responses, [False])
        batch, _ = group.step(responses)
    group.close()
    [data] = buffer.sample(shuffle=False)
    assert len(data) == 57
    assert data["terminated"].float().mean() == 0.0
    assert data["truncated"].sum() == 9 * n_step
    if n_step > 1:
        assert (data["discount"] >= 0.9**n_step - 1e-6).all(), "a cut bootstraps"


# ---- metrics before there is anything to measure -------------------------------------------------


def test_before_the_first_episode_ends_there_is_no_return_and_never_nan(tmp_path):
    """Steps 1-4, 5-8, 9-12 with a limit of 6: one episode per row ends in the second and third."""
    env = {"max_episode_steps": 6}
    engine = run(
        tmp_path, task="Pendulum-v1", env=env, max_rollout_steps=4, minibatch_size=4, max_epochs=3
    )
    rows = read_rows(engine.run_context.run_dir / "metrics.jsonl")
    rollouts = [row for row in rows if row["stream"] == "rollout"]
    with_episodes = [row["env_step"] for row in rollouts if "rollout/episode_return" in row]
    assert with_episodes == [16, 24]
    assert {row["rollout/episode_length"] for row in rollouts if row["env_step"] > 8} == {6.0}
    values = [value for row in rows for value in row.values() if isinstance(value, float)]
    assert np.isfinite(values).all()
