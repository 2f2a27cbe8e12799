"""Runs of several tasks: what is learned, measured, saved, shown, and refused."""

import time

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
from rlightning.cli import main
from rlightning.config import EnvConfig, MainConfig
from rlightning.errors import ConfigError
from rlightning.policy import BasePolicy
from rlightning.runtime import open_run
from rlightning.testing import check_env
from rlightning.types import PolicyResponse
from rlightning.utils.logger import close_logger
from rlightning.utils.logger.files import read_rows
from rlightning.utils.registry import POLICIES


class Levers(gym.Env):
    """Four pulls; one lever of several gives a reward. All look alike, if equally long."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  # Gymnasium's way

    def __init__(self, levers=2, right=0, numbers=2, render_mode=None):
        self.observation_space = spaces.Box(0.0, 1.0, (numbers,), np.float32)
        self.action_space = spaces.Discrete(levers)
        self.right, self.render_mode = right, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.pulls = 0
        return np.ones(self.observation_space.shape, np.float32), {}

    def step(self, action):
        self.pulls += 1
        seen = np.ones(self.observation_space.shape, np.float32)
        return seen, float(self.right in (action, "any")), self.pulls == 4, False, {}

    def render(self):
        return np.zeros((16, 16, 3), np.uint8)


class Doors(gym.Env):
    """An environment of a user's that masks its own actions: an action that is not there raises."""

    observation_space = spaces.Dict(
        place=spaces.Box(0.0, 1.0, (2,), np.float32), action_mask=spaces.MultiBinary(3)
    )
    action_space = spaces.Discrete(3)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.look(), {}

    def look(self):
        self.mask = np.zeros(3, np.int8)
        self.mask[self.np_random.choice(3, 2, replace=False)] = 1
        return {"place": self.np_random.random(2, np.float32), "action_mask": self.mask}

    def step(self, action):
        assert self.mask[action], f"there is no door {action}"
        self.steps += 1
        return self.look(), 1.0, self.steps == 5, False, {}


gym.register("test-several/Levers-v0", Levers)
gym.register("test-several/Doors-v0", Doors)


@POLICIES.register("SeveralTasksPlain")
class Plain(BasePolicy):
    """A user's policy that takes one worker's rows at a time."""

    def construct_network(self, env_meta, *args, **kwargs):
        self.meta, self.seen = env_meta, []
        self.net = nn.Linear(1, 1)

    def setup_optimizer(self, optim_cfg): ...

    def rollout_step(self, env_ret, **kwargs):
        self.seen.append(env_ret.observation)
        rows = env_ret.last_reward.shape
        return PolicyResponse(env_ret.env_id, action=torch.zeros(rows, dtype=torch.int64))

    def postprocess(self, env_ret=None, policy_resp=None): ...

    def update_dataset(self, data):
        self.dataset = data

    def train(self): ...


def lever(name, *, num_envs=4, evaluate_cfg=None, **kwargs):
    return {
        "name": name,
        "backend": "gymnasium",
        "task": "test-several/Levers-v0",
        "num_envs": num_envs,
        "env_kwargs": kwargs,
        "evaluate_cfg": evaluate_cfg,
    }


def configuration(folder, env, *, multitask=None, train=None, **more):
    return MainConfig.from_dict(
        {
            "engine": "syncrl",
            "debug": False,
            "verbose": False,
            "env": env,
            "multitask": multitask or {},
            "buffer": {"type": "RolloutBuffer", "capacity": 512},
            "policy": {"type": "PPOPolicy", "optim_cfg": {"lr": 0.03}},
            "train": {
                "max_epochs": 2,
                "max_rollout_steps": 8,
                "ppo_epochs": 2,
                "minibatch_size": 64,
                "eval_episodes": 6,
                "seed": 7,
                "torch_threads": 1,
                "save_best": False,
                **(train or {}),
            },
            "log": {"log_dir": str(folder), "project": "p", "name": "n", "level": "ERROR"},
            **more,
        }
    )


@pytest.fixture(autouse=True)
def _logs_end_with_each_test():
    yield
    close_logger()


def run(config, *, resume_from=None):
    check_config(config)
    open_run(config, resume_from=resume_from)
    engine = build_engine(
        config,
        build_env_group(config.env),
        build_policy_group(config.policy.type, config.policy),
        build_data_buffer(config.buffer.type, config.buffer, seed=config.train.seed),
    )
    engine.run()
    return engine


TWO = [lever("left"), lever("right", num_envs=2, levers=3, right=2, numbers=3)]
PADDED = {"pad_spaces": True, "task_id": True}
QUICK = {"max_epochs": 12, "max_rollout_steps": 16, "ppo_epochs": 4, "minibatch_size": 64}


# ---- learning ------------------------------------------------------------------------------------


