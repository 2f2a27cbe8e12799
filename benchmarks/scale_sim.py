"""How does throughput grow from 1 to 64 GPUs, and where does our data plane saturate?

    python benchmarks/scale_sim.py [--quick] [--no-ray]

A simulation of the humanoid layout of the published table below: 4,096 environments per env worker,
24 steps a rollout, workers on nodes of 8 GPUs. What a GPU does is taken from the published
single-process row. What moving data costs is measured here, on the machine that runs this: frames
through a socket between processes, Ray calls, copies, weights through shared memory. What can be
neither is assumed; `ASSUMED` lists it, and docs/explanation/scaling.md says what follows.

Two data planes: `driver`, where every observation, action and row passes through the process that
runs the loop (this is what runs today), and `direct`, where that process sends each of them off
and workers hand the data to one another.
"""

import argparse
import os
import socket
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import torch
from common import write_result

from rlightning.runtime.channel import Channel, packed
from rlightning.weights import CPUWeightBuffer

ENVS, STEPS = 4096, 24
SATURATED = 0.5  # of the rate that environments would have without any data plane
GPUS_PER_NODE = 8
PUBLISHED = {  # nodes, env / eval / train / buffer workers: samples/s of rollout and training
    "1 process": (1, 1, 1, 1, 1, 53_850, 117_555),
    "1/1/1/1": (1, 1, 1, 1, 1, 54_992, 46_694),
    "2/2/2/1": (1, 2, 2, 2, 1, 97_810, 84_377),
    "3/3/2/1": (1, 3, 3, 2, 1, 122_833, 83_312),
    "6/6/6/4": (2, 6, 6, 6, 4, 225_261, 142_213),
    "12/12/12/8": (4, 12, 12, 12, 8, 407_756, 260_833),
    "24/24/24/16": (8, 24, 24, 24, 16, 800_563, 397_148),
}
ASSUMED = {
    "observation_bytes": 4 * 446,  # of one environment: 160 numbers for the actor, 286 critic's
    "action_bytes": 4 * 29,
    "response_bytes": 4 * (3 * 29 + 2),  # action, mean, deviation, log-probability, value
    "inference_share": 0.07,  # of the published time of a step; the rest is simulation
    "gradient_steps": 20,  # 5 epochs of 4 minibatches
    "parameters": 2_000_000,
    "network_bytes_per_s": 3.0e9,  # between nodes, each way: 25 Gb/s
    "network_call_s": 0.0003,  # on top of a call inside a node
    "all_reduce_bytes_per_s": {"node": 8e9, "network": 2.5e9},
    "all_reduce_call_s": {"node": 0.00006, "network": 0.0002},
}


@dataclass
class Costs:
    """What was measured: seconds of a processor, per message and per byte."""

    frame_s: float
    send_byte_s: float
    receive_byte_s: float
    copy_byte_s: float
    weights_byte_s: float
    call_s: float

    def send(self, size: float) -> float:
        return self.frame_s + size * self.send_byte_s

    def receive(self, size: float) -> float:
        return self.frame_s + size * self.receive_byte_s


# ---- calibration --------------------------------------------------------------------------------


