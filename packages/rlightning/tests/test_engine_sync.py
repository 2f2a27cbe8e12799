"""The synchronous loop: order of calls, on-policy data, checkpoints, resuming, determinism."""

import collections
import contextlib
import functools
import io

import numpy as np
import pytest
import torch
from torch import nn

from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
)
from rlightning.checkpoint import list_checkpoints, load_checkpoint
from rlightning.config import MainConfig
from rlightning.errors import CheckpointError, ConfigError, ContractError, RLightningError
from rlightning.policy import BasePolicy
from rlightning.runtime import open_run
from rlightning.types import PolicyResponse
from rlightning.utils.logger import close_logger
from rlightning.utils.logger.files import read_rows
from rlightning.utils.progress import ProgressDisplay
from rlightning.utils.registry import POLICIES

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers")


@POLICIES.register("TinySyncPolicy")
class Tiny(BasePolicy):
    """A linear policy that learns by REINFORCE and keeps statistics of what it saw."""

    batched_rollout = True

    def construct_network(self, env_meta, *args, **kwargs):
        space = env_meta.action_space
        self.continuous = hasattr(space, "low")
        actions = space.shape[0] if self.continuous else int(space.n)
        self.actor = nn.Linear(env_meta.observation_space.shape[0], actions)
        self.log_std = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(env_meta.observation_space.shape[0]))
        self.noise = torch.Generator().manual_seed(5)

    def setup_optimizer(self, optim_cfg):
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)

    def distribution(self, observation):
        out = self.actor(observation.float() - self.mean)
        if self.continuous:
            return torch.distributions.Independent(
                torch.distributions.Normal(out, self.log_std.exp()), 1
            )
        return torch.distributions.Categorical(logits=out)

    def rollout_step(self, env_ret, **kwargs):
        distribution = self.distribution(env_ret.observation)
        action = distribution.mode if self.deterministic else distribution.sample()
        version = torch.full((len(env_ret.observation),), self.weights_version)
        return PolicyResponse(env_ret.env_id, action=action, version=version)

    def postprocess(self, env_ret=None, policy_resp=None): ...

    def update_dataset(self, data):
        self.dataset = data
        self.mean = 0.9 * self.mean + 0.1 * data["observation"].float().mean(0)

    def train(self, *args, **kwargs):
        log_prob = self.distribution(self.dataset["observation"]).log_prob(self.dataset["action"])
        scale = 1 + 0.01 * torch.rand((), generator=self.noise)
        loss = -(log_prob * (self.dataset["reward"] + torch.randn(()))).mean() * scale
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.log_metric("rows", len(self.dataset))
        return {"loss": float(loss.detach())}


def configuration(folder, *, train=None, buffer=None, policy=None, env=None, **changes):
    return MainConfig.from_dict(
        {
            "engine": "syncrl",
            "debug": False,
            "verbose": False,
            "env": {
                "name": "cp",
                "backend": "gymnasium",
                "task": "CartPole-v1",
                "num_envs": 2,
                **(env or {}),
            },
            "buffer": {"type": "RolloutBuffer", "capacity": 32, **(buffer or {})},
            "policy": {"type": "TinySyncPolicy", **(policy or {})},
            "train": {
                "max_epochs": 3,
                "max_rollout_steps": 16,
                "eval_episodes": 2,
                "seed": 7,
                "save_best": False,
                **(train or {}),
            },
            "log": {"log_dir": str(folder), "project": "p", "name": "n", "level": "ERROR"},
            **changes,
        }
    )


def engine_for(config, *, resume_from=None):
    check_config(config)
    open_run(config, resume_from=resume_from)
    env_group = build_env_group(config.env)
    policy_group = build_policy_group(config.policy.type, config.policy)
    buffer = build_data_buffer(config.buffer.type, config.buffer, seed=config.train.seed)
    return build_engine(config, env_group, policy_group, buffer)


@pytest.fixture(autouse=True)
def _logs_end_with_each_test():
    torch.set_num_threads(1)
    yield
    close_logger()


def run(folder, *, resume_from=None, **sections):
    engine = engine_for(configuration(folder, **sections), resume_from=resume_from)
    engine.run()
    close_logger()
    return engine


