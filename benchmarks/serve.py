"""What the training server adds to a bare echo of the same bytes over the same library.

A server process (echo or plugrl-server) and this load process exchange ready-made frames: per round
a feedback without a reply and an infer that is answered. Echo and server take turns, so that a busy
machine slows both; figures are medians over the turns.

    python benchmarks/serve.py [--quick] [--library websockets|picows]
"""

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
STATE_DIM, ACTION_DIM = 17, 6
os.environ.setdefault("OMP_NUM_THREADS", "1")


# ------------------------------------------------------------------------------------------ frames


def frames(*, images, envs=1):
    """Give (infer, feedback, action) of one client, encoded."""
    from plugrl_protocol.codec import encode
    from plugrl_protocol.messages import Action, Feedback, Infer, make_observation

    rng = np.random.default_rng(0)
    pictures = {
        f"camera{i}": rng.integers(0, 255, (envs, 224, 224, 3), dtype=np.uint8)
        for i in range(images)
    }
    states = {"obs": rng.normal(size=(envs, STATE_DIM)).astype(np.float32)}
    seen = make_observation(num_envs=envs, images=pictures, states=states)
    ids, zeros = np.arange(envs), np.zeros(envs, np.int64)
    flags = np.zeros(envs, np.bool_)
    infer = Infer(env_indices=ids, step_ids=zeros, observation=seen)
    feedback = Feedback(
        env_indices=ids,
        step_ids=zeros,
        observation=seen,
        rewards=np.ones(envs, np.float32),
        terminated=flags,
        truncated=flags,
        steps=np.ones(envs, np.int64),
    )
    action = Action(env_ids=ids, action=np.zeros((1, envs, ACTION_DIM), np.float32))
    return tuple(encode(message.to_wire()) for message in (infer, feedback, action))


# ----------------------------------------------------------------------------------------- servers


def serve_echo(args):
    """Answer every infer with one frame; nothing is decoded."""
    from plugrl_protocol.links import ServerOptions, choose

    infer, _, action = frames(images=args.images)

    class Echo:
        def __init__(self, link):
            self.link = link
            link.send(action)

        def frame(self, data):
            if len(data) == len(infer):
                self.link.send(action)

        def closed(self, close):
            pass

    async def run():
        links = await choose(args.library).listen(ServerOptions(), Echo)
        print(links.port, flush=True)
        await asyncio.Event().wait()

    asyncio.run(run())


def make_algorithm(*, learns):
    """Build gaussian-policy under ppo; its buffer is never full unless it learns."""
    import torch

    from plugrl_server.algorithm.ppo import PPOConfig
    from plugrl_server.algorithm.registration import make_algo
    from plugrl_server.policy.gaussian import GaussianPolicyConfig
    from plugrl_server.policy.registration import make_policy

    torch.set_num_threads(1)
    policy = make_policy("gaussian-policy", GaussianPolicyConfig(device="cpu"))
    buffer_size, epochs = (1024, 20) if learns else (1_000_000, 1)
    config = PPOConfig(buffer_size=buffer_size, update_epochs=epochs, train_itrs=100_000)
    algorithm = make_algo("ppo", policy, config=config)
    if learns:
        algorithm.separate_learner()
    algorithm.init_optimizers()
    return algorithm


def serve_plugrl(args):
    """Serve gaussian-policy."""
    from plugrl_server.server.trainer import TrainerConfig
    from plugrl_server.server.websocket_agent_server import SocketConfig, WebSocketAgentServer

    learns = args.role == "learning"
    WebSocketAgentServer(
        make_algorithm(learns=learns),
        show_metric_table=False,
        show_progress_bar=False,
        port=0,
        trainer_config=TrainerConfig(learn_mode="overlap" if learns else "sync"),
        socket_config=SocketConfig(library=args.library),
        on_listening=lambda server: print(server.port, flush=True),
    ).serve_forever()


@contextlib.contextmanager
def server(role, args, *, images=0):
    """Run a server process; yield (process, port)."""
    command = [sys.executable, __file__, "--role", role, "--images", str(images)]
    command += ["--library", args.library]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield process, int(process.stdout.readline())
    finally:
        process.terminate()
        process.wait(30)


# -------------------------------------------------------------------------------------------- load


