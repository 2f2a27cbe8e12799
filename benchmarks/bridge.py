"""What the wire costs per step: one policy, collected in process and over the wire both ways.

CartPole-v1 with rlightning's PPOPolicy, nothing learned: what is measured is acting, storing, and
for the wire everything in between. The client is a process of its own, so only in process does the
trainer step the environments too. Figures are medians over several turns. Judged is what the wire
costs the trainer: its CPU time per step beyond that in process, which other programs disturb less
than wall time.

    python benchmarks/bridge.py [--quick]
"""

import argparse
import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROWS = (1, 8)
GOAL_US = 1000
"""Of the trainer's CPU time that the wire may add to a step."""
WAYS = ("in process", "env_server", "--rlightning", "categorical-policy")


def config_of(folder, rows, *overrides):
    """Give the configuration of a run that only collects."""
    from plugrl_server.algorithm.rlightning.parts import load_config

    return load_config(
        "cartpole_ppo",
        [f"env.num_envs={rows}", f"log.log_dir={folder}", "log.level=ERROR", "verbose=false",
         "buffer.capacity=10000000", "train.seed=0", *overrides],
    )  # fmt: skip


@contextlib.contextmanager
def client(port, folder, rows):
    """Run an environment client in a process of its own."""
    process = subprocess.Popen(
        [pathlib.Path(sys.executable).parent / "plugrl-run-env-client", "classic-v1",
         "--server-port", str(port), "--num-envs", str(rows), "--num-episodes", "100000000",
         "--recorder.no-record-obs-stats", "--recorder.no-record-episode-metrics"],
        cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield
    finally:
        process.kill()
        process.wait()


def timed(collect, steps):
    """Give wall and CPU microseconds per step; `collect` may say how many it really did."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    done = collect(steps) or steps
    return (
        (time.perf_counter() - wall_s) / done * 1e6,
        (time.process_time() - cpu_s) / done * 1e6,
    )


def measure_engine(folder, rows, turns, steps, *, remote):
    """Collect with the synchronous engine."""
    from rlightning.build import (
        build_data_buffer,
        build_engine,
        build_env_group,
        build_policy_group,
    )
    from rlightning.runtime import open_run

    overrides = ["env.backend=env_server", "env.port=0"] if remote else []
    config = config_of(folder, rows, f"train.max_rollout_steps={steps}", *overrides)
    open_run(config)
    env_group = build_env_group(config.env)
    policy_group = build_policy_group(config.policy.type, config.policy)
    buffer = build_data_buffer(config.buffer.type, config.buffer, seed=0)
    with contextlib.ExitStack() as stack:
        if remote:
            from rlightning.env.remote_env import RemoteEnv

            join = RemoteEnv._join_hub

            def join_and_dial(self):
                hub = join(self)
                stack.enter_context(client(hub.port, folder, rows))
                return hub

            RemoteEnv._join_hub = join_and_dial
            stack.callback(setattr, RemoteEnv, "_join_hub", join)
        engine = build_engine(config, env_group, policy_group, buffer)
        engine.collect(steps // 4)
        buffer.clear()
        for _ in range(turns):
            yield timed(engine.collect, steps)
            buffer.clear()
        engine.close()


def measure_server(folder, rows, turns, steps, *, rlightning):
    """Collect behind the training server, which learns nothing in the time."""
    import torch

    from plugrl_server.testing import serve

    torch.set_num_threads(1)
    if rlightning:
        from plugrl_server.algorithm.rlightning.rlightning_algorithm import (
            RLightningAlgorithm,
            RLightningConfig,
        )
        from plugrl_server.algorithm.rlightning.served_policy import ServedPolicy

        served = ServedPolicy(config_of(folder, rows, "train.max_rollout_steps=1000000"))
        algorithm = RLightningAlgorithm(RLightningConfig(), served)
    else:
        import plugrl_server.algorithm
        import plugrl_server.policy  # noqa: F401  # each registers the built-in ones
        from plugrl_server.algorithm.ppo import PPOConfig
        from plugrl_server.algorithm.registration import make_algo
        from plugrl_server.policy.categorical import CategoricalPolicyConfig
        from plugrl_server.policy.registration import make_policy

        policy = make_policy("categorical-policy", CategoricalPolicyConfig(device="cpu"))
        config = PPOConfig(buffer_size=2_000_000, global_steps=100_000_000)
        algorithm = make_algo("ppo", policy, config=config)
        algorithm.init_optimizers()

    def collect(count):
        start = algorithm.global_step
        while algorithm.global_step < start + count * rows:
            time.sleep(0.02)  # a closer look would be counted as the trainer's time
        return (algorithm.global_step - start) / rows

    with serve(algorithm) as running, client(running.server.port, folder, rows):
        collect(steps // 4)
        for _ in range(turns):
            yield timed(collect, steps)


def measure(folder, turns, steps):
    """Give medians by way and rows."""
    figures = {}
    for rows in ROWS:
        where = [pathlib.Path(tempfile.mkdtemp(dir=folder)) for _ in WAYS]
        ways = {
            "in process": measure_engine(where[0], rows, turns, steps, remote=False),
            "env_server": measure_engine(where[1], rows, turns, steps, remote=True),
            "--rlightning": measure_server(where[2], rows, turns, steps, rlightning=True),
            "categorical-policy": measure_server(where[3], rows, turns, steps, rlightning=False),
        }
        for name, way in ways.items():
            taken = list(way)
            figures[f"{name}, {rows} row{'s' if rows > 1 else ''}"] = {
                "wall_us_per_step": round(statistics.median(wall for wall, _ in taken), 1),
                "trainer_cpu_us_per_step": round(statistics.median(cpu for _, cpu in taken), 1),
            }
    return figures


def judge(figures):
    """Compare what the wire costs with the goal."""
    from common import goal

    goals = []
    for rows in ROWS:
        name = f"{rows} row{'s' if rows > 1 else ''}"
        for way in WAYS[1:3]:
            key = "trainer_cpu_us_per_step"
            cost, base = (figures[f"{which}, {name}"][key] for which in (way, WAYS[0]))
            what = f"{way}, {name}: CPU us per step that the trainer spends more than in process"
            goals.append(goal(what, cost - base, at_most=GOAL_US))
    return goals


def main():
    """Measure, show and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps; nothing kept")
    args = parser.parse_args()
    steps, turns = (400, 3) if args.quick else (4000, 5)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(folder, turns, steps)
    print(f"{'':28} {'wall us/step':>14} {'trainer CPU us':>15}")
    for name, row in figures.items():
        print(f"{name:28} {row['wall_us_per_step']:14.0f} {row['trainer_cpu_us_per_step']:15.0f}")
    if not args.quick:
        from common import write_result

        load = round(os.getloadavg()[0], 1)
        print(write_result("bridge", figures, judge(figures), steps=steps, turns=turns, load=load))


if __name__ == "__main__":
    main()
