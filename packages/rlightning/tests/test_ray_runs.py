"""One configuration in one process and on Ray: same types, same numbers, and what deaths cost."""

import itertools
import os
import signal
import sys
import threading
import time

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
    open_cluster,
)
from rlightning.checkpoint import list_checkpoints, load_checkpoint
from rlightning.config import MainConfig
from rlightning.env import BaseEnv
from rlightning.errors import ConfigError, EnvWorkerError, PlacementError, WorkerLostError
from rlightning.policy import BasePolicy
from rlightning.runtime import open_run
from rlightning.runtime.base import WorkerSpec
from rlightning.runtime.host import WorkerSetup
from rlightning.types import EnvRet, PolicyResponse
from rlightning.utils.logger import close_logger, get_logger, log_metric
from rlightning.utils.logger.files import read_rows
from rlightning.utils.registry import ENVS, POLICIES

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]


@POLICIES.register("RayTinyPolicy")
class Tiny(BasePolicy):
    """Draws from the global generators wherever it works, and learns from what it is given."""

    batched_rollout = True

    def construct_network(self, env_meta, *args, **kwargs):
        size = env_meta.observation_space.shape[0]
        self.actor = nn.Linear(size, int(env_meta.action_space.n))
        self.log_std = nn.Parameter(torch.rand(1))
        self.register_buffer("mean", torch.zeros(size))

    def setup_optimizer(self, optim_cfg):
        self.optimizer = torch.optim.Adam(self.parameters(), lr=0.01)

    def rollout_step(self, env_ret, **kwargs):
        self.seen = describe(env_ret.observation), describe(env_ret.last_reward)
        logits = self.actor(env_ret.observation - self.mean)
        action = torch.distributions.Categorical(logits=logits).sample()
        noise = torch.as_tensor(np.random.rand(len(action)))
        return PolicyResponse(env_ret.env_id, action=action, noise=noise)

    def postprocess(self, env_ret=None, policy_resp=None): ...

    def update_dataset(self, data):
        self.dataset = data
        self.mean = self.mean * 0.9 + 0.1 * data["observation"].mean(0)

    def train(self, *args, **kwargs):
        data = self.dataset
        order = torch.randperm(len(data))
        logits = self.actor(data["observation"][order])
        log_prob = torch.distributions.Categorical(logits=logits).log_prob(data["action"][order])
        loss = -(log_prob * data["noise"][order].float()).mean() + self.log_std.square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": float(loss.detach())}

    def types(self):
        """What user code was given: types, dtypes and shapes."""
        return {name: describe(value) for name, value in self.dataset.items()}


def describe(value):
    return [type(value).__name__, str(getattr(value, "dtype", "")), list(np.shape(value))]


def configuration(folder, *, cluster=None, env=None, train=None, policy=None, buffer=None, **more):
    sections = {
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
        "buffer": {"type": "RolloutBuffer", "capacity": 64, **(buffer or {})},
        "policy": {"type": "RayTinyPolicy", **(policy or {})},
        "train": {
            "max_epochs": 3,
            "max_rollout_steps": 12,
            "eval_episodes": 2,
            "seed": 7,
            "torch_threads": 1,
            "save_best": False,
            **(train or {}),
        },
        "log": {"log_dir": str(folder), "project": "p", "name": "n", "level": "ERROR"},
        **more,
    }
    if cluster is not None:
        sections["cluster"] = cluster
    return MainConfig.from_dict(sections)


def parts_of(config):
    env_group = build_env_group(config.env)
    policy_group = build_policy_group(config.policy.type, config.policy, config.cluster)
    buffer = build_data_buffer(config.buffer.type, config.buffer, seed=config.train.seed)
    return build_engine(config, env_group, policy_group, buffer)


class Result:
    """What a run ended with."""

    def __init__(self, engine):
        policy = engine.policy_group.train_list[0]
        exported = policy.export_weights()
        self.weights = {
            **{f"{m}.{name}": t for m, s in exported["weights"].items() for name, t in s.items()},
            **exported["extra"],
        }
        self.moments = policy.export_training_state()
        self.data_types = (
            policy.types() if hasattr(engine.policy_group.policy_class, "types") else {}
        )
        self.metrics = engine.last_metrics
        self.env_steps = engine.env_steps
        self.lost_episodes = engine.lost_episodes
        self.policy_group = engine.policy_group
        self.weights = {name: tensor.clone() for name, tensor in self.weights.items()}


