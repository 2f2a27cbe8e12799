"""What the training server adds to a bare echo of the same bytes over the same library.

A server process and this load process exchange ready-made frames: per round a feedback without a
reply and an infer that is answered. The servers take turns, so that a busy machine slows all;
figures are medians over the turns.

- ``echo`` is the library used directly, as its documentation shows.
- ``link`` is an echo over our own link, which goes without the library's queues and parser: what
  the server adds to *that* is decoding, acting, storing and encoding alone.
- ``acting`` is ``echo`` with the bare forward pass between reading and answering. The goals add the
  forward pass as it is in a tight loop; between system calls the same code runs cold.
- ``server`` is plugrl-server with ``gaussian-policy``.
- ``sleeping`` is the same with ``--busy-poll-us 0``: like the echoes, it sleeps between messages.

Each figure is kept when it is measured: a run that was cut off goes on where it stopped, if the
commit is the same. ``--quick`` and ``--only`` keep nothing.

    python benchmarks/serve.py [--quick] [--library websockets|picows] [--only latency ...]
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time

import numpy as np
from common import RESULTS, commit, goal, write_result

STATE_DIM, ACTION_DIM = 17, 6
CONNECTIONS = (1, 2, 4, 8, 16, 32)
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
    from echo import listen_picows, listen_websockets

    infer, _, action = frames(images=args.images, envs=args.envs)
    forward = forward_pass(args) if args.role == "acting" else lambda: None

    def answer(frame):
        if len(frame) != len(infer):
            return None
        forward()
        return action

    async def run():
        if args.role == "link":
            server, port = await listen_link(args.library, answer, action)
        else:
            listen = listen_picows if args.library == "picows" else listen_websockets
            server, port = await listen(lambda: answer, greeting=action)
        print(port, flush=True)
        await asyncio.Event().wait()
        del server  # it listened until here

    asyncio.run(run())


async def listen_link(library, answer, greeting):
    """Echo over the link that the server uses."""
    from plugrl_protocol.links import ServerOptions, choose

    class Echo:
        def __init__(self, link):
            self.link = link
            link.send(greeting)

        def frame(self, data):
            reply = answer(data)
            if reply is not None:
                self.link.send(reply)

        def closed(self, close):
            pass

    links = await choose(library).listen(ServerOptions(), Echo)
    return links, links.port


def forward_pass(args):
    """Give what runs the policy once on what the load sends."""
    from plugrl_protocol.codec import decode
    from plugrl_protocol.messages import parse_infer

    policy = make_algorithm(learns=False).policy
    infer = parse_infer(decode(frames(images=args.images, envs=args.envs)[0]))
    obs = infer.observation.to_wire()
    return lambda: policy.get_action_and_runtime_state(obs)


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


def wait_for_all():
    """Make the server wait for a request of every client, as the reference does."""
    from plugrl_server.server import websocket_agent_server
    from plugrl_server.server.trainer import Trainer
    from rlightning.runtime.batcher import Decision

    class WaitsForAll(Trainer):
        def _decide(self, inline):
            del inline
            everybody = len(self._waiting) >= len(self._clients)
            return Decision(tuple(self._waiting) if everybody else (), None)

    websocket_agent_server.Trainer = WaitsForAll


def serve_plugrl(args):
    """Serve gaussian-policy."""
    from plugrl_server.server.trainer import TrainerConfig
    from plugrl_server.server.websocket_agent_server import SocketConfig, WebSocketAgentServer

    if args.role == "waiting":
        wait_for_all()

    report = time_stages() if args.role == "stages" else lambda: None
    learns = args.role == "learning"
    polling = {"busy_poll_us": 0.0} if args.role == "sleeping" else {}
    WebSocketAgentServer(
        make_algorithm(learns=learns),
        show_metric_table=False,
        show_progress_bar=False,
        port=0,
        trainer_config=TrainerConfig(learn_mode="overlap" if learns else "sync"),
        socket_config=SocketConfig(library=args.library, **polling),
        on_listening=lambda server: print(server.port, flush=True),
    ).serve_forever()
    report()


def time_stages():
    """Time each stage's own work in this process; give what prints microseconds per request."""
    from asyncio import selector_events

    from plugrl_protocol.endpoint import _Turns
    from plugrl_protocol.links import websockets_asyncio
    from plugrl_protocol.server_session import ServerSession
    from plugrl_server.policy.actor_critic_policy import ActorCriticPolicy
    from plugrl_server.server.inference import Inference
    from plugrl_server.server.trainer import Trainer

    transport, link = selector_events._SelectorSocketTransport, websockets_asyncio
    stages = {
        "receive": (transport, "_read_ready__data_received"),
        "find_frames": (link._Connection, "data_received"),
        "decode": (ServerSession, "receive"),
        "dispatch": (_Turns, "frame"),
        "take_infer": (Trainer, "infer"),
        "take_feedback": (Trainer, "feedback"),
        "batch": (Trainer, "_act_inline"),
        "run": (Trainer, "_run"),
        "collate_and_split": (Inference, "run"),
        "forward": (ActorCriticPolicy, "get_action_and_runtime_state"),
        "encode": (ServerSession, "answer"),
        "frame": (link.WebsocketsServerLink, "send"),
        "send": (transport, "write"),
        "store": (Trainer, "_store"),
    }
    own_s, inner_s = dict.fromkeys(stages, 0.0), threading.local()
    requests = itertools.count()

    def timed(stage, function):
        def call(*arguments, **more):
            if stage == "take_infer":
                next(requests)
            stack = inner_s.__dict__.setdefault("stack", [])
            stack.append(0.0)
            begun_s = time.perf_counter()
            try:
                return function(*arguments, **more)
            finally:
                taken_s = time.perf_counter() - begun_s
                own_s[stage] += taken_s - stack.pop()
                if stack:
                    stack[-1] += taken_s

        return call

    for stage, (owner, name) in stages.items():
        setattr(owner, name, timed(stage, getattr(owner, name)))

    def report():
        n = max(1, next(requests))
        print(json.dumps({f"{stage}_us": s / n * 1e6 for stage, s in own_s.items()}), flush=True)

    return report


