"""Does PPO reach the published returns? One run per task and seed, each kept once it is done.

    python benchmarks/learn_ppo.py [--quick] [--tasks cartpole pendulum] [--seeds 0 1 2]

A finished (task, seed) is not run again: its curve stands in
``benchmarks/results/learn_ppo/<task>_<seed>.json``. Every figure is the mean return of
deterministic evaluation episodes at the end of training; ``best`` is the highest of the
evaluations along the way. Over several seeds, the interquartile mean stands beside the mean, with
its 95 % bootstrap interval. ``--seeds`` with no number trains nothing and summarises what is there.
"""

import argparse
import json
import pathlib
from dataclasses import dataclass

from common import goal, over_seeds, seeds, spread, write_result
from learning import Case, train

RESULTS = pathlib.Path(__file__).parent / "results" / "learn_ppo"


@dataclass(frozen=True)
class Task:
    """What is trained, and what counts as reached."""

    config: str
    floor: float
    goal: float
    source: str


TASKS = {
    "cartpole": Task("cartpole_ppo", 500, 500, "SB3 zoo 500 by 100k"),
    "acrobot": Task("acrobot_ppo", -85, -85, "CleanRL -86.4, zoo -73.5, by 500k"),
    "pendulum": Task("pendulum_ppo", -200, -200, "SB3 zoo -172 by 100k"),
    "lunarlander": Task("lunarlander_ppo", 200, 200, "SB3 zoo 242 by 1M"),
    "minatar_breakout": Task("minatar_breakout_ppo", 8, 10, "Young & Tian 2019: ~10 by 5M"),
    "halfcheetah_cleanrl": Task("halfcheetah_ppo_cleanrl", 1440, 1440, "CleanRL 1,443 by 1M"),
    "halfcheetah": Task("halfcheetah_ppo", 1440, 5800, "SB3 zoo 5,819 by 1M"),
    "hopper": Task("hopper_ppo", 2180, 2600, "Tianshou 2,609 by 1M"),
    "walker2d": Task("walker2d_ppo", 2290, 3600, "Tianshou 3,589 by 1M"),
}


def run(task: str, seed: int, extra: list[str]) -> dict:
    """Train once and return the curve and the final evaluation."""
    return {"task": task, **train(Case(TASKS[task].config), seed, extra)}


def kept(task: str, seed: int) -> pathlib.Path:
    """Return where the result of one run stands."""
    return RESULTS / f"{task}_{seed}.json"


def summarise(tasks: list[str]) -> list[dict]:
    """Return a row per task over the seeds that have been run."""
    rows = []
    for task in tasks:
        runs = [
            json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{task}_[0-9]*.json"))
        ]
        if not runs:
            continue
        finals = [run["final_return"] for run in runs]
        rows.append(
            {
                "task": task,
                "seeds": [run["seed"] for run in runs],
                "env_steps": runs[0]["env_steps"],
                "returns": [round(value, 1) for value in finals],
                **over_seeds(finals),
                "best": round(max(v for run in runs for _, v in run["evaluations"]), 1),
                "floor": TASKS[task].floor,
                "goal": TASKS[task].goal,
                "source": TASKS[task].source,
            }
        )
    return rows


def judge(rows: list[dict]) -> list[dict]:
    """Compare the means with what is published."""
    return [
        goal(
            f"{row['task']}, {row['env_steps']:,} steps, {seeds(row)} ({row['source']})",
            row["mean"],
            at_least=row["goal"],
        )
        for row in rows
    ]


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two epochs of CartPole, kept nowhere")
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    if arguments.quick:
        result = run("cartpole", 0, ["train.max_epochs=2", "train.eval_episodes=4"])
        print(f"cartpole, two epochs: {result['final_return']:.1f} after {result['wall_s']} s")
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for task in arguments.tasks:
            if not kept(task, seed).exists():
                result = run(task, seed, [])
                kept(task, seed).write_text(json.dumps(result) + "\n")
                print(f"{task} seed {seed}: {result['final_return']:.1f}", flush=True)
    rows = summarise(list(TASKS))
    print(f"{'task':22} {'steps':>9} {'mean':>9} {'floor':>8} {'goal':>8}  IQM [95 %]; per seed")
    for row in rows:
        print(
            f"{row['task']:22} {row['env_steps']:9,} {row['mean']:9.1f} {row['floor']:8} "
            f"{row['goal']:8}  {spread(row)}; {row['returns']}"
        )
    write_result("learn_ppo", rows, judge(rows))


if __name__ == "__main__":
    main()