def run(config, *, during=None, resume_from=None):
    """Run to the end, calling `during(engine)` in a thread meanwhile; return what came of it."""
    check_config(config)
    open_run(config, resume_from=resume_from)
    try:
        with open_cluster(config):
            engine = parts_of(config)
            thread = threading.Thread(target=during or (lambda _: None), args=(engine,))
            thread.start()
            try:
                engine.run()
            finally:
                thread.join()
            return Result(engine)
    finally:
        close_logger()


def assert_same(one, two):
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    return run(configuration(tmp_path_factory.mktemp("local"), train={"eval_interval": 1}))


ROLES = ("remote_train", "remote_eval", "remote_storage", "remote_env")
FOUR = [(1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 0, 1), (0, 0, 1, 1)]
COMBINATIONS = [
    pytest.param(
        flags, marks=() if flags in FOUR else pytest.mark.slow, id="".join(map(str, flags))
    )
    for flags in itertools.product((0, 1), repeat=4)
]


@pytest.mark.parametrize("flags", COMBINATIONS)
def test_wherever_its_parts_live_a_run_ends_with_the_same_weights(
    ray_cluster, tmp_path, local, flags
):
    cluster = {name: bool(flag) for name, flag in zip(ROLES, flags, strict=True)}
    remote = run(configuration(tmp_path, cluster=cluster, train={"eval_interval": 1}))
    assert_same(remote.weights, local.weights)
    assert remote.data_types == local.data_types
    for name in ("train/loss", "eval/episode_return", "rollout/episode_return"):
        assert remote.metrics[name] == local.metrics[name]


def test_several_tasks_end_with_the_same_weights_on_ray(ray_cluster, tmp_path):
    """CartPole and Acrobot, padded: another number of rows, numbers and actions each."""

    def several(folder, cluster=None):
        section = configuration(
            folder,
            cluster=cluster,
            policy={"type": "PPOPolicy"},
            train={"eval_interval": 1, "max_epochs": 2, "eval_episodes": 3},
            multitask={"pad_spaces": True, "task_id": True},
        )
        acrobot = section.env[0].model_copy(
            update={"name": "ab", "task": "Acrobot-v1", "num_envs": 1, "max_episode_steps": 9}
        )
        section.env.append(acrobot)
        return run(section)

    local, remote = several(tmp_path / "local"), several(tmp_path / "ray", {})
    assert_same(remote.weights, local.weights)
    names = [name for name in local.metrics if name.endswith("/episode_return")]
    assert {"eval/cp/episode_return", "rollout/ab/episode_return"} < set(names)
    for name in names:
        assert remote.metrics[name] == local.metrics[name]


@pytest.mark.slow
def test_actors_and_learners_that_take_turns_end_with_the_same_weights(
    ray_cluster, tmp_path, local
):
    cluster = {"remote_storage": False, "enable_offload": True}
    turns = run(configuration(tmp_path, cluster=cluster, train={"eval_interval": 1}))
    assert_same(turns.weights, local.weights)


# ---- deaths --------------------------------------------------------------------------------------


def once(settings, count):
    """Do what `settings` say at the `count`-th time, in one process of the run only."""
    if not settings or count != settings["at"]:
        return
    if settings.get("always") or not os.path.exists(marker(settings)):
        with open(marker(settings), "w", encoding="utf-8") as file:
            file.write(str(time.time()))
        {"die": die, "hang": hang, "raise": complain}[settings["what"]]()


def marker(settings):
    return os.path.join(settings["folder"], f"{settings['what']}-done")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(1000)


def complain():
    raise ValueError("the gripper is stuck")


@ENVS.register("ray_fragile")
class Fragile(BaseEnv):
    """Shows whether it was started again, and its steps; episodes of ten steps."""

    takes_arrays = True  # torch would take its workers seconds to load

    def __init__(self, config, worker_index=0, preprocess_fn=None):
        super().__init__(config, worker_index, preprocess_fn)
        import gymnasium as gym

        self.env = gym.make("CartPole-v1")
        self.trouble = config.env_kwargs.to_dict().get("trouble")
        self.sleep_s = config.env_kwargs.to_dict().get("sleep_s", 0.0)
        self.total = 0
        settings = self.trouble or {"folder": "", "what": ""}
        self.life = int(
            os.path.exists(os.path.join(settings["folder"], f"{settings['what']}-done"))
        )

    def shown(self):
        return np.array([self.life, self.total, self.total % 10, self.worker_index], np.float32)

    def reset(self, *args, **kwargs):
        self.total = 0
        return EnvRet(self.env_id, self.shown())

    def step(self, policy_resp):
        time.sleep(self.sleep_s)
        self.total += 1
        once(self.trouble, self.total)
        ended = self.total % 10 == 0
        info = {"final_obs": self.shown(), "_final_obs": np.True_} if ended else {}
        return EnvRet(self.env_id, self.shown(), 1.0, False, ended, info)

    def get_state(self):
        return {"total": self.total}

    def set_state(self, state):
        self.total = state["total"]

    def close(self): ...