@pytest.mark.parametrize("told", [True, False], ids=["told", "not told"])
def test_two_tasks_that_look_alike_are_both_learned_by_a_policy_that_is_told_which(tmp_path, told):
    """Right in the one is wrong in the other: without the task, eight pulls give four at most."""
    env = [lever("left", right=0), lever("right", right=1)]
    train = QUICK | {"eval_episodes": 8}
    metrics = run(
        configuration(tmp_path, env, multitask={"task_id": told}, train=train)
    ).last_metrics
    both = [metrics[f"eval/{task}/episode_return"] for task in ("left", "right")]
    assert (both == [4.0, 4.0]) if told else (sum(both) == 4.0)
    assert metrics["eval/episode_return"] == sum(both) / 2


def test_padded_tasks_are_both_learned(tmp_path):
    """Two levers and two numbers; three levers and three numbers, and the last lever is right."""
    train = QUICK
    engine = run(configuration(tmp_path, TWO, multitask=PADDED, train=train))
    assert engine.last_metrics["eval/left/episode_return"] == 4.0
    assert engine.last_metrics["eval/right/episode_return"] == 4.0


# ---- what is measured ----------------------------------------------------------------------------


def test_metrics_of_each_task_stand_beside_those_of_all(tmp_path):
    engine = run(configuration(tmp_path, TWO, multitask=PADDED, train={"eval_episodes": 7}))
    metrics = engine.last_metrics
    for prefix in ("rollout", "eval"):
        for task in ("", "left/", "right/"):
            assert f"{prefix}/{task}episode_return" in metrics
            assert metrics[f"{prefix}/{task}episode_length"] == 4
    assert (metrics["eval/left/episodes"], metrics["eval/right/episodes"]) == (4, 3)
    assert metrics["eval/episodes"] == 7
    rows = read_rows(engine.run_context.run_dir / "metrics.jsonl")
    assert any("rollout/right/episode_return" in row for row in rows)


def test_one_task_in_several_workers_has_no_metrics_of_its_own(tmp_path):
    env = {**lever("left"), "num_workers": 2}
    metrics = run(configuration(tmp_path, env)).last_metrics
    assert not [name for name in metrics if "left" in name]


def test_entries_that_share_a_name_are_numbered(tmp_path):
    metrics = run(configuration(tmp_path, [lever("arm"), lever("arm")])).last_metrics
    assert {"eval/arm_1/episode_return", "eval/arm_2/episode_return"} <= metrics.keys()


def test_each_task_is_evaluated_with_its_own_settings(tmp_path):
    """No lever is right, but in evaluations of the second task all are."""
    easy = {"env_kwargs": {"right": "any"}}
    env = [lever("left", right=9), lever("right", right=9, evaluate_cfg=easy)]
    metrics = run(configuration(tmp_path, env, multitask=PADDED)).last_metrics
    assert metrics["rollout/right/episode_return"] == 0
    assert metrics["eval/left/episode_return"] == 0
    assert metrics["eval/right/episode_return"] == 4


@pytest.mark.parametrize("levers", [1, 3])
def test_settings_of_an_evaluation_that_do_not_fit_are_refused(tmp_path, levers):
    """Training's tasks have two levers each, and so no mask that could say how many there are."""
    env = [lever("left"), lever("right", evaluate_cfg={"env_kwargs": {"levers": levers}})]
    with pytest.raises(ConfigError, match=r"'right' has the spaces.*does evaluate_cfg"):
        run(configuration(tmp_path, env, multitask=PADDED))


@pytest.mark.parametrize("engine", ["asyncrl", "rsl", "async_rsl"])
def test_every_engine_tells_tasks_apart(tmp_path, engine):
    train = {"max_staleness": 100} if engine.startswith("async") else {}
    metrics = run(
        configuration(tmp_path, TWO, multitask=PADDED, engine=engine, train=train)
    ).last_metrics
    prefix = "rollout" if engine == "asyncrl" else "Rollout"
    assert {"eval/left/episode_return", f"{prefix}/right/episode_return"} <= metrics.keys()


# ---- policies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["PPOPolicy", "RecurrentPPOPolicy", "VTracePPOPolicy"])
def test_on_policy_algorithms_take_padded_tasks(tmp_path, policy):
    section = {"type": policy, "model_cfg": {"normalize_observations": True}}
    engine = run(configuration(tmp_path, TWO, multitask=PADDED, policy=section))
    assert engine.last_metrics["eval/unfinished"] == 0


def test_values_are_learned_of_padded_tasks_too(tmp_path):
    sections = {
        "buffer": {"type": "ReplayBuffer", "capacity": 500},
        "policy": {"type": "DQNPolicy", "model_cfg": {"hidden_sizes": [16]}},
    }
    engine = run(configuration(tmp_path, TWO, multitask=PADDED, **sections))
    assert engine.last_metrics["train/updates"] >= 1
    assert engine.last_metrics["eval/right/episodes"] == 3


