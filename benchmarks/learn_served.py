"""Does a policy learn through the training server and its environment clients?

    python benchmarks/learn_served.py [--quick] [--tasks cartpole halfcheetah] [--seeds 0 1 2]

Every run is what a user starts: `plugrl-run-server` in one process, an environment client in
another, the wire between them. Afterwards the run's last checkpoint is served without learning
(``--serve-only``) and the likeliest actions are judged over whole episodes; the untrained policy is
judged in the same way before. A finished (task, seed) is not run again: its curve stands in
``benchmarks/results/learn_served/<task>_<seed>.json``. The C++ client needs a compiler and make.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from common import commit, goal, machine, over_seeds, seeds, write_result

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = pathlib.Path(__file__).parent / "results" / "learn_served"
BIN = pathlib.Path(sys.executable).parent
CPP = ROOT / "examples" / "cpp"
WHOLE_RUN_S = 8 * 3600.0
EVALUATION_S = 1800.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained by which commands, and what counts as reached."""

    policy: str
    policy_flags: str
    algorithm: str
    algorithm_flags: str
    client: str
    """The command; the address, the number of episodes and the seed are added."""
    env_steps: int
    goal: float
    is_gain: bool = False
    """Whether the goal is about how much better than untrained it gets."""
    source: str


TASKS = {
    "cartpole": Task(
        policy="categorical-policy",
        policy_flags="--policy.no-normalize-observations",
        algorithm="ppo",
        algorithm_flags="--algo.buffer-size 1024 --algo.batch-size 256 --algo.learning-rate 1e-3 "
        "--algo.gamma 0.98 --algo.gae-lambda 0.8 --algo.no-clip-vloss "
        "--algo.no-normalize-rewards",
        client="classic-v1 --env.name CartPole-v1 --num-envs 8",
        env_steps=100_000,
        goal=500,
        source="SB3 zoo 500 by 100k",
    ),
    "pendulum_sac": Task(
        policy="sac-policy",
        policy_flags="--policy.state-dim 3 --policy.action-dim 1 --policy.action-high 2 "
        "--policy.action-low -2 --policy.hidden-dims 64 64",
        algorithm="sac",
        algorithm_flags="--algo.batch-size 128 --algo.learning-starts 1000 --algo.update-every 8 "
        "--algo.policy-lr 1e-3 --algo.save-interval 5000",
        client="classic-v1 --env.name Pendulum-v1",
        env_steps=20_000,
        goal=-200,
        source="SB3 zoo -149 by 20k",
    ),
    "pendulum_cpp": Task(
        policy="gaussian-policy",
        policy_flags="--policy.obs-dim 3 --policy.action-dim 1 --policy.action-clip 2 "
        "--policy.no-normalize-observations",
        algorithm="ppo",
        algorithm_flags="--algo.buffer-size 4096 --algo.learning-rate 1e-3 --algo.gamma 0.9 "
        "--algo.no-anneal-lr --algo.no-clip-vloss --algo.no-normalize-rewards",
        client="cpp --num-envs 4",
        env_steps=100_000,
        goal=800,
        is_gain=True,
        source="the client of examples/cpp",
    ),
    "halfcheetah": Task(
        policy="gaussian-policy",
        policy_flags="--policy.log-std-init -1",
        algorithm="ppo",
        algorithm_flags="--algo.gamma 0.98 --algo.gae-lambda 0.92 --algo.no-clip-vloss",
        client="mujoco-v1 --env.name HalfCheetah-v5 --num-envs 8",
        env_steps=1_000_000,
        goal=1440,
        source="CleanRL 1,443 by 1M",
    ),
}


# ----------------------------------------------------------------------------------- processes


