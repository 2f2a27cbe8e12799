"""Does a clone reach its demonstrator, and does reinforcement learning improve on it?

    python benchmarks/learn_bc.py [--quick] [--seeds 0 1 2]

The demonstrator of CartPole-v1 balances the pole and lets the cart drift off its track, most of the
time before the 500 steps are over. Its episodes are written as a dataset in the layout of Minari;
`cartpole_bc` learns from them, and `cartpole_ppo` goes on from that checkpoint. Every figure is the
mean return of deterministic evaluation episodes. A finished seed is not run again:
``benchmarks/results/learn_bc/<seed>.json``.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

import gymnasium as gym
import numpy as np
from common import RESULTS, commit, goal, machine, write_result

from rlightning.datasets import Episode, write_minari

WEIGHTS = np.array([-0.1, -0.1, 1.0, 0.3])
"""Of cart position and speed, pole angle and speed: push to where their sum points."""
EPISODES, EVAL_EPISODES = 40, 50
PPO_EPOCHS = 40
FOLDER = RESULTS / "learn_bc"


def demonstrate(folder: pathlib.Path, seed: int) -> float:
    """Record the demonstrator; return its mean return."""
    env = gym.make("CartPole-v1")
    episodes = []
    for number in range(EPISODES):
        rows, actions = [env.reset(seed=1000 * (seed + 1) + number)[0]], []
        ends = (False, False)
        while not any(ends):
            actions.append(int(rows[-1] @ WEIGHTS > 0))
            observation, _, *ends, _ = env.step(actions[-1])
            rows.append(observation)
        flags = np.zeros((2, len(actions)), bool)
        flags[:, -1] = ends
        one = Episode(np.stack(rows), np.array(actions), np.ones(len(actions)), *flags)
        episodes.append(one)
    write_minari(
        folder,
        episodes,
        observation_space=env.observation_space,
        action_space=env.action_space,
    )
    return statistics.fmean(len(one) for one in episodes)


def train(folder: pathlib.Path, name: str, *arguments: str) -> dict:
    """Run a packaged configuration; return its last evaluation."""
    program = str(pathlib.Path(sys.executable).with_name("rlightning"))
    command = [program, "train", *arguments, f"log.log_dir={folder}", "log.project=p"]
    command += [f"log.name={name}", "verbose=false", f"train.eval_episodes={EVAL_EPISODES}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    rows = (folder / "p" / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, rows) if row["stream"] == "eval"][-1]


def run(seed: int, *, quick: bool = False) -> dict:
    """Demonstrate, clone, improve; and learn as long from nothing, for comparison."""
    epochs = 2 if quick else PPO_EPOCHS
    ppo = ["cartpole_ppo", f"train.seed={seed}", f"train.max_epochs={epochs}"]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        demonstrator = demonstrate(folder / "data", seed)
        clone = train(
            folder, "bc", "cartpole_bc", f"buffer.dataset={folder / 'data'}", f"train.seed={seed}",
            f"train.max_epochs={2 if quick else 100}",
        )  # fmt: skip
        started = f"policy.init_from={folder / 'p' / 'bc'}"
        improved = train(folder, "improved", *ppo, started)
        scratch = train(folder, "scratch", *ppo)
    return {
        "seed": seed,
        "demonstrator": round(demonstrator, 1),
        "clone": round(clone["eval/episode_return"], 1),
        "improved": round(improved["eval/episode_return"], 1),
        "from_nothing": round(scratch["eval/episode_return"], 1),
        "ppo_env_steps": improved["env_step"],
        "commit": commit(),
        "machine": machine(),
    }


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two epochs of each, kept nowhere")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    if arguments.quick:
        print(run(0, quick=True))
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        path = FOLDER / f"{seed}.json"
        if not path.exists():
            path.write_text(json.dumps(run(seed)) + "\n")
            print(path.read_text(), flush=True)
    rows = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    columns = ("demonstrator", "clone", "improved", "from_nothing")
    means = {name: round(statistics.fmean(row[name] for row in rows), 1) for name in columns}
    share = means["clone"] / means["demonstrator"]
    gain = means["improved"] - means["clone"]
    goals = [
        goal("the clone's return over its demonstrator's", share, at_least=0.9),
        goal("what PPO adds to the clone's return", gain, at_least=1),
    ]
    for name, value in means.items():
        print(f"{name:14} {value:7.1f}  {[row[name] for row in rows]}")
    figures = {"seeds": [row["seed"] for row in rows], "means": means, "runs": rows}
    write_result("learn_bc", figures, goals)


if __name__ == "__main__":
    main()