def state(engine):
    """Everything that the learner of an engine holds, flat."""
    policy = engine.policy_group.train_list[0]
    tensors = {name: tensor.clone() for name, tensor in nn.Module.state_dict(policy).items()}
    moments = policy.optimizer.state_dict()["state"]
    tensors |= {
        f"{index}.{name}": torch.as_tensor(value).clone()
        for index, entry in moments.items()
        for name, value in entry.items()
    }
    tensors["lr"] = torch.tensor(policy.optimizer.param_groups[0]["lr"])
    return tensors


def assert_same(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def metrics(folder):
    rows = read_rows(folder / "p" / "n" / "metrics.jsonl")
    timing = ("wall_s", "time", "_s", "per_s", "fps")
    return [{key: value for key, value in row.items() if not key.endswith(timing)} for row in rows]


# ---- order -------------------------------------------------------------------------------------


def test_an_epoch_calls_the_stages_in_their_order_with_hooks_around(tmp_path):
    engine = engine_for(configuration(tmp_path, train={"max_epochs": 2, "eval_interval": 1}))
    calls = []

    def record(name, tag):
        original = getattr(engine, name)

        def call(*args, **kwargs):
            calls.append(tag)
            return original(*args, **kwargs)

        setattr(engine, name, call)

    stages = ("rollout", "update_dataset", "train", "sync_weights", "evaluate")
    for stage in stages:
        record(f"_pre_{stage}_hook", f"{stage}(")
        record(stage, stage)
        record(f"_post_{stage}_hook", f"{stage})")
    engine.run()

    def with_hooks(*names):
        return [part for name in names for part in (f"{name}(", name, f"{name})")]

    epoch = with_hooks("rollout", "update_dataset", "train", "sync_weights")
    assert calls == epoch + with_hooks("evaluate") + epoch + with_hooks("evaluate")


@pytest.mark.parametrize("stage", ["rollout", "update_dataset", "train", "sync_weights"])
def test_the_hook_after_a_stage_runs_also_where_it_raises(tmp_path, stage):
    engine = engine_for(configuration(tmp_path))
    after = []

    def broken(*args, **kwargs):
        raise OSError(f"{stage} broke")

    setattr(engine, stage, broken)
    setattr(engine, f"_post_{stage}_hook", lambda: after.append(stage))
    with pytest.raises(OSError, match=f"{stage} broke"):
        engine.run()
    assert after == [stage]


def test_one_rollout_calls_the_policy_once_per_step_and_once_for_the_bootstrap_row(tmp_path):
    engine = engine_for(configuration(tmp_path, train={"max_epochs": 1}))
    group, buffer = engine.policy_group, engine.buffer
    truncations = []
    original = buffer.add_batched_transition

    def add(env_rets, responses, flags):
        truncations.append(flags)
        return original(env_rets, responses, flags)

    buffer.add_batched_transition = add
    engine.rollout()
    assert truncations == [[False]] * 16 + [[True]]
    assert buffer.size() == 32
    assert engine.env_steps == 32
    assert group.version == 0
    engine.close()


def test_every_action_is_from_the_weights_of_the_last_completed_update(tmp_path):
    engine = engine_for(configuration(tmp_path, train={"max_epochs": 5}))
    learner = engine.policy_group.train_list[0]
    seen = []
    original = learner.update_dataset

    def watch(data):
        seen.append(sorted(set(data["version"].tolist())))
        original(data)

    learner.update_dataset = watch
    engine.run()
    assert seen == [[0], [1], [2], [3], [4]]
    assert engine.policy_group.version == 5


def test_the_batch_has_the_documented_keys_shapes_and_types(tmp_path):
    engine = engine_for(
        configuration(
            tmp_path,
            train={"max_epochs": 1, "max_rollout_steps": 30},
            buffer={"capacity": 60},
            env={"num_envs": 1, "num_workers": 2},
        )
    )
    engine.rollout()
    [batch] = engine.buffer.sample()
    engine.close()
    found = {key: (tuple(batch[key].shape), batch[key].dtype) for key in batch.keys()}  # noqa: SIM118  # a TensorDict
    expected = {
        "next_observation": ((60, 4), torch.float32),
        "observation": ((60, 4), torch.float32),
        "reward": ((60,), torch.float32),
        "terminated": ((60,), torch.bool),
        "truncated": ((60,), torch.bool),
        "action": ((60,), torch.int64),
        "version": ((60,), torch.int64),
    }
    assert {key: found[key] for key in expected} == expected


def test_rollouts_without_a_length_fill_the_buffer(tmp_path):
    engine = run(
        tmp_path, train={"max_rollout_steps": -1, "max_epochs": 2}, buffer={"capacity": 41}
    )
    assert engine.env_steps == 2 * 40
    assert engine.last_metrics["train/rows"] == 40


@pytest.mark.parametrize("env", [{}, {"num_envs": 1, "num_workers": 2}])
def test_several_rollouts_per_epoch_are_one_batch(tmp_path, env):
    engine = run(tmp_path, env=env, train={"rollout_epoch": 2, "max_rollout_steps": 8})
    assert engine.last_metrics["train/rows"] == 32
    assert engine.env_steps == 3 * 32


@pytest.mark.parametrize(
    ("train", "capacity", "found"),
    [
        ({"max_rollout_steps": 17}, 32, "17 steps of 2 environments make 34 transitions"),
        ({"max_rollout_steps": -1}, 1, "0 steps"),
        ({"max_rollout_steps": 16, "rollout_epoch": 2}, 32, "64 transitions"),
    ],
)
def test_a_rollout_that_does_not_fit_is_refused_at_the_start(tmp_path, train, capacity, found):
    with pytest.raises(ConfigError, match=f"(?s){found}.*buffer.capacity is {capacity}"):
        engine_for(configuration(tmp_path, train=train, buffer={"capacity": capacity}))


# ---- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("save", "evaluate", "files", "evaluations"),
    [
        (-1, -1, {"epoch_last"}, [4]),
        (2, -1, {"epoch_1", "epoch_3", "epoch_last"}, [4]),
        (-1, 2, {"epoch_last"}, [2, 4]),
        (2, 3, {"epoch_1", "epoch_3", "epoch_last"}, [3, 4]),
    ],
)
def test_intervals_save_and_evaluate_exactly_when_they_say(
    tmp_path, save, evaluate, files, evaluations
):
    train = {"max_epochs": 4, "save_interval": save, "eval_interval": evaluate}
    engine = run(tmp_path, train=train)
    folder = engine.run_context.checkpoint_dir
    assert {path.name for path in folder.iterdir()} == files | {f"{name}.pt" for name in files}
    rows = [row for row in metrics(tmp_path) if row["stream"] == "eval"]
    assert [row["epoch"] for row in rows] == evaluations
    assert load_checkpoint(folder / "epoch_last").epoch == 4