def test_a_policy_of_single_workers_gets_each_task_by_itself(tmp_path):
    """It sees the padded spaces, and reads from the observation which task it is."""
    env = [lever("left"), lever("right", num_envs=1, right=1, numbers=3)]
    policy = {"type": "SeveralTasksPlain"}
    engine = run(configuration(tmp_path, env, multitask=PADDED, policy=policy))
    seen = engine.policy_group.eval_list[0].seen
    assert [item["task"].tolist() for item in seen[:2]] == [[0] * 4, 1]
    assert [tuple(item["observation"].shape) for item in seen[:2]] == [(4, 3), (3,)]
    assert engine.policy_group.train_list[0].meta.observation_space["observation"].shape == (3,)


def test_a_policy_that_reads_no_masks_is_refused_before_anything_is_learned(tmp_path):
    with pytest.raises(ConfigError, match="Plain does not read which"):
        run(configuration(tmp_path, TWO, multitask=PADDED, policy={"type": "SeveralTasksPlain"}))


@pytest.mark.parametrize("policy", ["PPOPolicy", "DQNPolicy"])
def test_an_environment_may_mask_its_own_actions(tmp_path, policy):
    env = {"name": "doors", "backend": "gymnasium", "task": "test-several/Doors-v0", "num_envs": 3}
    sections = {"policy": {"type": policy}}
    if policy == "DQNPolicy":
        sections["buffer"] = {"type": "ReplayBuffer", "capacity": 500}
    engine = run(configuration(tmp_path, env, train={"max_epochs": 4}, **sections))
    assert engine.last_metrics["eval/episode_return"] == 5


@pytest.mark.parametrize("rows", [1, 3])
def test_the_check_of_an_environment_obeys_its_mask(rows):
    check_env(
        EnvConfig(name="doors", backend="gymnasium", task="test-several/Doors-v0", num_envs=rows),
        steps=40,
    )


# ---- refusals ------------------------------------------------------------------------------------


def test_tasks_that_do_not_fit_are_refused_within_a_second(tmp_path):
    config = configuration(tmp_path, TWO)
    begin_s = time.process_time()
    with pytest.raises(ConfigError) as refusal:
        run(config)
    assert time.process_time() - begin_s < 1.0
    for part in ("'left'", "'right'", "(2,)", "(3,)", "multitask.pad_spaces", "wrappers"):
        assert part in str(refusal.value)


# ---- checkpoints ---------------------------------------------------------------------------------


def test_a_resumed_run_ends_like_one_that_never_stopped(tmp_path):
    through, first, resumed = (
        run(
            configuration(tmp_path / name, TWO, multitask=PADDED, train={"max_epochs": epochs}),
            resume_from=tmp_path / "first/p/n/checkpoints/epoch_last" if name == "second" else None,
        )
        for name, epochs in (("through", 4), ("first", 2), ("second", 4))
    )
    assert first.epoch == 2
    one, two = (
        e.policy_group.train_list[0].export_weights()["weights"] for e in (through, resumed)
    )
    for name, tensor in one["actor_critic"].items():
        assert torch.equal(tensor, two["actor_critic"][name]), name


def test_saved_policies_are_measured_per_task_and_shown_in_the_one_asked_for(tmp_path, capsys):
    train = {"record_episodes": 1}
    engine = run(configuration(tmp_path, TWO, multitask=PADDED, train=train))
    run_dir = engine.run_context.run_dir
    videos = {path.name.split("_", 2)[2] for path in (run_dir / "videos").iterdir()}
    assert videos == {"left.mp4", "right.mp4"}
    main(["eval", str(run_dir), "--episodes", "4"])
    shown = capsys.readouterr().out
    assert "left/episode_return" in shown
    assert "right/episode_return" in shown
    main(["play", str(run_dir), "--task", "right", "--video", str(tmp_path / "right.mp4")])
    assert "episode 1: return" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["play", str(run_dir), "--task", "wrong", "--video", str(tmp_path / "wrong.mp4")])
    assert "wrong" in capsys.readouterr().err


def test_a_run_ends_with_a_line_per_task(tmp_path, capsys):
    path = tmp_path / "two.yaml"
    path.write_text(configuration(tmp_path, TWO, multitask=PADDED).to_yaml(), encoding="utf-8")
    main(["train", str(path), "train.max_epochs=1"])
    shown = capsys.readouterr().err
    assert "mean return, left" in shown
    assert "mean return, right" in shown


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_shipped_configuration_learns_both_tasks(tmp_path):
    """Each alone reaches 500 and about -80; a random policy about 20 and -500."""
    changes = [
        "train.max_epochs=40",
        "train.seed=0",
        "verbose=false",
        "log.level=ERROR",
        f"log.log_dir={tmp_path}",
        "log.name=run",
    ]
    main(["train", "cartpole_acrobot_ppo", *changes])
    rows = read_rows(tmp_path / "cartpole_acrobot" / "run" / "metrics.jsonl")
    last = [row for row in rows if "eval/episodes" in row][-1]
    assert last["eval/cartpole/episode_return"] > 400
    assert last["eval/acrobot/episode_return"] > -120
