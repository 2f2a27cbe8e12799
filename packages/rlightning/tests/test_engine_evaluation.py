"""Evaluation: whole episodes, a fair share per row, no exploration, an end in every case."""

import contextlib

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from rlightning.build import build_engine, build_env_group, build_policy_group, check_config
from rlightning.checkpoint import Checkpoint, save_checkpoint
from rlightning.config import MainConfig
from rlightning.engine import evaluation
from rlightning.engine.evaluation import (
    EpisodeTally,
    bootstrap_interval,
    evaluate_episodes,
    interquartile_mean,
    summarise,
)
from rlightning.errors import CheckpointError, ConfigError, RLightningError
from rlightning.policy import BasePolicy
from rlightning.runtime import open_run
from rlightning.types import BatchedData, EnvRet, PolicyResponse
from rlightning.utils.logger import close_logger
from rlightning.utils.registry import POLICIES


def test_short_episodes_are_not_counted_more_often_than_long_ones():
    """Row 0 ends every step with 0, row 1 every tenth with 1: the mean of 20 episodes is 0.5."""
    tally = EpisodeTally(rows=2, episodes=20)
    for step in range(1, 1000):
        if tally.unfinished == 0:
            break
        long_ends = step % 10 == 0
        tally.add(np.array([0.0, float(long_ends)]), np.array([True, long_ends]))
    assert step == 101
    assert len(tally.returns) == 20
    assert np.mean(tally.returns) == 0.5
    assert sorted(set(tally.lengths)) == [1, 10]


@pytest.mark.parametrize(("rows", "episodes", "quota"), [(3, 7, [3, 2, 2]), (4, 2, [1, 1, 0, 0])])
def test_episodes_are_shared_evenly(rows, episodes, quota):
    assert EpisodeTally(rows, episodes)._quota.tolist() == quota


def test_returns_and_lengths_start_again_after_each_episode():
    tally = EpisodeTally(rows=1, episodes=2)
    for reward, ended in [(1, False), (2, True), (4, True)]:
        tally.add(np.array([float(reward)]), np.array([ended]), np.array([reward > 3]))
    assert (tally.returns, tally.lengths, tally.successes) == ([3.0, 4.0], [2, 1], [0.0, 1.0])


def test_the_summary_is_computed_by_hand():
    tally = EpisodeTally(rows=1, episodes=9)
    for value in (8, 1, 3, 2, 4, 5, 6, 100):
        tally.add(np.array([float(value)]), np.array([True]))
    summary = summarise(tally)
    assert summary["episodes"] == 8
    assert summary["unfinished"] == 1
    assert summary["episode_return"] == 129 / 8
    assert summary["episode_return_min"] == 1
    assert summary["episode_return_max"] == 100
    assert summary["episode_return_iqm"] == (3 + 4 + 5 + 6) / 4
    assert summary["episode_return_std"] == pytest.approx(np.std([8, 1, 3, 2, 4, 5, 6, 100]))
    assert summary["episode_length"] == 1
    assert "success" not in summary
    assert summarise(EpisodeTally(1, 1)) == {"episodes": 0.0, "unfinished": 1.0}


def test_the_interval_covers_the_interquartile_mean_and_repeats():
    samples = np.random.default_rng(3).normal(5, 1, 40)
    low, high = bootstrap_interval(samples, interquartile_mean)
    assert low < interquartile_mean(samples[None])[0] < high
    assert (low, high) == bootstrap_interval(samples, interquartile_mean)
    assert high - low < 1.2