def frame_costs(rounds: int) -> tuple[float, float, float]:
    """Return the seconds of a small frame, and per byte of sending and of receiving a large one."""
    large = {"observation": np.zeros((ENVS, ASSUMED["observation_bytes"] // 4), np.float32)}
    size = large["observation"].nbytes
    here, there = socket.socketpair()
    child = os.fork()
    if child == 0:
        channel = Channel(there)
        while True:
            started = time.process_time()  # waiting takes none
            value = channel.receive()
            if value is None:
                os._exit(0)
            channel.send(packed(time.process_time() - started))
    channel = Channel(here)
    sends, receives, small = [], [], []
    for _ in range(rounds):
        started = time.process_time()
        channel.send(packed(large))
        sends.append(time.process_time() - started)
        receives.append(channel.receive())
        started = time.perf_counter()
        channel.send(packed(1))
        channel.receive()
        small.append((time.perf_counter() - started) / 4)  # two were sent, two received
    channel.send(packed(None))
    os.waitpid(child, 0)
    return (
        statistics.median(small),
        statistics.median(sends) / size,
        statistics.median(receives) / size,
    )


def copy_cost(rounds: int) -> float:
    """Return the seconds per byte of a copy in memory."""
    source, target = np.zeros(50_000_000, np.uint8), np.zeros(50_000_000, np.uint8)
    times = []
    for _ in range(rounds):
        started = time.process_time()
        np.copyto(target, source)
        times.append(time.process_time() - started)
    return statistics.median(times) / source.nbytes


def weights_cost(rounds: int) -> float:
    """Return the seconds per byte of publishing weights and reading them, in one process."""
    buffer = CPUWeightBuffer()
    live = {"w": torch.zeros(ASSUMED["parameters"])}
    times = []
    for version in range(rounds + 3):
        started = time.process_time()
        buffer.publish(version, live)
        with buffer.read() as (_, weights):
            live["w"].copy_(weights["w"])
        times.append(time.process_time() - started)
    buffer.close()
    return statistics.median(times[3:]) / live["w"].nbytes


def call_cost(rounds: int) -> float:
    """Return the seconds of a small call of a Ray actor, one way."""
    import ray

    @ray.remote(num_cpus=0)
    class Echo:
        def echo(self, value):
            return value

    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR")
    try:
        actor = Echo.remote()
        ray.get(actor.echo.remote(0))
        times = []
        for index in range(10 * rounds):
            started = time.perf_counter()
            ray.get(actor.echo.remote(index))
            times.append((time.perf_counter() - started) / 2)
    finally:
        ray.shutdown()
    return statistics.median(times)


def calibrate(rounds: int, *, with_ray: bool) -> Costs:
    """Measure everything on this machine."""
    frame, send, receive = frame_costs(rounds)
    return Costs(
        frame_s=frame,
        send_byte_s=send,
        receive_byte_s=receive,
        copy_byte_s=copy_cost(rounds),
        weights_byte_s=weights_cost(rounds),
        call_s=call_cost(rounds) if with_ray else 0.0008,
    )


# ---- the simulated cluster ----------------------------------------------------------------------


@dataclass
class Cluster:
    """Who works where, when each is free again, and how long each has worked."""

    costs: Costs
    nodes: int
    envs: int
    evals: int
    trains: int
    buffers: int
    free_at: dict = field(default_factory=lambda: defaultdict(float))
    busy: dict = field(default_factory=lambda: defaultdict(float))

    def node_of(self, worker: tuple) -> int:
        """Return a worker's node: those of a kind are spread evenly, env i with eval i."""
        kind, index = worker
        counts = {"env": self.envs, "eval": self.evals, "train": self.trains}
        count = counts.get(kind, self.buffers)
        return 0 if kind == "driver" else index * self.nodes // count

    def work(self, worker: tuple, ready: float, seconds: float) -> float:
        """Let `worker` work once it is free and what it needs is ready; return when it is done."""
        done = max(self.free_at[worker], ready) + seconds
        self.free_at[worker] = done
        self.busy[worker] += seconds
        return done

    def move(self, sender: tuple, receiver: tuple, ready: float, size: float) -> float:
        """Send `size` bytes; return when the receiver has them."""
        here, there = self.node_of(sender), self.node_of(receiver)
        sent = self.work(sender, ready, self.costs.send(size))
        if here != there:
            seconds = size / ASSUMED["network_bytes_per_s"]
            sent = self.work(("wire out", here), sent, seconds)
            sent = self.work(("wire in", there), sent, seconds)
            sent += ASSUMED["network_call_s"] + self.costs.call_s
        return self.work(receiver, sent, self.costs.receive(size))


DRIVER = ("driver", 0)


def rollout_through_driver(cluster: Cluster, step_s: float, infer_s: float) -> float:
    """Return the seconds of a rollout in which all data passes through the driver."""
    observation = ENVS * ASSUMED["observation_bytes"]
    response = ENVS * ASSUMED["response_bytes"]
    action = ENVS * ASSUMED["action_bytes"]
    now = 0.0
    for _ in range(STEPS):
        answered = []
        for env in range(cluster.envs):
            worker = ("eval", env % cluster.evals)
            there = cluster.move(DRIVER, worker, now, observation)
            answered.append((worker, cluster.work(worker, there, infer_s)))
        have = [cluster.move(worker, DRIVER, done, response) for worker, done in answered]
        for env in range(cluster.envs):
            storage = ("buffer", env % cluster.buffers)
            rows = observation + response
            there = cluster.move(DRIVER, storage, have[env], rows)
            cluster.work(storage, there, rows * cluster.costs.copy_byte_s)
        stepped = []
        for env in range(cluster.envs):
            there = cluster.move(DRIVER, ("env", env), have[-1], action)
            stepped.append(cluster.work(("env", env), there, step_s))
        now = max(
            cluster.move(("env", env), DRIVER, done, observation)
            for env, done in enumerate(stepped)
        )
    return now


def rollout_direct(cluster: Cluster, step_s: float, infer_s: float) -> float:
    """Return the seconds of a rollout whose data goes from worker to worker."""
    observation = ENVS * ASSUMED["observation_bytes"]
    response = ENVS * ASSUMED["response_bytes"]
    action = ENVS * ASSUMED["action_bytes"]
    ready = [0.0] * cluster.envs
    for _ in range(STEPS):
        for env in range(cluster.envs):
            worker, storage = ("eval", env % cluster.evals), ("buffer", env % cluster.buffers)
            told = cluster.work(DRIVER, ready[env], 4 * cluster.costs.call_s)
            there = cluster.move(("env", env), worker, told, observation)
            answered = cluster.work(worker, there, infer_s)
            there = cluster.move(worker, ("env", env), answered, action)
            rows = observation + response
            stored = cluster.move(worker, storage, answered, rows)
            cluster.work(storage, stored, rows * cluster.costs.copy_byte_s)
            ready[env] = cluster.work(("env", env), there, step_s)
    return max(ready)


def training(cluster: Cluster, learn_row_s: float, *, direct: bool) -> float:
    """Return the seconds of an update: sampled rows to the learners, learning, weights back."""
    rows = cluster.envs * ENVS * STEPS
    row = 2 * ASSUMED["observation_bytes"] + ASSUMED["response_bytes"] + 16
    share = rows / cluster.trains
    weights = 4 * ASSUMED["parameters"]
    ready = []
    for train in range(cluster.trains):
        storage = ("buffer", train % cluster.buffers)
        built = cluster.work(storage, 0.0, share * row * cluster.costs.copy_byte_s)
        if direct:
            there = cluster.move(storage, ("train", train), built, share * row)
        else:
            there = cluster.move(storage, DRIVER, built, share * row)
            there = cluster.move(DRIVER, ("train", train), there, share * row)
        ready.append(there)
    learned = max(ready) + share * learn_row_s
    if cluster.trains > 1:
        where = "network" if cluster.nodes > 1 else "node"
        moved = 2 * (cluster.trains - 1) / cluster.trains * weights
        exchange = moved / ASSUMED["all_reduce_bytes_per_s"][where]
        hops = 2 * (cluster.trains - 1) * ASSUMED["all_reduce_call_s"][where]
        learned += ASSUMED["gradient_steps"] * (exchange + hops)
    published = learned + weights * cluster.costs.weights_byte_s
    return max(
        cluster.move(DRIVER, ("eval", node * cluster.evals // cluster.nodes), published, weights)
        if cluster.nodes > 1
        else published
        for node in range(cluster.nodes)
    )


def simulate(costs: Costs, layout: tuple[int, ...], *, direct: bool) -> dict[str, object]:
    """Return samples per second of both phases, and who works most while rolling out."""
    published_step = ENVS / PUBLISHED["1 process"][5]
    infer_s = ASSUMED["inference_share"] * published_step
    cluster = Cluster(costs, *layout)
    rollout = rollout_direct if direct else rollout_through_driver
    took = rollout(cluster, published_step - infer_s, infer_s)
    rows = cluster.envs * ENVS * STEPS
    learn_row_s = 1 / PUBLISHED["1 process"][6]
    update = training(Cluster(costs, *layout), learn_row_s, direct=direct)
    busiest = max(cluster.busy, key=cluster.busy.__getitem__)
    name = "wire" if busiest[0].startswith("wire") else busiest[0]
    return {
        "rollout": round(rows / took),
        "training": round(rows / update),
        "whole loop": round(rows / (took + update)),
        "efficiency": round(STEPS * published_step / took, 2),
        "busiest": f"{name} {cluster.busy[busiest] / took:.0%}",
    }


def layouts() -> dict[str, tuple[int, ...]]:
    """Return the published layouts, and one for each number of GPUs from 1 to 64."""
    named = {name: row[:5] for name, row in PUBLISHED.items() if name != "1 process"}
    for gpus in (1, 2, 4, 8, 16, 32, 64):  # half for rollouts, half for learning
        workers, nodes = max(1, gpus // 2), max(1, gpus // GPUS_PER_NODE)
        named[f"{gpus} GPUs"] = (nodes, workers, workers, workers, max(1, 2 * nodes))
    return named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer measurements; nothing kept")
    parser.add_argument("--no-ray", action="store_true", help="assume 0.8 ms for a Ray call")
    args = parser.parse_args()
    torch.set_num_threads(1)
    costs = calibrate(5 if args.quick else 25, with_ray=not args.no_ray)
    print("measured here:")
    print(f"  frame {1e6 * costs.frame_s:.0f} us, Ray call one way {1e6 * costs.call_s:.0f} us")
    for name in ("send", "receive", "copy", "weights"):
        print(f"  {name}: {1e-9 / getattr(costs, f'{name}_byte_s'):.2f} GB/s")
    columns = ("rollout", "training", "efficiency", "busiest")
    print(f"\nsamples/s{'published':>26}{'through the driver':>42}{'direct':>46}")
    print(
        f"{'env/eval/train/buffer':22}{'rollout':>9}{'training':>9}"
        + 2 * ("".join(f"{column:>11}" for column in columns) + "  ")
    )
    figures = {}
    for name, layout in layouts().items():
        planes = {
            plane: simulate(costs, layout, direct=plane == "direct")
            for plane in ("driver", "direct")
        }
        known = PUBLISHED.get(name, (None,) * 7)[5:]
        figures[name] = {"layout": layout, "published": known, **planes}
        line = f"{name:22}" + "".join(f"{number or '-':>9}" for number in known)
        for plane in planes.values():
            line += "".join(f"{plane[column]:>11}" for column in columns) + "  "
        print(line)
    saturated = {
        plane: [name for name, row in figures.items() if row[plane]["efficiency"] < SATURATED]
        for plane in ("driver", "direct")
    }
    for plane, names in saturated.items():
        print(f"{plane}: environments wait more than they step with {', '.join(names) or 'none'}")
    if args.quick:
        return
    path = write_result(
        "scale_sim",
        figures,
        [],  # it answers where a layout saturates, and has no goal
        unit="samples/s",
        measured={name: float(f"{value:.3g}") for name, value in vars(costs).items()},
        assumed=ASSUMED,
        saturated=saturated,
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