class Player:
    """One connection that plays as fast as it is answered, over a blocking link."""

    def __init__(self, port, args, *, images=0):
        from plugrl_protocol.links import ClientOptions, choose

        self.infer, self.feedback, _ = frames(images=images)
        url = f"ws://127.0.0.1:{port}"
        self.link = choose(args.library).connect(ClientOptions(url=url, ping_interval_s=None))
        self.link.receive(10.0)
        self.holds_action = False

    def round_s(self):
        """Report, ask, and give the seconds from asking to the answer."""
        if self.holds_action:
            self.link.send(self.feedback)
        started_s = time.perf_counter()
        self.link.send(self.infer)
        self.link.receive(60.0)
        self.holds_action = True
        return time.perf_counter() - started_s

    def close(self):
        from plugrl_protocol.errors import CLOSE_FINISHED

        self.link.close(CLOSE_FINISHED)


async def many(port, connections, duration_s, *, images=0):
    """Play on several connections of this one process; give requests per second."""
    from websockets.asyncio.client import connect

    infer, feedback, _ = frames(images=images)
    counts = [0] * connections
    stop_s = float("inf")

    async def play(number):
        async with connect(f"ws://127.0.0.1:{port}", compression=None, max_size=None) as link:
            await link.recv()
            while time.perf_counter() < stop_s:
                await link.send(infer)
                await link.recv()
                await link.send(feedback)
                counts[number] += 1

    tasks = [asyncio.create_task(play(number)) for number in range(connections)]
    await asyncio.sleep(0.5)
    before, started_s = sum(counts), time.perf_counter()
    await asyncio.sleep(duration_s)
    rate = (sum(counts) - before) / (time.perf_counter() - started_s)
    stop_s = 0.0
    await asyncio.gather(*tasks)
    return rate


# ------------------------------------------------------------------------------------ measurements


def forward_us(rounds, *, images):
    """Median of the bare forward pass, microseconds."""
    from plugrl_protocol.codec import decode
    from plugrl_protocol.messages import parse_infer

    algorithm = make_algorithm(learns=False)
    obs = parse_infer(decode(frames(images=images)[0])).observation.to_wire()
    times = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        algorithm.policy.get_action_and_runtime_state(obs)
        times.append(time.perf_counter() - started_s)
    return statistics.median(times) * 1e6


