"""The engines beside `syncrl`: `asyncrl`, `async_rsl`, `rsl` and `eval`."""

import asyncio
import threading
import time
from typing import ClassVar

import pytest
import torch

from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
)
from rlightning.checkpoint import load_checkpoint
from rlightning.config import MainConfig
from rlightning.errors import ConfigError
from rlightning.policy.ppo_policy import PPOPolicy
from rlightning.runtime import FairLock, WorkerThread
from rlightning.utils.logger.files import read_rows
from rlightning.utils.registry import POLICIES


def config_of(tmp_path, engine, policy="PPOPolicy", **train):
    settings = {
        "max_epochs": 4,
        "max_rollout_steps": 16,
        "batch_size": 32,
        "eval_episodes": 2,
        "seed": 0,
        "torch_threads": 1,
    }
    return MainConfig.from_dict(
        {
            "engine": engine,
            "verbose": False,
            "debug": False,
            "env": {"name": "c", "backend": "gymnasium", "task": "CartPole-v1", "num_envs": 2},
            "buffer": {"type": "RolloutBuffer", "capacity": 128},
            "policy": {"type": policy},
            "train": settings | train,
            "log": {"level": "ERROR", "log_dir": str(tmp_path), "name": "run"},
        }
    )


def engine_of(config):
    check_config(config)
    return build_engine(
        config,
        build_env_group(config.env),
        build_policy_group(config.policy.type, config.policy),
        build_data_buffer(config.buffer.type, config.buffer),
    )


@POLICIES.register("FailsInTrain")
class FailsInTrain(PPOPolicy):
    """Raises in its second update."""

    def train(self, *args, **kwargs):
        if getattr(self, "updated", False):
            raise ZeroDivisionError("the learner broke")
        self.updated = True
        return super().train()


@POLICIES.register("FailsInRollout")
class FailsInRollout(PPOPolicy):
    """Raises once it acts with the second version of the weights."""

    def rollout_step(self, env_ret, **kwargs):
        if self.weights_version >= 1:
            raise ZeroDivisionError("the actor broke")
        return super().rollout_step(env_ret)


@POLICIES.register("Marks")
class Marks(PPOPolicy):
    """Its postprocess replaces the log-probability by a mark."""

    def postprocess(self, env_ret=None, policy_resp=None):
        policy_resp.mark = torch.full_like(policy_resp.log_prob, 7.0)
        return policy_resp

    def update_dataset(self, data):
        self.marks = data["mark"]
        super().update_dataset(data)


@pytest.mark.parametrize("engine", ["asyncrl", "async_rsl", "rsl"])
def test_each_engine_runs_to_its_end_and_leaves_no_thread(tmp_path, engine):
    before = threading.active_count()
    running = engine_of(config_of(tmp_path, engine))
    running.run()
    assert running.epoch == 4
    assert load_checkpoint(running.run_context.checkpoint_dir / "epoch_last").epoch == 4
    assert threading.active_count() == before


@pytest.mark.parametrize("engine", ["asyncrl", "rsl"])
def test_a_run_with_debug_says_where_its_time_went(tmp_path, engine):
    config = config_of(tmp_path, engine, max_epochs=2)
    config.debug, config.log.level = True, "INFO"
    engine_of(config).run()
    log = next(tmp_path.glob("**/run.log")).read_text()
    table = log[log.index("time by stage") :]
    for stage in ("rollout", "update_dataset", "train", "sync_weights", "evaluate"):
        assert stage in table


@pytest.mark.parametrize(
    ("policy", "text"),
    [("FailsInTrain", "the learner broke"), ("FailsInRollout", "the actor broke")],
)
def test_an_error_in_either_thread_ends_the_run_with_itself_and_a_checkpoint(
    tmp_path, policy, text
):
    running = engine_of(config_of(tmp_path, "asyncrl", policy, max_epochs=10_000))
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match=text):
        running.run()
    assert time.monotonic() - start < 30
    assert (running.run_context.checkpoint_dir / "crashed" / "manifest.json").is_file()
    assert not [thread for thread in threading.enumerate() if thread.name == "rollout"]


@POLICIES.register("WaitsWhileActing")
class WaitsWhileActing(PPOPolicy):
    """Acts in a coroutine that waits, and notes the weights before and after."""

    batched_rollout = False
    seen: ClassVar[list] = []

    def weights(self):
        return self.weights_version, float(self.actor_critic.value_head.weight.sum())

    async def rollout_step(self, env_ret, **kwargs):
        before = self.weights()
        await asyncio.sleep(0.002)
        self.seen.append((before, self.weights()))
        return super().rollout_step(env_ret)