@POLICIES.register("RayCheckingPolicy")
class Checking(Tiny):
    """Counts transitions whose two ends do not belong together."""

    def construct_network(self, env_meta, *args, **kwargs):
        super().construct_network(env_meta, *args, **kwargs)
        trouble = self.config.model_cfg.to_dict() if self.config.model_cfg else {}
        self.trouble = trouble if trouble.get("role") == self.role_type else {}
        self.acted = self.trained = self.broken = 0

    def rollout_step(self, env_ret, **kwargs):
        self.acted += 1
        once(self.trouble, self.acted)
        return super().rollout_step(env_ret, **kwargs)

    def update_dataset(self, data):
        step = data["next_observation"] - data["observation"]
        follows = (step[:, 0] == 0) & (step[:, 1] == 1)
        self.broken += int((~follows).sum())
        super().update_dataset(data)

    def train(self, *args, **kwargs):
        self.trained += 1
        once(self.trouble, self.trained)
        rows = float(len(self.dataset))
        return {**super().train(*args, **kwargs), "broken": float(self.broken), "rows": rows}


def fragile(folder, trouble=None, *, cluster=None, **more):
    env = {"backend": "ray_fragile", "num_envs": 1, "env_kwargs": {"trouble": trouble}}
    policy = {"type": "RayCheckingPolicy", **more.pop("policy", {})}
    return configuration(folder, env=env, policy=policy, cluster=cluster or {}, **more)


def died_at(folder, what):
    return float((folder / f"{what}-done").read_text())


@pytest.mark.parametrize("what", ["die", pytest.param("hang", marks=pytest.mark.slow)])
def test_an_env_worker_that_dies_or_hangs_costs_its_episode(ray_cluster, tmp_path, what):
    trouble = {"folder": str(tmp_path), "at": 17, "what": what}
    cluster = {"env_timeout_s": 3.0, "remote_train": False, "remote_storage": False}
    result = run(fragile(tmp_path, trouble, cluster=cluster))
    assert result.lost_episodes == 1
    assert result.metrics["workers/lost_episodes"] == 1
    assert result.env_steps == 3 * 12
    assert result.metrics["train/broken"] == 0
    log = (tmp_path / "p" / "n" / "run.log").read_text()
    assert "worker env-0 is lost" in log
    assert "env-0 is back after" in log
    assert time.time() - died_at(tmp_path, what) < 60


@pytest.mark.slow
def test_an_env_worker_that_always_dies_ends_the_run(ray_cluster, tmp_path):
    trouble = {"folder": str(tmp_path), "at": 5, "what": "die", "always": True}
    cluster = {"max_restarts": 1, "remote_train": False, "remote_storage": False}
    with pytest.raises(EnvWorkerError, match=r"env-0 is lost: .* 1 times already") as caught:
        run(fragile(tmp_path, trouble, cluster={**cluster, "remote_eval": False}))
    assert "kill -9" in str(caught.value)


def test_what_an_environment_raises_ends_the_run_with_its_traceback(ray_cluster, tmp_path):
    trouble = {"folder": str(tmp_path), "at": 17, "what": "raise"}
    cluster = {"remote_train": False, "remote_storage": False}
    with pytest.raises(ValueError, match="the gripper is stuck") as caught:
        run(fragile(tmp_path, trouble, cluster=cluster))
    note = "\n".join(caught.value.__notes__)
    assert "in worker env-0" in note
    assert "in complain" in note
    assert list_checkpoints(tmp_path / "p" / "n" / "checkpoints")[-1].name == "crashed"


