"""Do SAC, TD3 and DQN reach the returns expected of them in few steps?

    python benchmarks/learn_sac.py [--quick] [--tasks pendulum_sac ...] [--seeds 0 1 2]

A finished (task, seed) is not run again: its result stands in
``benchmarks/results/learn_sac/<task>_<seed>.json``. Every figure is the mean return of 20
deterministic evaluation episodes at the end of a packaged configuration.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from common import commit, machine, write_result

RESULTS = pathlib.Path(__file__).parent / "results" / "learn_sac"
GOALS = {"pendulum_sac": -300, "pendulum_td3": -300, "cartpole_dqn": 475}
"""Packaged configuration, and the mean return over seeds that counts as reached: the swing-up
within 6,000 steps, and what Gymnasium calls solved within 50,000."""


def train(task: str, seed: int, extra: list[str]) -> dict:
    """Train once and return the curve and the final evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(pathlib.Path(sys.executable).with_name("rlightning")), "train", task,
            f"train.seed={seed}", f"log.log_dir={folder}", "log.project=p", "log.name=run",
            "verbose=false", *extra,
        ]  # fmt: skip
        start_s = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wall_s = time.monotonic() - start_s
        text = (pathlib.Path(folder) / "p" / "run" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    final = [row for row in rows if row["stream"] == "eval"][-1]
    curve = [row for row in rows if "rollout/episode_return" in row]
    every = max(1, len(curve) // 100)
    return {
        "task": task,
        "seed": seed,
        "env_steps": final["env_step"],
        "updates": max(row.get("train/updates", 0) for row in rows),
        "wall_s": round(wall_s, 1),
        "final_return": final["eval/episode_return"],
        "final_return_std": final["eval/episode_return_std"],
        "curve": [[r["env_step"], round(r["rollout/episode_return"], 1)] for r in curve[::every]],
        "commit": commit(),
        "machine": machine(),
    }


def summarise() -> list[dict]:
    """Return a row per task over the seeds that have been run."""
    rows = []
    for task, goal in GOALS.items():
        files = sorted(RESULTS.glob(f"{task}_[0-9]*.json"))
        runs = [json.loads(path.read_text()) for path in files]
        if not runs:
            continue
        finals = [run["final_return"] for run in runs]
        mean = statistics.fmean(finals)
        rows.append(
            {
                "task": task,
                "seeds": [run["seed"] for run in runs],
                "env_steps": runs[0]["env_steps"],
                "updates": runs[0]["updates"],
                "returns": [round(value, 1) for value in finals],
                "mean": round(mean, 1),
                "goal": goal,
                "goal_holds": mean >= goal,
            }
        )
    return rows


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few epochs of SAC, kept nowhere")
    parser.add_argument("--tasks", nargs="*", choices=GOALS, default=list(GOALS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    if arguments.quick:
        result = train("pendulum_sac", 0, ["train.max_epochs=160", "train.eval_episodes=4"])
        print(f"pendulum_sac, {result['updates']:.0f} updates: {result['final_return']:.1f}")
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for task in arguments.tasks:
            path = RESULTS / f"{task}_{seed}.json"
            if not path.exists():
                result = train(task, seed, [])
                path.write_text(json.dumps(result) + "\n")
                print(f"{task} seed {seed}: {result['final_return']:.1f}", flush=True)
    rows = summarise()
    print(f"{'task':14} {'steps':>7} {'updates':>8} {'mean':>8} {'goal':>6}  returns per seed")
    for row in rows:
        print(
            f"{row['task']:14} {row['env_steps']:7,} {row['updates']:8,.0f} {row['mean']:8.1f} "
            f"{row['goal']:6}  {row['returns']}"
        )
    write_result("learn_sac", rows, goals_hold=all(row["goal_holds"] for row in rows))


if __name__ == "__main__":
    main()
