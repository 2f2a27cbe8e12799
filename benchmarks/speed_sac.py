"""How fast does SAC train? Environment steps per CPU-second, beside Stable-Baselines3.

    python benchmarks/speed_sac.py [--quick] [--rounds 3]

The same work on both sides: one environment, 4 steps and then 4 gradient steps, minibatches of 256,
actor and two critics of 2x256 ReLU units, one torch thread. The two take turns in one process and
medians are compared.
"""

import argparse
import logging
import statistics
import tempfile
import time

import torch
from common import goal, write_result

from rlightning.build import (
    build_data_buffer,
    build_engine,
    build_env_group,
    build_policy_group,
    check_config,
)
from rlightning.config import MainConfig

STEPS, ROWS = 4, 256
FLOOR, GOAL = 1.3, 2.0
"""Of steps per CPU-second over the peer's."""


def ours(folder: str):
    """Return a function that runs epochs of `STEPS` steps and returns their CPU seconds."""
    config = MainConfig.from_dict(
        {
            "engine": "syncrl",
            "verbose": False,
            "debug": False,
            "env": {"name": "speed", "backend": "gymnasium", "task": "Pendulum-v1"},
            "buffer": {"type": "ReplayBuffer", "capacity": 100_000},
            "policy": {"type": "SACPolicy"},
            "train": {
                "max_epochs": 1_000_000,
                "max_rollout_steps": STEPS,
                "batch_size": STEPS * ROWS,
                "minibatch_size": ROWS,
                "seed": 0,
                "torch_threads": 1,
            },
            "log": {"level": "ERROR", "log_dir": folder},
        }
    )
    check_config(config)
    engine = build_engine(
        config,
        build_env_group(config.env),
        build_policy_group(config.policy.type, config.policy),
        build_data_buffer(config.buffer.type, config.buffer),
    )
    engine.collect(2 * STEPS * ROWS)

    def run(count: int) -> float:
        start = time.process_time()
        for _ in range(count):
            engine._rollout()
            engine._update_dataset()
            engine._train()
            engine._sync_weights()
            engine._end_epoch(engine.epoch)
        return time.process_time() - start

    return run, engine


def theirs():
    """Return the same for Stable-Baselines3."""
    from stable_baselines3 import SAC

    model = SAC(
        "MlpPolicy", "Pendulum-v1", train_freq=STEPS, gradient_steps=STEPS, batch_size=ROWS,
        learning_starts=2 * STEPS * ROWS, buffer_size=100_000, device="cpu", seed=0,
    )  # fmt: skip
    model.learn(2 * STEPS * ROWS)

    def run(count: int) -> float:
        start = time.process_time()
        model.learn(count * STEPS, reset_num_timesteps=False)
        return time.process_time() - start

    return run


def main() -> None:
    """Run the comparison and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rounds, count = (1, 5) if arguments.quick else (arguments.rounds, 75)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        run, engine = ours(folder)
        contestants = {"rlightning": run, "stable_baselines3": theirs()}
        rates: dict[str, list[float]] = {name: [] for name in contestants}
        for contestant in contestants.values():
            contestant(2)  # the first update pays for allocations
        for _ in range(rounds):
            for name, contestant in contestants.items():
                rates[name].append(count * STEPS / contestant(count))
        engine.close()
    rate = {name: statistics.median(values) for name, values in rates.items()}
    ratio = rate["rlightning"] / rate["stable_baselines3"]
    for name, value in rate.items():
        print(f"{name:20} {value:8.1f} steps per CPU-second")
    print(f"{'ratio':20} {ratio:8.2f}  floor {FLOOR}, goal {GOAL}")
    if not arguments.quick:
        figures = {
            "steps_per_cpu_s": {name: round(value, 1) for name, value in rate.items()},
            "ratio": round(ratio, 3),
            "versions": {"torch": torch.__version__},
        }
        what = "Pendulum-v1: steps per CPU-second, times Stable-Baselines3"
        goals = [
            goal(f"{what} (floor)", ratio, at_least=FLOOR),
            goal(what, ratio, at_least=GOAL),
        ]
        write_result("speed_sac", figures, goals)


if __name__ == "__main__":
    main()