def test_the_best_evaluation_is_saved(tmp_path):
    train = {"max_epochs": 3, "eval_interval": 1, "save_best": True}
    engine = run(tmp_path, train=train)
    best = load_checkpoint(engine.run_context.checkpoint_dir / "best")
    rows = [row for row in metrics(tmp_path) if row["stream"] == "eval"]
    returns = [row["eval/episode_return"] for row in rows]
    assert best.epoch == returns.index(max(returns)) + 1


def test_only_the_newest_numbered_checkpoints_are_kept(tmp_path):
    engine = run(tmp_path, train={"max_epochs": 4, "save_interval": 1, "keep_checkpoints": 2})
    names = [path.name for path in list_checkpoints(engine.run_context.checkpoint_dir)]
    assert sorted(names) == ["epoch_2", "epoch_3", "epoch_last"]


def test_a_configured_save_dir_is_used(tmp_path):
    run(tmp_path / "runs", train={"save_dir": str(tmp_path / "ck"), "max_epochs": 1})
    assert (tmp_path / "ck" / "epoch_last.pt").is_file()


def test_no_epochs_left_still_ends_with_a_checkpoint(tmp_path):
    engine = run(tmp_path, train={"max_epochs": 0})
    assert load_checkpoint(engine.run_context.checkpoint_dir / "epoch_last").epoch == 0


# ---- same seed, resuming -----------------------------------------------------------------------


def test_the_same_seed_gives_the_same_weights_and_metrics(tmp_path):
    one = run(tmp_path / "1", train={"eval_interval": 1})
    two = run(tmp_path / "2", train={"eval_interval": 1})
    assert_same(state(one), state(two))
    assert metrics(tmp_path / "1") == metrics(tmp_path / "2")
    other = run(tmp_path / "3", train={"seed": 8})
    assert not torch.equal(state(one)["actor.weight"], state(other)["actor.weight"])


def test_evaluations_do_not_touch_training(tmp_path):
    seldom = run(tmp_path / "1", train={"eval_interval": -1})
    often = run(
        tmp_path / "2", train={"eval_interval": 1, "eval_at_start": True, "save_interval": 1}
    )
    assert_same(state(seldom), state(often))