def latency(args, *, images):
    """Round trips of one client: echo, server and forward pass in turn."""
    turns, rounds = (3, 300) if args.quick else (9, 1500)
    times = {"echo": [], "server": [], "forward": []}
    with (
        server("echo", args, images=images) as (_, echo_port),
        server("plugrl", args, images=images) as (_, port),
    ):
        players = {
            "echo": Player(echo_port, args, images=images),
            "server": Player(port, args, images=images),
        }
        for player in players.values():
            for _ in range(200):
                player.round_s()
        for _ in range(turns):
            for name, player in players.items():
                taken = [player.round_s() * 1e6 for _ in range(rounds)]
                times[name].append(statistics.median(taken))
            times["forward"].append(forward_us(rounds // 3, images=images))
        for player in players.values():
            player.close()
    figures = {f"{name}_us": statistics.median(values) for name, values in times.items()}
    ratios = [s / (e + f) for e, s, f in zip(*times.values(), strict=True)]
    return {**figures, "ratio": statistics.median(ratios)}


def throughput(args, connections):
    """Requests per second of several connections: echo and server in turn."""
    turns, duration_s = (2, 1.0) if args.quick else (5, 3.0)
    rates = {"echo": [], "server": []}
    with server("echo", args) as (_, echo_port), server("plugrl", args) as (process, port):
        asyncio.run(many(port, connections, 0.5))
        cores = []
        for _ in range(turns):
            rates["echo"].append(asyncio.run(many(echo_port, connections, duration_s)))
            before, started_s = cpu_s(process.pid), time.perf_counter()
            rates["server"].append(asyncio.run(many(port, connections, duration_s)))
            cores.append((cpu_s(process.pid) - before) / (time.perf_counter() - started_s))
    figures = {f"{name}_per_s": statistics.median(values) for name, values in rates.items()}
    ratio = statistics.median(s / e for e, s in zip(*rates.values(), strict=True))
    return {**figures, "ratio": ratio, "server_cores": statistics.median(cores)}


def cpu_s(pid):
    """Processor seconds of a process so far."""
    import psutil

    taken = psutil.Process(pid).cpu_times()
    return taken.user + taken.system


def stalled(args):
    """Requests per second of four clients, without and with a stalled and an idle connection."""
    duration_s, turns = (1.0, 2) if args.quick else (12.0, 5)
    rates = {"undisturbed": [], "disturbed": []}
    with server("plugrl", args) as (_, port):
        asyncio.run(many(port, 4, 1.0))
        for _ in range(turns):
            rates["undisturbed"].append(asyncio.run(many(port, 4, duration_s)))
            stall, idle = Player(port, args), Player(port, args)
            stall.round_s()
            rates["disturbed"].append(asyncio.run(many(port, 4, duration_s)))
            stall.close()
            idle.close()
    ratio = statistics.median(d / u for u, d in zip(*rates.values(), strict=True))
    return {**{f"{k}_per_s": statistics.median(v) for k, v in rates.items()}, "ratio": ratio}


def while_learning(args):
    """The 99th percentile of a client's round trip while the learner is busy."""
    rounds = 2000 if args.quick else 12_000
    forward = forward_us(500, images=0) / 1e3
    with server("learning", args) as (_, port):
        player = Player(port, args)
        for _ in range(1100):
            player.round_s()
        taken_ms = np.array([player.round_s() * 1e3 for _ in range(rounds)])
        player.close()
    p50, p99 = np.percentile(taken_ms, (50, 99))
    return {"forward_ms": forward, "p50_ms": p50, "p99_ms": p99, "p99_beyond_ms": p99 - forward}


def idle_cpu(args):
    """Share of a core of a server with one connection that does nothing."""
    seconds = 2.0 if args.quick else 10.0
    with server("plugrl", args) as (process, port):
        player = Player(port, args)
        player.round_s()
        time.sleep(1.0)
        before = cpu_s(process.pid)
        time.sleep(seconds)
        share = (cpu_s(process.pid) - before) / seconds
        player.close()
    return {"cores": share}


# ------------------------------------------------------------------------------------------ report


def measure(args):
    """Run everything; give figures and goals."""
    figures = {
        "state_latency": latency(args, images=0),
        "images_latency": latency(args, images=2),
        "eight_connections": throughput(args, 8),
    }
    for n in (1, 2, 4, 16, 32):
        figures[f"connections_{n}"] = throughput(args, n)
    figures["stalled"] = stalled(args)
    figures["while_learning"] = while_learning(args)
    figures["idle"] = idle_cpu(args)
    rates = {n: figures[f"connections_{n}"]["server_per_s"] for n in (1, 2, 4)}
    rates[8] = figures["eight_connections"]["server_per_s"]
    goals = {
        "state round trip <= 1.5x echo + forward (floor)": figures["state_latency"]["ratio"] <= 1.5,
        "state round trip <= 1.2x echo + forward (goal)": figures["state_latency"]["ratio"] <= 1.2,
        "images round trip <= 1.5x (floor)": figures["images_latency"]["ratio"] <= 1.5,
        "images round trip <= 1.2x (goal)": figures["images_latency"]["ratio"] <= 1.2,
        "8 connections >= 0.8x echo": figures["eight_connections"]["ratio"] >= 0.8,
        "1 to 8 connections never lose": rates[8] >= 0.9 * max(rates.values()),
        "stalled and idle cost <= 5 %": figures["stalled"]["ratio"] >= 0.95,
        "p99 while learning < 5 ms beyond forward": figures["while_learning"]["p99_beyond_ms"] < 5,
        "idle below 1 % of a core": figures["idle"]["cores"] < 0.01,
    }
    return figures, goals


def main():
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--library", default="websockets", choices=["websockets", "picows"])
    parser.add_argument("--role", choices=["echo", "plugrl", "learning"], help=argparse.SUPPRESS)
    parser.add_argument("--images", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument(
        "--only", help="one figure: latency, images, eight, stalled, learning, idle"
    )
    args = parser.parse_args()
    if args.role == "echo":
        return serve_echo(args)
    if args.role is not None:
        return serve_plugrl(args)
    if args.only:
        chosen = {
            "latency": lambda: latency(args, images=0),
            "images": lambda: latency(args, images=2),
            "eight": lambda: throughput(args, 8),
            "stalled": lambda: stalled(args),
            "learning": lambda: while_learning(args),
            "idle": lambda: idle_cpu(args),
        }
        print({name: round(float(value), 3) for name, value in chosen[args.only]().items()})
        return None
    figures, goals = measure(args)
    for name, values in figures.items():
        shown = "  ".join(f"{key} {value:.4g}" for key, value in values.items())
        print(f"{name:20} {shown}")
    for goal, holds in goals.items():
        print(f"{'holds' if holds else 'FAILS':6} {goal}")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    result = {
        "command": f"python benchmarks/serve.py{' --quick' if args.quick else ''}",
        "library": args.library,
        "machine": {"cpus": os.cpu_count(), "python": platform.python_version()},
        "load_average_at_end": os.getloadavg()[0],
        "commit": commit.stdout.strip(),
        "figures": {
            name: {key: float(value) for key, value in values.items()}
            for name, values in figures.items()
        },
        "goals": {goal: bool(holds) for goal, holds in goals.items()},
    }
    path = ROOT / "benchmarks" / "results" / "serve.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return None


if __name__ == "__main__":
    main()
