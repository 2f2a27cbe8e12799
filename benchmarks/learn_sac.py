"""Do SAC and TD3 learn as fast, per environment step, as Stable-Baselines3's?

    python benchmarks/learn_sac.py [--quick] [--cases pendulum_sac ...] [--seeds 0 1 2 3 4]

Both sides have the same settings: networks, learning rates, batches, one gradient step per
environment step, as many random steps before the first. Every figure is the mean return of 20
deterministic episodes. A case's claim holds where our mean over the seeds is not below the lowest
of Stable-Baselines3's. A finished (case, side, seed) is not run again: its result stands in
``benchmarks/results/learn_sac/<case>_<side>_<seed>.json``.
"""

import argparse
import json
import pathlib
import statistics
import time
from dataclasses import dataclass

import torch
from common import RESULTS, commit, goal, machine, seeds, write_result
from learning import Case, train

FOLDER = RESULTS / "learn_sac"
SIDES = ("rlightning", "stable_baselines3")
EPISODES = 20


@dataclass(frozen=True)
class Task:
    """What both sides learn."""

    config: str
    """A packaged configuration of ours."""
    algorithm: str
    """The peer's class."""
    env_id: str
    at_steps: tuple[int, ...]
    """When to evaluate; the last is the end."""
    random_steps: int
    learning_rate: float
    steps: int
    """Environment steps, and gradient steps, that take turns."""
    rows: int = 256
    hidden: int = 256

    def case(self) -> Case:
        """Return our side."""
        every = self.at_steps[0] // self.steps
        rates = ["actor_lr", "critic_lr", *(["temperature_lr"] if self.algorithm == "SAC" else [])]
        return Case(
            self.config,
            [
                f"train.max_epochs={self.at_steps[-1] // self.steps}",
                f"train.max_rollout_steps={self.steps}",
                f"train.batch_size={self.steps * self.rows}",
                f"train.minibatch_size={self.rows}",
                f"train.eval_interval={every}",
                f"train.eval_episodes={EPISODES}",
                "train.save_interval=-1",
                f"buffer.min_size={self.random_steps}",
                f"++policy.model_cfg.hidden_sizes=[{self.hidden},{self.hidden}]",
                *(f"++policy.optim_cfg.{name}={self.learning_rate}" for name in rates),
            ],
        )


TASKS = {
    "pendulum_sac": Task(
        "pendulum_sac", "SAC", "Pendulum-v1", (5000, 20_000), 100, 1e-3, 4, rows=128, hidden=64
    ),
    "halfcheetah_sac": Task(
        "halfcheetah_sac", "SAC", "HalfCheetah-v5", (25_600, 51_200), 10_000, 3e-4, 16
    ),
    "halfcheetah_td3": Task(
        "halfcheetah_td3", "TD3", "HalfCheetah-v5", (25_600, 51_200), 10_000, 1e-3, 16
    ),
}


def ours(task: Task, seed: int) -> dict[int, float]:
    """Train ours; return the mean return by environment steps."""
    result = train(task.case(), seed, [])
    return {
        wanted: min(result["evaluations"], key=lambda row: abs(row[0] - wanted))[1]
        for wanted in task.at_steps
    }


def theirs(task: Task, seed: int) -> dict[int, float]:
    """Train Stable-Baselines3's; return the same."""
    import gymnasium as gym
    import numpy as np
    import stable_baselines3
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor
    from stable_baselines3.common.noise import NormalActionNoise

    torch.set_num_threads(1)
    env = gym.make(task.env_id)
    further = {}
    if task.algorithm == "TD3":
        size = env.action_space.shape[0]
        further["action_noise"] = NormalActionNoise(np.zeros(size), np.full(size, 0.1))
    model = getattr(stable_baselines3, task.algorithm)(
        "MlpPolicy", env, seed=seed, device="cpu", learning_rate=task.learning_rate,
        train_freq=task.steps, gradient_steps=task.steps, batch_size=task.rows,
        learning_starts=task.random_steps, buffer_size=1_000_000,
        policy_kwargs={"net_arch": [task.hidden, task.hidden]}, **further,
    )  # fmt: skip
    evaluation = Monitor(gym.make(task.env_id))
    returns, done = {}, 0
    for wanted in task.at_steps:
        model.learn(wanted - done, reset_num_timesteps=done == 0)
        done = wanted
        evaluation.reset(seed=10_000 + seed)
        returns[wanted] = float(evaluate_policy(model, evaluation, EPISODES)[0])
    return returns


def run(label: str, side: str, seed: int, folder: pathlib.Path) -> None:
    """Run one side once, unless it has been."""
    path = folder / f"{label}_{side}_{seed}.json"
    if path.exists():
        return
    start_s = time.monotonic()
    returns = (ours if side == "rlightning" else theirs)(TASKS[label], seed)
    content = {
        "case": label,
        "side": side,
        "seed": seed,
        "returns": {str(at): round(value, 1) for at, value in returns.items()},
        "wall_s": round(time.monotonic() - start_s, 1),
        "commit": commit(),
        "machine": machine(),
    }
    path.write_text(json.dumps(content) + "\n")
    print(f"{label} {side} seed {seed}: {content['returns']}", flush=True)


def summarise(folder: pathlib.Path) -> list[dict]:
    """Return a row per case and evaluation, over the seeds that both sides have been run with."""
    rows = []
    for label, task in TASKS.items():
        found = {
            side: {
                run["seed"]: run["returns"]
                for run in map(
                    json.loads, (f.read_text() for f in folder.glob(f"{label}_{side}_*.json"))
                )
            }
            for side in SIDES
        }
        seeds = sorted(found[SIDES[0]].keys() & found[SIDES[1]].keys())
        for at in task.at_steps if seeds else ():
            our, their = ([found[side][seed][str(at)] for seed in seeds] for side in SIDES)
            rows.append(
                {
                    "case": label,
                    "env_steps": at,
                    "seeds": seeds,
                    "rlightning": our,
                    "stable_baselines3": their,
                    "means": [round(statistics.fmean(values), 1) for values in (our, their)],
                }
            )
    return rows


def judge(rows: list[dict]) -> list[dict]:
    """Compare our means with the lowest of the peer's returns."""
    return [
        goal(
            f"{row['case']}, mean return after {row['env_steps']:,} steps, {seeds(row)},"
            " beside Stable-Baselines3's lowest",
            row["means"][0],
            at_least=min(row["stable_baselines3"]),
        )
        for row in rows
    ]


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few epochs of ours, kept nowhere")
    parser.add_argument("--cases", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2, 3, 4])
    arguments = parser.parse_args()
    if arguments.quick:
        short = ["train.max_epochs=30", "train.eval_episodes=2", "train.eval_interval=-1"]
        result = train(TASKS["pendulum_sac"].case(), 0, short)
        print(f"pendulum_sac, {result['env_steps']} steps: {result['final_return']:.1f}")
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for label in arguments.cases:
            for side in SIDES:
                run(label, side, seed, FOLDER)
    rows = summarise(FOLDER)
    print(f"{'case':16} {'steps':>7} {'ours':>9} {'SB3':>9}  returns per seed, ours | SB3")
    for row in rows:
        our, their = row["means"]
        print(
            f"{row['case']:16} {row['env_steps']:7,} {our:9.1f} {their:9.1f}  "
            f"{row['rlightning']} | {row['stable_baselines3']}"
        )
    write_result("learn_sac", rows, judge(rows))


if __name__ == "__main__":
    main()