class Workers:
    """Two workers of one row; an episode of worker i lasts i + 2 steps and says of success."""

    def __init__(self, ends, tasks=("walk", "walk")):
        self.tasks = list(tasks)
        self.ends = ends
        self.steps = [0, 0]
        self.seeds = []

    def reset(self, seed=None, options=None):
        self.seeds.append((seed, options))
        names = ["a-0", "b-1"]
        return BatchedData(names, [EnvRet(name, np.zeros(1)) for name in names]), []

    def step(self, responses):
        rets = []
        for index, env_id in enumerate(responses.ids()):
            self.steps[index] += 1
            ended = self.ends and self.steps[index] % (index + 2) == 0
            info = {"success": np.float64(index)} if ended else {}
            rets.append(EnvRet(env_id, np.zeros(1), 1.0, bool(ended), False, info))
        return BatchedData(responses.ids(), rets), None


class Acting:
    def memory_kept(self, *, empty):
        assert empty
        return contextlib.nullcontext()

    def rollout_batch(self, env_rets, *, deterministic):
        assert deterministic
        return env_rets


def test_success_is_read_from_the_worker_whose_episode_ended():
    tally = evaluate_episodes(Workers(ends=True), Acting(), episodes=6, seed=3, options={"x": 1})
    assert sorted(tally.lengths) == [2, 2, 2, 3, 3, 3]
    assert sorted(tally.successes) == [0, 0, 0, 1, 1, 1]


def test_every_task_plays_its_own_share_of_the_episodes_and_is_summarised_alone():
    """A worker of three rows and one of a single row: each task plays four of the eight."""
    tally = EpisodeTally(4, 8, ["walk", "walk", "walk", "run"])
    assert tally._quota.tolist() == [2, 1, 1, 4]
    for step in range(4):
        tally.add(np.array([1.0, 2.0, 3.0, 10.0 + step]), np.array([True] * 4))
    summary = summarise(tally)
    assert summary["episodes"] == 8
    assert summary["walk/episode_return"] == (1 + 1 + 2 + 3) / 4
    assert summary["run/episode_return"] == (10 + 11 + 12 + 13) / 4
    assert summary["episode_return"] == (7 + 46) / 8
    assert (summary["walk/unfinished"], summary["run/episodes"]) == (0, 4)


def test_every_task_plays_at_least_one_episode():
    tally = EpisodeTally(3, 1, ["a", "b", "b"])
    assert tally._quota.tolist() == [1, 1, 0]
    tally.add(np.zeros(3), np.array([True, False, True]))
    assert summarise(tally)["b/unfinished"] == 1


def test_successes_and_lengths_are_told_apart_by_task():
    workers = Workers(ends=True, tasks=("short", "long"))
    summary = summarise(evaluate_episodes(workers, Acting(), episodes=5))
    assert (summary["short/episodes"], summary["long/episodes"]) == (3, 2)
    assert (summary["short/episode_length"], summary["long/episode_length"]) == (2, 3)
    assert (summary["short/success"], summary["long/success"]) == (0, 1)
    assert summary["success"] == 2 / 5


def test_an_environment_that_never_ends_does_not_hold_up():
    workers = Workers(ends=False)
    tally = evaluate_episodes(workers, Acting(), episodes=2, max_steps=50, seed=4)
    assert workers.steps == [50, 50]
    assert workers.seeds == [(4, None)]
    assert summarise(tally) == {"episodes": 0.0, "unfinished": 2.0}


def test_a_long_evaluation_says_once_what_it_waits_for_and_how_long(monkeypatch, caplog):
    monkeypatch.setattr(evaluation, "SAID_AFTER_STEPS", 20)
    evaluate_episodes(Workers(ends=False), Acting(), episodes=2, max_steps=20)
    assert caplog.messages == []
    evaluate_episodes(Workers(ends=False), Acting(), episodes=2, max_steps=50)
    (said,) = caplog.messages
    assert said.startswith("after 20 steps the evaluation still lacks 2 of 2 episodes")
    assert "it ends at step 50" in said


def test_a_stop_is_seen_between_steps():
    def stop():
        raise KeyboardInterrupt

    workers = Workers(ends=False)
    with pytest.raises(KeyboardInterrupt):
        evaluate_episodes(workers, Acting(), episodes=2, check_stop=stop)
    assert workers.steps == [0, 0]