@contextlib.contextmanager
def servers(roles, args, *, images=0, envs=1):
    """Run a process per role, which start beside each other; yield (process, port) of each."""
    command = [sys.executable, __file__, "--images", str(images), "--envs", str(envs)]
    command += ["--library", args.library]
    processes = [
        subprocess.Popen([*command, "--role", role], stdout=subprocess.PIPE, text=True)
        for role in roles
    ]
    try:
        # A server prints its port, and stages what they took when it ends.
        yield [(process, int(process.stdout.readline())) for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(30)


@contextlib.contextmanager
def server(role, args):
    """Run one server process; yield (process, port)."""
    with servers([role], args) as [one]:
        yield one


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


async def many(port, connections, duration_s, *, envs=1):
    """Play on several connections of this one process; give requests per second."""
    from websockets.asyncio.client import connect

    infer, feedback, _ = frames(images=0, envs=envs)
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
    _, unanswered = await asyncio.wait(tasks, timeout=1.0)
    for task in unanswered:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return rate


# ------------------------------------------------------------------------------------ measurements


def forward_us(forward, rounds):
    """Median of the bare forward pass and its processor time, microseconds."""
    times, started_s = [], time.process_time()
    for _ in range(rounds):
        begun_s = time.perf_counter()
        forward()
        times.append(time.perf_counter() - begun_s)
    cpu_us = (time.process_time() - started_s) / rounds * 1e6
    return statistics.median(times) * 1e6, cpu_us


def latency(args, *, images):
    """Round trips of one client: echoes, server and forward pass in turn."""
    turns, rounds = (3, 300) if args.quick else (9, 1500)
    roles = {name: name for name in ("echo", "link", "acting", "sleeping")}
    roles["server"] = "plugrl"
    args.images = images
    forward = forward_pass(args)
    times = {name: [] for name in (*roles, "forward")}
    cpu_us = dict.fromkeys(times, 0.0)
    with contextlib.ExitStack() as stack:
        started = stack.enter_context(servers(roles.values(), args, images=images))
        players = {}
        for name, (process, port) in zip(roles, started, strict=True):
            players[name] = process, Player(port, args, images=images)
            stack.callback(players[name][1].close)
        for _, player in players.values():
            for _ in range(200):
                player.round_s()
        for _ in range(turns):
            for name, (process, player) in players.items():
                before_s = cpu_s(process.pid)
                taken = [player.round_s() * 1e6 for _ in range(rounds)]
                cpu_us[name] += (cpu_s(process.pid) - before_s) / (rounds * turns) * 1e6
                times[name].append(statistics.median(taken))
            wall, cpu = forward_us(forward, rounds // 3)
            times["forward"].append(wall)
            cpu_us["forward"] += cpu / turns
    figures = {f"{name}_us": statistics.median(values) for name, values in times.items()}
    figures |= {f"{name}_cpu_us": value for name, value in cpu_us.items()}
    turn = [dict(zip(times, values, strict=True)) for values in zip(*times.values(), strict=True)]

    def over(bare):
        return statistics.median(t["server"] / bare(t) for t in turn)

    return {
        **figures,
        "ratio": over(lambda t: t["echo"] + t["forward"]),
        "ratio_to_link": over(lambda t: t["link"] + t["forward"]),
        "ratio_to_acting": over(lambda t: t["acting"]),
        "ratio_of_sleeping": statistics.median(
            t["sleeping"] / (t["echo"] + t["forward"]) for t in turn
        ),
        "cpu_ratio": cpu_us["server"] / (cpu_us["echo"] + cpu_us["forward"]),
    }


def throughput(args, connections, *, envs=1):
    """Requests per second of several connections: echoes and server in turn."""
    turns, duration_s = (2, 0.5) if args.quick else (5, 1.0)
    roles = {"echo": "echo", "link": "link", "server": "plugrl"}
    rates, cores, load = ({name: [] for name in roles} for _ in range(3))
    with servers(roles.values(), args, envs=envs) as started:
        for _, port in started:
            asyncio.run(many(port, connections, 0.2, envs=envs))
        for _ in range(turns):
            for name, (process, port) in zip(roles, started, strict=True):
                before, own_s = cpu_s(process.pid), time.process_time()
                started_s = time.perf_counter()
                rates[name].append(asyncio.run(many(port, connections, duration_s, envs=envs)))
                taken_s = time.perf_counter() - started_s
                cores[name].append((cpu_s(process.pid) - before) / taken_s)
                load[name].append((time.process_time() - own_s) / taken_s)
    figures = {}
    for name in roles:
        rate, used = statistics.median(rates[name]), statistics.median(cores[name])
        figures |= {f"{name}_per_s": rate, f"{name}_cores": used}
        figures[f"{name}_cpu_us"] = used / rate * 1e6 if rate else 0.0
        figures[f"{name}_load_cores"] = statistics.median(load[name])

    def over(bare):
        pairs = zip(rates["server"], rates[bare], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    return {**figures, "ratio": over("echo"), "ratio_to_link": over("link")}


def stages(args, connections):
    """Microseconds of a request in the server's process, stage by stage; the clock costs some."""
    with server("stages", args) as (process, port):
        asyncio.run(many(port, connections, 1.0 if args.quick else 5.0))
        process.terminate()
        lines = process.stdout.read().splitlines()
    return json.loads(lines[-1])


def cpu_s(pid):
    """Processor seconds of a process so far."""
    import psutil

    taken = psutil.Process(pid).cpu_times()
    return taken.user + taken.system


def stalled(args, role="plugrl"):
    """Requests per second of four clients, without and with a stalled and an idle connection."""
    duration_s, turns = (1.0, 2) if args.quick else (12.0, 5)
    if role == "waiting":
        duration_s, turns = 2.0, 2
    rates = {"undisturbed": [], "disturbed": []}
    cpu_us = {"undisturbed": 0.0, "disturbed": 0.0}
    with server(role, args) as (process, port):
        asyncio.run(many(port, 4, 1.0))
        for _ in range(turns):
            before_s = cpu_s(process.pid)
            rates["undisturbed"].append(asyncio.run(many(port, 4, duration_s)))
            cpu_us["undisturbed"] += cpu_s(process.pid) - before_s
            stall = Player(port, args)
            stall.round_s()
            idle = Player(port, args)
            before_s = cpu_s(process.pid)
            rates["disturbed"].append(asyncio.run(many(port, 4, duration_s)))
            cpu_us["disturbed"] += cpu_s(process.pid) - before_s
            stall.close()
            idle.close()
    ratio = statistics.median(d / u for u, d in zip(*rates.values(), strict=True))
    figures = {f"{k}_per_s": statistics.median(v) for k, v in rates.items()}
    for name, seconds in cpu_us.items():
        requests = sum(rates[name]) * duration_s
        figures[f"{name}_cpu_us"] = seconds / requests * 1e6 if requests else 0.0
    return {**figures, "ratio": ratio}


def while_learning(args):
    """The 99th percentile of a client's round trip while the learner is busy; an echo's beside it.

    The echo tells what the machine makes a client wait in any case, learner or not.
    """
    args.images = 0
    forward_ms = forward_us(forward_pass(args), 500)[0] / 1e3
    rounds, turns = (1000, 2) if args.quick else (3000, 4)
    taken_ms = {"echo": [], "server": []}
    with server("echo", args) as (_, echo_port), server("learning", args) as (_, port):
        players = {"echo": Player(echo_port, args), "server": Player(port, args)}
        for _ in range(1100):
            players["server"].round_s()
        for _ in range(turns):
            for name, player in players.items():
                taken_ms[name] += [player.round_s() * 1e3 for _ in range(rounds)]
        for player in players.values():
            player.close()
    p50, p99 = np.percentile(taken_ms["server"], (50, 99))
    echo_p99 = float(np.percentile(taken_ms["echo"], 99))
    return {
        "forward_ms": forward_ms,
        "p50_ms": p50,
        "p99_ms": p99,
        "echo_p99_ms": echo_p99,
        "p99_beyond_ms": p99 - forward_ms,
    }


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


FIGURES = {
    "latency": lambda args: latency(args, images=0),
    "stages_1": lambda args: stages(args, 1),
    "stages_8": lambda args: stages(args, 8),
    "images": lambda args: latency(args, images=2),
    **{f"connections_{n}": lambda args, n=n: throughput(args, n) for n in CONNECTIONS},
    **{f"connections_{n}x8": lambda args, n=n: throughput(args, n, envs=8) for n in CONNECTIONS},
    "stalled": stalled,
    "stalled_waiting_for_all": lambda args: stalled(args, role="waiting"),
    "learning": while_learning,
    "idle": idle_cpu,
}


def least_growth(figures, suffix):
    """Answers per second over the most that fewer clients got, the least of all numbers."""
    best, least = 0.0, 1.0
    for n in CONNECTIONS:
        row = figures[f"connections_{n}{suffix}"]
        if best:
            least = min(least, row["server_per_s"] / best)
        best = max(best, row["server_per_s"])
    return least


def judge(figures):
    """Compare with the goals."""
    state, images, learning = figures["latency"], figures["images"], figures["learning"]
    trip, crowd = "round trip over echo + forward pass", "rate over that of fewer, at its least"
    return [
        goal(f"states, {trip} (floor)", state["ratio"], at_most=1.5),
        goal(f"states, {trip}", state["ratio"], at_most=1.2),
        goal(f"two images, {trip} (floor)", images["ratio"], at_most=1.5),
        goal(f"two images, {trip}", images["ratio"], at_most=1.2),
        goal("8 connections, rate over echo's", figures["connections_8"]["ratio"], at_least=0.8),
        goal(f"1 to 32 clients, {crowd}", least_growth(figures, ""), at_least=0.9),
        goal(
            f"the same with 8 environments each, {crowd}", least_growth(figures, "x8"), at_least=0.9
        ),
        goal(
            "beside a stalled and an idle client, rate", figures["stalled"]["ratio"], at_least=0.95
        ),
        goal("p99 while learning, ms beyond a forward pass", learning["p99_beyond_ms"], at_most=5),
        goal("cores that an idle server takes", figures["idle"]["cores"], at_most=0.01),
    ]


def measure(names, args, figures, kept=None):
    """Measure and print figures that are not there yet; keep them after each in a file."""
    for name in names:
        if name not in figures:
            figures[name] = {key: float(value) for key, value in FIGURES[name](args).items()}
            if kept is not None:
                kept.write_text(json.dumps(figures))
        shown = "  ".join(f"{key} {value:.4g}" for key, value in figures[name].items())
        print(f"{name:24} {shown}", flush=True)


def main():
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--library", default="websockets", choices=["websockets", "picows"])
    roles = ["echo", "link", "acting", "plugrl", "sleeping", "stages", "learning", "waiting"]
    parser.add_argument("--role", choices=roles, help=argparse.SUPPRESS)
    parser.add_argument("--images", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--envs", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="*", choices=FIGURES, help="some figures; kept nowhere")
    args = parser.parse_args()
    if args.role in ("echo", "link", "acting"):
        return serve_echo(args)
    if args.role is not None:
        return serve_plugrl(args)
    if args.only:
        return measure(args.only, args, {})
    kept = None if args.quick else RESULTS / f"serve-{args.library}-{commit()}.tmp"
    figures = json.loads(kept.read_text()) if kept and kept.exists() else {}
    measure(FIGURES, args, figures, kept)
    if kept is not None:
        load = {"library": args.library, "load_average_at_end": os.getloadavg()[0]}
        write_result("serve", figures, judge(figures), **load)
        kept.unlink()
    return None


if __name__ == "__main__":
    main()