def test_a_line_of_progress_shows_an_evaluation_once(tmp_path, monkeypatch):
    stream = io.StringIO()
    display = functools.partial(ProgressDisplay, stream=stream, min_interval_s=0.0)
    monkeypatch.setattr("rlightning.engine.base_engine.ProgressDisplay", display)
    run(tmp_path, train={"max_epochs": 6, "eval_interval": 2}, verbose=True)
    lines = stream.getvalue().splitlines()
    assert ["eval/episode_return" in line for line in lines] == [False, True, False, True] + [
        False
    ] * 2
    assert all("env_steps" in line and "train/loss" in line for line in lines)


def test_debugging_and_progress_do_not_touch_training(tmp_path):
    quiet = run(tmp_path / "1")
    loud = run(tmp_path / "2", debug=True, verbose=True)
    assert_same(state(quiet), state(loud))


TASKS = {
    "CartPole": {},
    "two workers of one row": {"num_envs": 1, "num_workers": 2},
    "HalfCheetah": {"task": "HalfCheetah-v5"},
}


@pytest.mark.parametrize("env", TASKS.values(), ids=TASKS.keys())
@pytest.mark.parametrize("strategy", ["Double", "None"])
def test_a_resumed_run_ends_bit_for_bit_like_one_that_never_stopped(tmp_path, env, strategy):
    if "HalfCheetah" in env.get("task", ""):
        pytest.importorskip("mujoco")
    policy = {"weight_buffer": {"buffer_strategy": strategy}}
    through = run(tmp_path / "1", env=env, policy=policy, train={"max_epochs": 6})
    first = run(tmp_path / "2", env=env, policy=policy, train={"max_epochs": 3})
    resumed = run(
        tmp_path / "2",
        env=env,
        policy=policy,
        train={"max_epochs": 6},
        resume_from=first.run_context.checkpoint_dir / "epoch_last",
    )
    assert_same(state(through), state(resumed))
    assert resumed.env_steps == through.env_steps == 6 * 32
    assert resumed.policy_group.version == through.policy_group.version == 6
    last = [[row for row in metrics(tmp_path / name) if row["stream"] == "train"] for name in "12"]
    assert last[0] == last[1]


def test_a_checkpoint_of_another_policy_is_refused(tmp_path):
    first = run(tmp_path, train={"max_epochs": 1})
    POLICIES.module_dict["OtherPolicy"] = type("Other", (Tiny,), {"__module__": __name__})
    try:
        with pytest.raises(CheckpointError, match=r"is a checkpoint of .*:Tiny; this run trains"):
            run(
                tmp_path,
                policy={"type": "OtherPolicy"},
                resume_from=first.run_context.checkpoint_dir / "epoch_last",
            )
    finally:
        del POLICIES.module_dict["OtherPolicy"]


def test_a_warm_up_leaves_no_trace(tmp_path):
    cold = run(tmp_path / "1")
    warm = run(tmp_path / "2", train={"warm_up": True, "warm_up_rollout_steps": 5})
    assert_same(state(cold), state(warm))
    assert metrics(tmp_path / "1") == metrics(tmp_path / "2")


def test_resetting_each_rollout_starts_new_episodes_with_the_training_tasks(tmp_path):
    engine = engine_for(configuration(tmp_path, train={"reset_each_rollout": True}))
    options = []
    original = engine.env_group.reset

    def reset(*args, **kwargs):
        options.append(kwargs.get("options"))
        return original(*args, **kwargs)

    engine.env_group.reset = reset
    engine.run()
    assert options == [{"obj_set": "train"}] * 3


# ---- stopping ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["rollout", "evaluate"])
def test_a_stop_saves_and_ends_and_the_run_can_go_on(tmp_path, stage):
    engine = engine_for(configuration(tmp_path, train={"eval_interval": 1}))
    target = engine.env_group.step if stage == "rollout" else engine.policy_group.rollout_batch
    calls = collections.Counter()

    def step(*args, **kwargs):
        calls["n"] += 1
        if calls["n"] == 20 and stage == "rollout":
            engine.run_context.stop.request()
        if kwargs.get("deterministic"):
            engine.run_context.stop.request()
        return target(*args, **kwargs)

    if stage == "rollout":
        engine.env_group.step = step
    else:
        engine.policy_group.rollout_batch = step
    engine.run()
    close_logger()
    folder = engine.run_context.checkpoint_dir
    saved = load_checkpoint(folder / "epoch_last")
    assert saved.epoch == 1
    assert saved.env_steps == (2 * 20 if stage == "rollout" else 32)
    resumed = run(tmp_path, resume_from=folder / "epoch_last")
    assert resumed.epoch == 3
    assert resumed.last_metrics["train/rows"] == 32
    if stage == "evaluate":
        assert_same(state(resumed), state(run(tmp_path / "through")))


