"""What does a cluster cost on one machine, and what does it gain?

    python benchmarks/ray_overhead.py [--quick] [--rounds 25]

Environment steps per second of PPO on HalfCheetah-v5 (8 environments, 256 steps, minibatches of 64,
10 epochs) in one process, and on Ray with one worker of each kind. Both are built once and take
turns; medians are compared. Then two environment workers whose step takes 5 ms, in one process and
on Ray: there the steps are made side by side. And what one call of a worker costs, through the
socket that workers of one machine answer on and through Ray.
"""

import argparse
import contextlib
import logging
import os
import statistics
import tempfile
import time

import gymnasium as gym
import numpy as np
import torch
from common import goal, write_result

from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
    open_cluster,
)
from rlightning.config import MainConfig
from rlightning.runtime import open_run
from rlightning.utils.logger import close_logger

STEP_S = 0.005


class SlowStep(gym.Wrapper):
    """A simulator that takes five milliseconds a step, without using the processor."""

    def step(self, action):
        time.sleep(STEP_S)
        return self.env.step(action)


def slow_cartpole(**kwargs):
    return SlowStep(gym.make("CartPole-v1", **kwargs))


if "SlowCartPole-v0" not in gym.registry:  # workers import this module, by its name
    gym.register("SlowCartPole-v0", slow_cartpole)


def config_of(folder: str, *, cluster: bool, slow: bool) -> MainConfig:
    """Return one of the four runs."""
    env = {"name": "e", "backend": "gymnasium", "task": "HalfCheetah-v5", "num_envs": 8}
    rows, steps = 8, 256
    if slow:
        env |= {"task": "ray_overhead:SlowCartPole-v0", "num_envs": 1, "num_workers": 2}
        rows, steps = 2, 128
    sections = {
        "engine": "syncrl",
        "verbose": False,
        "debug": False,
        "env": env,
        "buffer": {"type": "RolloutBuffer", "capacity": rows * steps},
        "policy": {"type": "PPOPolicy", "optim_cfg": {"lr": 3e-4}},
        "train": {
            "max_epochs": 1_000_000,
            "max_rollout_steps": steps,
            "ppo_epochs": 10 if not slow else 2,
            "minibatch_size": 64,
            "fused_update": "auto",
            "seed": 0,
            "torch_threads": 1,
        },
        "log": {"level": "ERROR", "log_dir": folder},
    }
    if cluster:
        sections["cluster"] = {"ray_address": "local"}
    return MainConfig.from_dict(sections)


@contextlib.contextmanager
def running(*, cluster: bool, slow: bool):
    """Build a run; yield its engine, ready."""
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(folder, cluster=cluster, slow=slow)
        check_config(config)
        open_run(config)
        with open_cluster(config):
            env_group = build_env_group(config.env)
            policy_group = build_policy_group(config.policy.type, config.policy, config.cluster)
            buffer = build_data_buffer(config.buffer.type, config.buffer, seed=0)
            engine = build_engine(config, env_group, policy_group, buffer)
            try:
                yield engine
            finally:
                engine.close()
                close_logger()


def epoch(engine) -> tuple[float, dict[str, float]]:
    """Run one epoch; return environment steps per second, and the seconds of each stage."""
    engine.timing_raw = {}
    before, begin_s = engine.env_steps, time.perf_counter()
    engine._rollout()
    engine._update_dataset()
    engine._train()
    engine._sync_weights()
    rate = (engine.env_steps - before) / (time.perf_counter() - begin_s)
    return rate, {name: entry["total"] for name, entry in engine.timing_raw.items()}


def compare(*, slow: bool, rounds: int) -> dict[str, object]:
    """Let the two ways take turns; return medians and their ratio."""
    rates: dict[str, list[float]] = {"local": [], "ray": []}
    stages: dict[str, list[dict[str, float]]] = {"local": [], "ray": []}
    with running(cluster=True, slow=slow) as on_ray, running(cluster=False, slow=slow) as here:
        engines = {"local": here, "ray": on_ray}
        for engine in engines.values():
            epoch(engine)
        for _ in range(rounds):
            for name, engine in engines.items():
                rate, times = epoch(engine)
                rates[name].append(rate)
                stages[name].append(times)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = [ray / local for ray, local in zip(rates["ray"], rates["local"], strict=True)]
    return {
        "local_steps_per_s": round(medians["local"], 1),
        "ray_steps_per_s": round(medians["ray"], 1),
        "ratio": round(statistics.median(ratios), 3),
        "stages_s": {
            name: {
                stage: round(statistics.median(item[stage] for item in items), 4)
                for stage in items[0]
            }
            for name, items in stages.items()
        },
    }


class Echo:
    """Returns what it gets."""

    def echo(self, value):
        return value


def call_costs(calls: int) -> dict[str, float]:
    """Return microseconds per call of a worker: through the socket, and through Ray."""
    from rlightning.runtime.base import WorkerSpec
    from rlightning.runtime.ray import RayRuntime, this_process

    runtime = RayRuntime("local", setup=this_process(imports=(), seed=0, threads=1))
    try:
        handle = runtime.spawn(WorkerSpec(name="echo-0", make=Echo))
        row = np.zeros((8, 17), np.float32)
        costs = {}
        for name, value in (("socket", row), ("ray", {"row": row, "odd": frozenset()})):
            handle.call("echo", value).result()
            times = []
            for _ in range(calls):
                begin_s = time.perf_counter()
                handle.call("echo", value).result()
                times.append(time.perf_counter() - begin_s)
            costs[f"{name}_us"] = round(statistics.median(times) * 1e6, 1)
        return costs
    finally:
        runtime.close()


def judge(figures: dict) -> list[dict]:
    """Compare with what a cluster of one machine should reach."""
    cheap, slow = figures["halfcheetah"]["ratio"], figures["two_slow_envs"]["ratio"]
    return [
        goal("HalfCheetah-v5: Ray's rate over one process's (floor)", cheap, at_least=0.5),
        goal("HalfCheetah-v5: Ray's rate over one process's", cheap, at_least=0.8),
        goal("two environments of 5 ms: Ray's rate over one process's", slow, at_least=1.3),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a look instead of a measurement")
    parser.add_argument("--rounds", type=int, default=25)
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else arguments.rounds
    logging.disable(logging.WARNING)
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112  # its name; on a busy machine too
    torch.set_num_threads(1)
    figures = {
        "halfcheetah": compare(slow=False, rounds=rounds),
        "two_slow_envs": compare(slow=True, rounds=rounds),
        "call": call_costs(100 if arguments.quick else 1000),
    }
    for name, figure in figures.items():
        print(name)
        for key, value in figure.items():
            print(f"  {key:20} {value}")
    if not arguments.quick:
        write_result("ray_overhead", figures, judge(figures), rounds=rounds)


if __name__ == "__main__":
    main()