@pytest.mark.parametrize("remote_env", [True, False])
def test_an_eval_worker_that_dies_costs_nothing(ray_cluster, tmp_path, remote_env):
    trouble = {"folder": str(tmp_path), "at": 17, "what": "die", "role": "eval"}
    cluster = {"remote_env": remote_env, "remote_train": False, "remote_storage": False}
    result = run(fragile(tmp_path, cluster=cluster, policy={"model_cfg": trouble}))
    assert result.metrics["workers/lost_eval_workers"] == 1
    assert result.lost_episodes == 0
    assert result.metrics["train/broken"] == 0
    assert result.metrics["train/rows"] == 12
    assert time.time() - died_at(tmp_path, "die") < 60


def test_a_train_worker_that_dies_ends_the_run_and_resume_goes_on(ray_cluster, tmp_path):
    trouble = {"folder": str(tmp_path), "at": 3, "what": "die", "role": "train"}
    sections = {
        "cluster": {"remote_env": False, "remote_eval": False, "remote_storage": False},
        "policy": {"model_cfg": trouble},
        "train": {"save_interval": 1, "max_epochs": 4},
    }
    with pytest.raises(WorkerLostError, match="worker train-0 is lost"):
        run(fragile(tmp_path, **sections))
    assert time.time() - died_at(tmp_path, "die") < 30
    last = list_checkpoints(tmp_path / "p" / "n" / "checkpoints")[-1]
    assert last.name == "epoch_1"
    resumed = run(fragile(tmp_path, **sections), resume_from=last)
    whole = run(fragile(tmp_path / "whole", **{**sections, "cluster": None, "policy": {}}))
    assert resumed.env_steps == whole.env_steps == 48
    assert_same(resumed.weights, whole.weights)


def test_a_run_that_is_stopped_in_a_rollout_saves_all_that_was_done(ray_cluster, tmp_path):
    """What workers did by themselves is in the checkpoint, and what they did not do yet is not."""

    def stop(engine):
        while engine.env_steps < 67:  # in the second rollout
            time.sleep(0.001)
        engine.run_context.stop.request()

    cluster = {"remote_train": False, "remote_storage": False}
    config = fragile(tmp_path, cluster=cluster, train={"max_rollout_steps": 64, "max_epochs": 9})
    config.env[0].env_kwargs.sleep_s = 0.005
    result = run(config, during=stop)
    saved = load_checkpoint(list_checkpoints(tmp_path / "p" / "n" / "checkpoints")[-1])
    assert result.env_steps == saved.env_steps
    assert saved.training["env"]["envs"][0]["total"] == saved.env_steps
    assert saved.training["rows"][0]["observation"][1] == saved.env_steps


# ---- overlapping rollout and learning ------------------------------------------------------------


def overlapping(folder, trouble=None, *, cluster=None, policy=None, **train):
    return fragile(
        folder,
        trouble,
        cluster=cluster,
        policy=policy or {},
        engine="asyncrl",
        train={"batch_size": 16, "max_epochs": 4, "max_rollout_steps": 4, **train},
        buffer={"capacity": 64, "sampler": {"type": "batch"}},
    )


def test_rollout_and_learning_overlap_on_workers(ray_cluster, tmp_path):
    result = run(overlapping(tmp_path, max_staleness=50))
    assert result.metrics["train/broken"] == 0
    assert result.metrics["weights/staleness_max"] <= 50
    rows = read_rows(tmp_path / "p" / "n" / "metrics.jsonl")
    assert rows[-1]["epoch"] == 4
    assert sum("train/loss" in row for row in rows) > 1, "two updates may share an environment step"


@pytest.mark.parametrize("where", ["train", pytest.param("env", marks=pytest.mark.slow)])
def test_an_error_in_a_worker_ends_an_overlapping_run(ray_cluster, tmp_path, where):
    trouble = {"folder": str(tmp_path), "at": 3, "what": "raise", "role": "train"}
    cluster = {"remote_eval": False, "remote_storage": False}
    if where == "env":
        config = overlapping(tmp_path, {**trouble, "at": 30}, cluster=cluster)
    else:
        config = overlapping(tmp_path, cluster=cluster, policy={"model_cfg": trouble})
    with pytest.raises(ValueError, match="the gripper is stuck"):
        run(config)
    assert time.time() - died_at(tmp_path, "raise") < 30
    assert list_checkpoints(tmp_path / "p" / "n" / "checkpoints")[-1].name == "crashed"


# ---- several workers of a kind -------------------------------------------------------------------