def test_an_error_saves_what_there_is_and_goes_on_to_the_caller(tmp_path):
    engine = engine_for(configuration(tmp_path))
    original = engine.train
    epochs = []

    def train():
        epochs.append(engine.epoch)
        if engine.epoch == 2:
            raise OSError("the disk is full")
        return original()

    engine.train = train
    with pytest.raises(OSError, match="the disk is full"):
        engine.run()
    assert epochs == [0, 1, 2]
    assert load_checkpoint(engine.run_context.checkpoint_dir / "crashed").epoch == 2


def test_a_save_that_fails_does_not_hide_the_error_before_it(tmp_path):
    engine = engine_for(configuration(tmp_path))

    def broken(*args, **kwargs):
        raise OSError("first")

    def save(name):
        raise OSError("second")

    engine.train = broken
    engine.save = save
    with pytest.raises(OSError, match="first"):
        engine.run()


# ---- contracts ---------------------------------------------------------------------------------


def test_weights_that_do_not_arrive_are_noticed_at_the_start(tmp_path):
    class Forgetful(Tiny):
        def load_state_dict(self, state_dict, *args, **kwargs):
            pass

    POLICIES.module_dict["Forgetful"] = Forgetful
    try:
        with pytest.raises(ConfigError, match="EVAL and TRAIN policies differ"):
            engine_for(configuration(tmp_path, policy={"type": "Forgetful"}))
    finally:
        del POLICIES.module_dict["Forgetful"]


@pytest.mark.parametrize(("value", "refused"), [(float("nan"), True), (float("-inf"), False)])
def test_first_weights_that_are_nan_are_told_by_name_and_a_mask_is_none(tmp_path, value, refused):
    class Masked(Tiny):
        def construct_network(self, *args, **kwargs):
            super().construct_network(*args, **kwargs)
            self.register_buffer("mask", torch.full((2,), value))

    POLICIES.module_dict["Masked"] = Masked
    expected = pytest.raises(ConfigError, match="the first weights are NaN: mask")
    try:
        with expected if refused else contextlib.nullcontext():
            engine_for(configuration(tmp_path, policy={"type": "Masked"}))
    finally:
        del POLICIES.module_dict["Masked"]


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda rows: torch.full((rows,), 0.5), "action"),
        (lambda rows: torch.full((rows,), 7), "action"),
        (lambda rows: torch.zeros(rows, 3, dtype=torch.int64), "action"),
        (lambda rows: torch.zeros(rows + 1, dtype=torch.int64), "one entry per row"),
    ],
)
def test_actions_that_do_not_fit_are_refused(tmp_path, action, message):
    class Wrong(Tiny):
        def rollout_step(self, env_ret, **kwargs):
            return PolicyResponse(env_ret.env_id, action=action(len(env_ret.observation)))

    POLICIES.module_dict["Wrong"] = Wrong
    try:
        engine = engine_for(configuration(tmp_path, policy={"type": "Wrong"}))
        with pytest.raises(ContractError, match=message):
            engine.run()
    finally:
        del POLICIES.module_dict["Wrong"]


def test_an_engine_without_a_buffer_says_so(tmp_path):
    config = configuration(tmp_path)
    check_config(config)
    open_run(config)
    policy_group = build_policy_group("TinySyncPolicy", config.policy)
    with pytest.raises(RLightningError, match="was built without a buffer"):
        build_engine(config, build_env_group(config.env), policy_group)


def test_metrics_of_a_run_are_finite_and_have_their_prefixes(tmp_path):
    run(tmp_path, train={"max_epochs": 2, "max_rollout_steps": 16})
    rows = metrics(tmp_path)
    streams = {row["stream"] for row in rows}
    assert {"train", "eval"} <= streams
    values = [v for row in rows for v in row.values() if isinstance(v, float)]
    assert np.isfinite(values).all()
    [evaluation] = [row for row in rows if row["stream"] == "eval"]
    assert evaluation["eval/episodes"] == 2
    assert evaluation["eval/unfinished"] == 0