@pytest.mark.parametrize("strategy", ["Double", "None"])
def test_no_step_of_a_coroutine_policy_sees_the_weights_of_two_versions(tmp_path, strategy):
    config = config_of(tmp_path, "asyncrl", "WaitsWhileActing", max_epochs=5)
    config.policy.rollout_mode = "async"
    config.policy.weight_buffer.buffer_strategy = strategy
    WaitsWhileActing.seen.clear()
    engine_of(config).run()
    assert len({before for before, _ in WaitsWhileActing.seen}) > 2
    assert all(before == after for before, after in WaitsWhileActing.seen)


def test_a_stop_request_ends_the_overlapping_engine_with_its_checkpoint(tmp_path):
    running = engine_of(config_of(tmp_path, "asyncrl", max_epochs=10_000))
    threading.Timer(1.0, running.run_context.stop.request).start()
    running.run()
    assert 0 < running.epoch < 10_000
    saved = load_checkpoint(running.run_context.checkpoint_dir / "epoch_last")
    assert saved.epoch == running.epoch


def test_staleness_is_a_metric_and_rows_that_are_too_old_are_dropped_and_counted(tmp_path):
    running = engine_of(config_of(tmp_path, "asyncrl", max_staleness=0, max_epochs=6))
    seen = []
    policy = running.policy_group.train_list[0]
    keep = policy.update_dataset
    policy.update_dataset = lambda data: (seen.append(data["weights_version"].clone()), keep(data))
    versions = []
    send = running.policy_group.send_weights
    running.policy_group.send_weights = lambda: (versions.append(len(seen)), send())
    running.run()
    for epoch, rows in enumerate(seen):
        assert (rows == epoch).all(), f"epoch {epoch} learned from versions {rows.unique()}"
    rows = read_rows(running.run_context.run_dir / "metrics.jsonl")
    stale = [row for row in rows if "weights/staleness" in row]
    assert stale
    assert {"weights/staleness_max", "weights/discarded_rows"} <= stale[-1].keys()


def test_a_batch_that_never_fills_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="a batch of 4096 rows never fills"):
        engine_of(config_of(tmp_path, "asyncrl", batch_size=4096))


@pytest.mark.parametrize("engine", ["rsl", "async_rsl"])
def test_what_postprocess_adds_reaches_the_learner(tmp_path, engine):
    running = engine_of(config_of(tmp_path, engine, "Marks"))
    running.run()
    assert (running.policy_group.train_list[0].marks == 7.0).all()


def test_rsl_logs_under_the_names_of_the_reference(tmp_path):
    running = engine_of(config_of(tmp_path, "rsl", max_rollout_steps=64))
    running.run()
    streams = {row["stream"] for row in read_rows(running.run_context.run_dir / "metrics.jsonl")}
    assert {"Rollout", "Train", "eval"} <= streams


def test_the_eval_engine_measures_a_checkpoint_for_the_episodes_asked_for(tmp_path):
    trained = engine_of(config_of(tmp_path, "syncrl", max_epochs=1))
    trained.run()
    config = config_of(tmp_path, "eval", checkpoint=str(trained.run_context.run_dir))
    config.log.name, config.train.eval_episodes = "measure", 5
    measuring = engine_of(config)
    measuring.run()
    assert measuring.last_metrics["eval/episodes"] == 5
    want = trained.policy_group.eval_list[0].get_param_fingerprint()
    assert measuring.policy_group.eval_list[0].get_param_fingerprint() == want


def test_the_eval_engine_asks_for_its_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"needs train\.checkpoint"):
        engine_of(config_of(tmp_path, "eval"))


def test_a_fair_lock_serves_a_waiter_before_the_holder_comes_back():
    lock, order, waiting = FairLock(), [], threading.Event()

    def other():
        waiting.set()
        with lock:
            order.append("other")

    with lock:
        thread = threading.Thread(target=other)
        thread.start()
        waiting.wait(5)
        while lock._next_ticket < 2:
            time.sleep(0.001)
    with lock:
        order.append("holder")
    thread.join(5)
    assert order == ["other", "holder"]


def test_a_worker_thread_hands_its_error_to_its_owner():
    ended = threading.Event()

    def body(stop):
        raise KeyError("gone")

    with pytest.raises(KeyError, match="gone"), WorkerThread(body, name="w", on_end=ended.set):
        assert ended.wait(5)
