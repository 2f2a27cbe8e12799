"""Train packaged configurations over seeds, each run kept once it is done. Not run on its own.

A finished (case, seed) is not run again: its curve stands in
``benchmarks/results/<name>/<case>_<seed>.json``. Every figure is the mean return of deterministic
evaluation episodes at the end of training.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from common import RESULTS, commit, machine, over_seeds, spread, write_result


@dataclass(frozen=True)
class Case:
    """What is trained."""

    config: str
    """A packaged configuration."""
    overrides: list[str] = field(default_factory=list)
    """Changes to it."""
    imports: str | None = None
    """A module to import first, from beside the benchmark."""


def train(case: Case, seed: int, extra: list[str]) -> dict:
    """Train once and return the curve and the final evaluation."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            str(pathlib.Path(sys.executable).with_name("rlightning")), "train", case.config,
            f"train.seed={seed}", f"log.log_dir={folder}", "log.project=p", "log.name=run",
            "verbose=false", *case.overrides, *extra,
        ]  # fmt: skip
        if case.imports is not None:
            command.append(f"imports=[{case.imports}]")
        start_s = time.monotonic()
        done = subprocess.run(
            command, cwd=pathlib.Path(__file__).parent, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        wall_s = time.monotonic() - start_s
        text = (pathlib.Path(folder) / "p" / "run" / "metrics.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    evaluations = [row for row in rows if row["stream"] == "eval"]
    curve = [row for row in rows if "rollout/episode_return" in row]
    every = max(1, len(curve) // 100)
    return {
        "config": case.config,
        "overrides": case.overrides,
        "seed": seed,
        "env_steps": evaluations[-1]["env_step"],
        "wall_s": round(wall_s, 1),
        "final_return": evaluations[-1]["eval/episode_return"],
        "final_return_std": evaluations[-1]["eval/episode_return_std"],
        "episodes": evaluations[-1]["eval/episodes"],
        "evaluations": [[r["env_step"], round(r["eval/episode_return"], 1)] for r in evaluations],
        "curve": [[r["env_step"], round(r["rollout/episode_return"], 1)] for r in curve[::every]],
        "commit": commit(),
        "machine": machine(),
    }


def summarise(name: str, cases: dict[str, Case]) -> dict[str, dict]:
    """Return a row per case over the seeds that have been run.

    Beside the final returns: the mean over all evaluations, which is higher for who learns sooner,
    and over their second half, which is lower for who does not stay there.
    """
    rows = {}
    for label in cases:
        files = sorted((RESULTS / name).glob(f"{label}_[0-9]*.json"))
        runs = [json.loads(path.read_text()) for path in files]
        if runs:
            finals = [run["final_return"] for run in runs]
            curves = [[value for _, value in run["evaluations"]] for run in runs]
            late = [statistics.fmean(curve[len(curve) // 2 :]) for curve in curves]
            rows[label] = {
                "seeds": [run["seed"] for run in runs],
                "env_steps": runs[0]["env_steps"],
                "returns": [round(value, 1) for value in finals],
                "mean_on_the_way": round(statistics.fmean(map(statistics.fmean, curves)), 1),
                "late_mean": round(statistics.fmean(late), 1),
                **over_seeds(finals),
            }
    return rows


def main(
    name: str,
    about: str,
    cases: dict[str, Case],
    goals: Callable[[dict[str, dict]], list[dict]],
) -> None:
    """Run what is missing, print the table and write ``results/<name>.json``.

    Args:
        name: of the benchmark.
        about: what ``--help`` says.
        cases: by label.
        goals: from `summarise`'s rows to what `common.goal` gives; asked once all have been run.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--quick", action="store_true", help="two epochs of each, kept nowhere")
    parser.add_argument("--cases", nargs="*", choices=cases, default=list(cases))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    if arguments.quick:
        for label in arguments.cases:
            result = train(cases[label], 0, ["train.max_epochs=2", "train.eval_episodes=4"])
            print(f"{label}, two epochs: {result['final_return']:.1f}", flush=True)
        return
    (RESULTS / name).mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for label in arguments.cases:
            path = RESULTS / name / f"{label}_{seed}.json"
            if not path.exists():
                result = train(cases[label], seed, [])
                path.write_text(json.dumps(result) + "\n")
                print(f"{label} seed {seed}: {result['final_return']:.1f}", flush=True)
    rows = summarise(name, cases)
    print(f"{'case':18} {'steps':>8} {'mean':>8}  IQM [95 %]; per seed")
    for label, row in rows.items():
        print(
            f"{label:18} {row['env_steps']:8,} {row['mean']:8.1f}  {spread(row)}; {row['returns']}"
        )
    complete = rows.keys() == cases.keys()
    write_result(name, rows, goals(rows) if complete else [])