# ---- the engine that only evaluates -------------------------------------------------------------


@POLICIES.register("TinyEvalPolicy")
class Tiny(BasePolicy):
    """Leans where the pole leans, as strongly as its weights say; has state outside modules."""

    batched_rollout = True

    def construct_network(self, env_meta, *args, **kwargs):
        self.actor = nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.zeros(1))
        self.register_buffer("mean", torch.zeros(4))

    def setup_optimizer(self, optim_cfg): ...

    def rollout_step(self, env_ret, **kwargs):
        assert self.deterministic
        logits = self.scale * self.actor(env_ret.observation - self.mean)
        return PolicyResponse(env_ret.env_id, action=logits.argmax(-1))

    def postprocess(self, env_ret=None, policy_resp=None): ...
    def update_dataset(self, data): ...
    def train(self, *args, **kwargs): ...


def configuration(folder, **train):
    return MainConfig.from_dict(
        {
            "engine": "eval",
            "debug": False,
            "verbose": False,
            "env": {"name": "cp", "backend": "gymnasium", "task": "CartPole-v1", "num_envs": 2},
            "buffer": {"type": "RolloutBuffer", "capacity": 8},
            "policy": {"type": "TinyEvalPolicy"},
            "train": {"max_epochs": 1, "eval_episodes": 6, "seed": 1, **train},
            "log": {"log_dir": str(folder), "name": "n", "level": "ERROR"},
        }
    )


@pytest.fixture(autouse=True)
def _logs_end_with_each_test():
    yield
    close_logger()


def engine_for(config):
    check_config(config)
    open_run(config)
    group = build_policy_group(config.policy.type, config.policy)
    return build_engine(config, build_env_group(config.env), group)


def checkpoint_of_a_good_policy(folder):
    policy = Tiny(configuration(folder).policy, "train")
    policy.init_train(configuration(folder).train, None)
    with torch.no_grad():
        policy.actor.weight.copy_(torch.tensor([[0, 0, -1.0, -1.0], [0, 0, 1.0, 1.0]]))
        policy.actor.bias.zero_()
        policy.scale.fill_(1)
    return save_checkpoint(
        folder / "checkpoints",
        "epoch_last",
        Checkpoint(
            policy="x:Y", epoch=1, env_steps=1, weights=policy.export_weights(), training={}
        ),
        write_policy_file=policy.save_checkpoint,
    )


def test_the_engine_measures_a_checkpoint_with_its_state_outside_modules(tmp_path):
    checkpoint_of_a_good_policy(tmp_path)
    engine = engine_for(configuration(tmp_path, checkpoint=str(tmp_path)))
    engine.run()
    assert engine.last_metrics["eval/episodes"] == 6
    assert engine.last_metrics["eval/episode_return"] > 100
    with pytest.raises(RLightningError, match="learns nothing"):
        engine.train()


def test_the_engine_needs_a_checkpoint(tmp_path):
    with pytest.raises(ConfigError, match=r"engine: eval needs train\.checkpoint"):
        engine_for(configuration(tmp_path))
    close_logger()
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        engine_for(configuration(tmp_path / "other", checkpoint=str(tmp_path / "nothing")))


def test_evaluations_see_the_same_episodes_and_others_than_training(tmp_path):
    env = gym.make("CartPole-v1")
    env.close()
    config = configuration(tmp_path)
    training = build_env_group(config.env)
    evaluation = training.for_evaluation()
    try:
        training.init(seed=5)
        evaluation.init(seed=5)
        first = evaluation.first_env_rets.values()[0].observation
        again, _ = evaluation.reset(seed=5)
        assert np.array_equal(first, again.values()[0].observation)
        assert not np.array_equal(first, training.first_env_rets.values()[0].observation)
    finally:
        training.close()
        evaluation.close()