@contextlib.contextmanager
def server(folder: pathlib.Path, *arguments: str):
    """Run a server on a port of its own; yield (process, port). It does not stay."""
    log = folder / "server.log"
    quiet = ["--no-show-metric-table", "--no-show-progress-bar"]
    command = [str(BIN / "plugrl-run-server"), *arguments, "--port", "0", *quiet]
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=out)
    try:
        yield process, listening_port(process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        process.kill()
        process.wait()


def listening_port(process: subprocess.Popen, log: pathlib.Path) -> int:
    """Read the port from what a server says."""
    deadline_s = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline_s:
        found = re.search(r"listening on \S+:(\d+)", log.read_text())
        if found:
            return int(found[1])
        time.sleep(0.1)
    raise RuntimeError(f"the server does not listen:\n{log.read_text()}")


def client(task: Task, folder: pathlib.Path, *, port: int, episodes: int, seed: int) -> list[str]:
    """Give the command of a client."""
    if task.client.startswith("cpp"):
        program = [str(folder / "cpp" / "pendulum"), *task.client.split()[1:]]
        return [*program, *map(str, ["--port", port, "--episodes", episodes, "--seed", seed])]
    program = [str(BIN / "plugrl-run-env-client"), *task.client.split()]
    numbers = ["--server-port", port, "--num-episodes", episodes, "--runner.seed", seed]
    return [*program, *map(str, numbers), "--exp-name", f"{port}"]


def run_client(task: Task, folder: pathlib.Path, *, limit_s: float, **numbers: int) -> float | None:
    """Run a client to its end; give the mean return that it reports.

    Raises:
        RuntimeError: it failed.
    """
    command = client(task, folder, **numbers)
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    if task.client.startswith("cpp"):
        found = re.search(r"mean return (\S+)", done.stdout)
        return None if found is None else float(found[1])
    summary = folder / "runs" / str(numbers["port"]) / "rollout" / "proc_000" / "summary.json"
    mean: float | None = json.loads(summary.read_text())["mean_return"]
    return mean


# ----------------------------------------------------------------------------------------- runs


def judge(task: Task, folder: pathlib.Path, run: pathlib.Path | None, *, seed: int, episodes: int):
    """Give the mean return of the likeliest actions; of an untrained policy if there is no run."""
    names = [task.policy, "default", "eval", "default"]
    flags = [*task.policy_flags.split(), "--policy.deterministic", "--seed", str(seed)]
    flags += ["--policy.device", "cpu", "--exp-name", "judged", "--overwrite"]
    if run is not None:
        flags += ["--serve-only", str(run)]
    with server(folder, *names, *flags) as (_, port):
        numbers = {"port": port, "episodes": episodes, "seed": 10_000 + seed}
        return run_client(task, folder, limit_s=EVALUATION_S, **numbers)


def train(name: str, seed: int, *, env_steps: int, episodes: int) -> dict:
    """Train once and give the curve and the evaluations."""
    task = TASKS[name]
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place)
        if task.client.startswith("cpp"):
            build = [
                "make",
                "-C",
                str(CPP),
                f"BUILD={folder / 'cpp'}",
                str(folder / "cpp/pendulum"),
            ]
            subprocess.run(build, check=True, capture_output=True)
        initial = judge(task, folder, None, seed=seed, episodes=episodes)
        flags = [
            task.policy, "default", task.algorithm, "default", *task.policy_flags.split(),
            *task.algorithm_flags.split(), "--policy.device", "cpu", "--seed", str(seed),
            "--algo.global-steps", str(env_steps), "--exp-name", "run", "--keep", "1",
        ]  # fmt: skip
        start_s, start_cpu_s = time.monotonic(), cpu_s_of_children()
        with server(folder, *flags) as (process, port):
            run_client(task, folder, limit_s=WHOLE_RUN_S, port=port, episodes=10**9, seed=seed)
            process.wait(120)
        wall_s, cpu_s = time.monotonic() - start_s, cpu_s_of_children() - start_cpu_s
        if process.returncode != 0:
            raise RuntimeError((folder / "server.log").read_text()[-3000:])
        run = folder / "checkpoints" / task.algorithm / task.policy / "run"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        final = judge(task, folder, run, seed=seed, episodes=episodes)
    curve = [[row["env_step"], row["rollout/reward"]] for row in rows if "rollout/reward" in row]
    every = max(1, len(curve) // 100)
    return {
        "task": name,
        "seed": seed,
        "env_steps": max(row["env_step"] for row in rows),
        "wall_s": round(wall_s, 1),
        "cpu_s": round(cpu_s, 1),
        "initial_return": initial,
        "final_return": final,
        "episodes": episodes,
        "curve": [[step, round(value, 2)] for step, value in curve[::every]],
        "server": " ".join(["plugrl-run-server", *flags]),
        "client": task.client,
        "commit": commit(),
        "machine": machine(),
    }


def cpu_s_of_children() -> float:
    """Give the processor seconds of all child processes that have ended: server and client."""
    taken = os.times()
    return taken.children_user + taken.children_system


# --------------------------------------------------------------------------------------- report


def kept(task: str, seed: int) -> pathlib.Path:
    """Return where the result of one run stands."""
    return RESULTS / f"{task}_{seed}.json"


def reached(task: Task, run: dict) -> float:
    """Give what the goal is about."""
    return run["final_return"] - (run["initial_return"] if task.is_gain else 0.0)


def summarise() -> list[dict]:
    """Return a row per task over the seeds that have been run."""
    rows = []
    for name, task in TASKS.items():
        runs = [json.loads(p.read_text()) for p in sorted(RESULTS.glob(f"{name}_[0-9]*.json"))]
        if not runs:
            continue
        values = over_seeds([reached(task, run) for run in runs])
        rows.append(
            {
                "task": name,
                "seeds": [run["seed"] for run in runs],
                "env_steps": runs[0]["env_steps"],
                "initial": [round(run["initial_return"], 1) for run in runs],
                "final": [round(run["final_return"], 1) for run in runs],
                "what": "gain" if task.is_gain else "return",
                **values,
                "goal": task.goal,
                "steps_per_s": [round(run["env_steps"] / run["wall_s"]) for run in runs],
                "source": task.source,
            }
        )
    return rows


def judge_all(rows: list[dict]) -> list[dict]:
    """Compare the means with the goals."""
    return [
        goal(
            f"{row['task']}, {row['what']} after {row['env_steps']:,} steps,"
            f" {seeds(row)} ({row['source']})",
            row["mean"],
            at_least=row["goal"],
        )
        for row in rows
    ]


def main() -> None:
    """Run what is missing and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="4,096 steps of CartPole, kept nowhere"
    )
    parser.add_argument("--tasks", nargs="*", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if arguments.quick:
        run = train("cartpole", 0, env_steps=4096, episodes=10)
        print(f"cartpole: {run['initial_return']:.1f}, after 4,096 steps {run['final_return']:.1f}")
        return
    RESULTS.mkdir(parents=True, exist_ok=True)
    for seed in arguments.seeds:
        for name in arguments.tasks:
            if not kept(name, seed).exists():
                run = train(name, seed, env_steps=TASKS[name].env_steps, episodes=20)
                kept(name, seed).write_text(json.dumps(run) + "\n")
                gain = f"{run['initial_return']:.1f} to {run['final_return']:.1f}"
                print(f"{name} seed {seed}: {gain} in {run['wall_s']:.0f} s", flush=True)
    rows = summarise()
    print(
        f"{'task':14} {'steps':>9} {'what':>7} {'mean':>8} {'goal':>7}  initial -> final per seed"
    )
    for row in rows:
        pairs = zip(row["initial"], row["final"], strict=True)
        print(
            f"{row['task']:14} {row['env_steps']:9,} {row['what']:>7} {row['mean']:8.1f} "
            f"{row['goal']:7}  {', '.join(f'{before} -> {after}' for before, after in pairs)}"
        )
    write_result("learn_served", rows, judge_all(rows))


if __name__ == "__main__":
    main()