def test_several_workers_of_every_kind_learn_one_policy(ray_cluster, tmp_path):
    cluster = {"train_worker_num": 2, "eval_worker_num": 2, "buffer_worker_num": 2}
    cluster |= {"remote_env": False}
    storage = {"storage": {"type": "sharded"}}
    config = fragile(tmp_path, cluster=cluster, train={"max_epochs": 2}, buffer=storage)
    config.env[0].num_workers = 2
    check_config(config)
    open_run(config)
    try:
        with open_cluster(config):
            engine = parts_of(config)
            engine.run()
            trainers, actors = engine.policy_group.train_list, engine.policy_group.eval_list
            prints = [policy.get_param_fingerprint() for policy in (*trainers, *actors)]
            rows = [policy.types()["reward"][2] for policy in trainers]
    finally:
        close_logger()
    assert rows == [[12], [12]]
    assert prints[2] == prints[3] == prints[0]
    own = prints[0].keys() - {"mean"}  # each learner keeps statistics of its own data
    assert {name: prints[1][name] for name in own} == {name: prints[0][name] for name in own}
    assert engine.env_steps == 2 * 2 * 12
    assert engine.last_metrics["train/broken"] == 0


# ---- the cluster ---------------------------------------------------------------------------------


def test_the_plan_is_written_and_what_is_missing_is_named(ray_cluster, tmp_path):
    with pytest.raises(PlacementError, match="CPU"):
        run(fragile(tmp_path / "a", cluster={"train_each_cpu_num": 99, "share_cpus": False}))
    config = fragile(tmp_path, cluster={})
    open_run(config)
    with open_cluster(config) as cluster:
        assert {worker.name for worker in cluster.plan.workers} == {
            "train-0",
            "eval-0",
            "env-0",
            "buffer-0",
        }
    close_logger()
    text = (tmp_path / "p" / "n" / "placement.yaml").read_text()
    assert "strategy: default" in text
    assert "the cluster has no GPU" in (tmp_path / "p" / "n" / "run.log").read_text()


class Setting:
    """Holds what it was last told."""

    def __init__(self):
        self.value = None

    def hold(self, value):
        self.value = value["number"] if isinstance(value, dict) else value

    def held(self):
        return self.value


def test_calls_are_carried_out_in_their_order_whatever_way_they_take(ray_cluster):
    """Numbers go by socket, a dictionary with a class by Ray; nobody waits for the setter."""
    from rlightning.runtime.ray import RayRuntime

    runtime = RayRuntime("local", setup=WorkerSetup(sys_path=tuple(sys.path)))
    worker = runtime.spawn(WorkerSpec(name="setting-0", make=Setting))
    for number in range(60):
        worker.call("hold", {"number": number, "by": Setting} if number % 3 else number)
        assert worker.call("held").result() == number
    runtime.close()


def test_a_cluster_that_is_not_open_is_said_so(tmp_path):
    config = fragile(tmp_path, cluster={})
    with pytest.raises(ConfigError, match="open_cluster"):
        build_policy_group(config.policy.type, config.policy, config.cluster)


def test_only_a_cluster_that_this_machine_was_made_part_of_is_joined(
    ray_cluster, tmp_path, monkeypatch
):
    from rlightning.runtime.ray import known_cluster

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert known_cluster() is None  # although the one of this test runs here
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.7:6379\n")
    assert known_cluster() == "10.0.0.7:6379"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.8:6379")
    assert known_cluster() == "10.0.0.8:6379"


def test_a_worker_of_the_cluster_logs_and_measures_into_the_run(ray_cluster, tmp_path):
    cluster = {"remote_env": False, "remote_eval": False, "remote_storage": False}
    config = fragile(tmp_path, cluster=cluster, policy={"type": "RayTalkingPolicy"})
    run(config)
    log = (tmp_path / "p" / "n" / "run.log").read_text()
    assert "[train-0] learning from 12 rows" in log
    rows = read_rows(tmp_path / "p" / "n" / "metrics.jsonl")
    assert sum("own/rows" in row for row in rows) == 3


@POLICIES.register("RayTalkingPolicy")
class Talking(Checking):
    """Logs and measures while it learns."""

    def train(self, *args, **kwargs):
        get_logger("talking").warning("learning from %d rows", len(self.dataset))
        log_metric({"rows": len(self.dataset)}, prefix="own")
        return super().train(*args, **kwargs)
