"""How long do weights take from the learner to a network in another process?

    python benchmarks/weight_sync.py [--quick] [--rounds 15]

1, 10 and 100 million float32 parameters in eight tensors each; --quick stops at 10 million. One
round: publish, tell the other process, load into its network, hear that it is done. The ways take
turns within a round, the first rounds only touch the memory, and medians are compared:

* `Shared`: `CPUWeightBuffer`, from the learner's tensors to the network's.
* `Ray, packed`: `pack`, `ray.put`, and `unpack` in an actor, from tensors to tensors: what carries
  weights to other machines.
* raw shared memory, `ray.put`/`ray.get` and a gloo broadcast of ONE contiguous array, copied out at
  the other end: the transports, without anything on top.
* memcpy twice inside this process: what any copy in and copy out takes.

Goal: `Shared` within 1.5x of the best transport at each size. In this process, `WeightBuffer`
(strategy Double) is set against memcpy.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from multiprocessing import shared_memory

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import ray
import torch
import torch.distributed as dist
from common import goal, write_result
from torch import nn

from rlightning.runtime import process_group
from rlightning.weights import CPUWeightBuffer, WeightBuffer, pack, unpack

SIZES = {"1M": 1_000_000, "10M": 10_000_000, "100M": 100_000_000}
TENSORS = 8
WARM_UP = 3
GOAL = 1.5
TRANSPORTS = ("raw shared memory", "ray.put + ray.get", "gloo broadcast")


def network(parameters: int) -> nn.Module:
    """Return a module with that many parameters in `TENSORS` tensors."""
    module = nn.Module()
    for index in range(TENSORS):
        shape = (100, parameters // TENSORS // 100)
        module.register_parameter(f"w{index}", nn.Parameter(torch.zeros(shape)))
    return module


def exported(module: nn.Module) -> dict:
    """Return what a policy's `export_weights` returns for it."""
    return {"weights": {"net": module.state_dict()}, "extra": {}}


class Receiver:
    """The other process's side of every way."""

    def __init__(self, parameters: int, shared: CPUWeightBuffer, raw: str) -> None:
        torch.set_num_threads(1)
        self.module = network(parameters)
        self.shared = shared
        self.raw_memory = shared_memory.SharedMemory(raw)
        self.raw = np.frombuffer(self.raw_memory.buf, np.float32, parameters)
        self.flat = np.zeros(parameters, np.float32)

    def load_shared(self) -> float:
        with self.shared.read() as (_, payload):
            self.module.load_state_dict(payload["weights"]["net"])
        return float(self.module.w7.detach()[0, 0])

    def load_raw(self) -> float:
        np.copyto(self.flat, self.raw)
        return float(self.flat[-1])

    def load_gloo(self) -> float:
        dist.broadcast(torch.from_numpy(self.flat), src=0)
        return float(self.flat[-1])


def serve(pipe, parameters, shared, raw, address) -> None:
    """Do what the learner asks for, until it asks for nothing."""
    receiver = Receiver(parameters, shared, raw)
    process_group.init(1, 2, address, timeout_s=120)
    pipe.send("ready")
    while (method := pipe.recv()) is not None:
        pipe.send(getattr(receiver, method)())
    process_group.destroy()
    receiver.raw = None
    receiver.raw_memory.close()


@ray.remote(num_cpus=0)
class RayReceiver:
    def __init__(self, parameters: int) -> None:
        torch.set_num_threads(1)
        self.module = network(parameters)
        self.flat = np.zeros(parameters, np.float32)

    def load(self, array: np.ndarray) -> float:
        np.copyto(self.flat, array)
        return float(self.flat[-1])

    def load_packed(self, packed) -> float:
        self.module.load_state_dict(unpack(packed)["weights"]["net"])
        return float(self.module.w7.detach()[0, 0])


class Learner:
    """This process's side of every way; each returns what the other process then holds."""

    def __init__(self, parameters: int, pipe, actor, shared, raw) -> None:
        self.pipe, self.actor, self.shared = pipe, actor, shared
        self.raw = np.frombuffer(raw.buf, np.float32, parameters)
        self.module = network(parameters)
        self.flat = np.zeros(parameters, np.float32)
        self.copies = [np.zeros(parameters, np.float32) for _ in range(2)]
        self.packed = None
        self.local = WeightBuffer()
        self.other = network(parameters)
        self.version = -1

    def prepare(self, value: float) -> None:
        """Let the learner hold `value` everywhere; not timed."""
        self.version += 1
        self.flat.fill(value)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.fill_(value)

    def _ask(self, method: str) -> float:
        self.pipe.send(method)
        return self.pipe.recv()

    def shared_buffer(self) -> float:
        self.shared.publish(self.version, exported(self.module))
        return self._ask("load_shared")

    def raw_memory(self) -> float:
        np.copyto(self.raw, self.flat)
        return self._ask("load_raw")

    def gloo(self) -> float:
        self.pipe.send("load_gloo")
        dist.broadcast(torch.from_numpy(self.flat), src=0)
        return self.pipe.recv()

    def ray_array(self) -> float:
        return ray.get(self.actor.load.remote(ray.put(self.flat)))

    def ray_packed(self) -> float:
        self.packed = pack(exported(self.module), into=self.packed)
        return ray.get(self.actor.load_packed.remote(ray.put(self.packed)))

    def memcpy(self) -> float:
        np.copyto(self.copies[0], self.flat)
        np.copyto(self.copies[1], self.copies[0])
        return float(self.copies[1][-1])

    def double(self) -> float:
        self.local.publish(self.version, exported(self.module))
        with self.local.read() as (_, payload):
            self.other.load_state_dict(payload["weights"]["net"])
        return float(self.other.w7.detach()[0, 0])

    def ways(self) -> dict:
        return {
            "Shared": self.shared_buffer,
            "Ray, packed": self.ray_packed,
            "raw shared memory": self.raw_memory,
            "ray.put + ray.get": self.ray_array,
            "gloo broadcast": self.gloo,
            "memcpy twice": self.memcpy,
            "Double, in process": self.double,
        }


def measure(parameters: int, rounds: int) -> dict[str, list[float]]:
    """Return the milliseconds of each way in each round."""
    shared = CPUWeightBuffer()
    raw = shared_memory.SharedMemory(create=True, size=4 * parameters)
    address = process_group.free_address()
    context = multiprocessing.get_context("spawn")
    pipe, far_end = context.Pipe()
    process = context.Process(
        target=serve, args=(far_end, parameters, shared, raw.name, address), daemon=True
    )
    process.start()
    process_group.init(0, 2, address, timeout_s=120)
    assert pipe.recv() == "ready"
    learner = Learner(parameters, pipe, RayReceiver.remote(parameters), shared, raw)
    times: dict[str, list[float]] = {name: [] for name in learner.ways()}
    for round_ in range(WARM_UP + rounds):
        value = float(round_ + 1)
        learner.prepare(value)
        ways = list(learner.ways().items())
        first = round_ % len(ways)  # whoever comes first finds caches and processors elsewhere
        for name, way in ways[first:] + ways[:first]:
            started = time.perf_counter()
            arrived = way()
            took = time.perf_counter() - started
            assert arrived == value, f"{name} delivered {arrived}, not {value}"
            if round_ >= WARM_UP:
                times[name].append(1000 * took)
    pipe.send(None)
    process.join(60)
    process_group.destroy()
    ray.kill(learner.actor)
    learner.raw = None
    raw.close()
    raw.unlink()
    shared.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes = dict(list(SIZES.items())[:2]) if args.quick else SIZES
    rounds = args.rounds or (7 if args.quick else 15)
    ray.init(
        num_cpus=2,
        object_store_memory=max(500_000_000, 12 * max(sizes.values())),
        include_dashboard=False,
        logging_level="ERROR",
    )
    try:
        times = {name: measure(parameters, rounds) for name, parameters in sizes.items()}
    finally:
        ray.shutdown()
    report(times, rounds, keep=not args.quick)


def judge(ratios: dict[str, dict]) -> list[dict]:
    """Compare the medians with the goal."""
    return [
        goal(
            f"{size} parameters: publish and load, times the best transport",
            each["p50"]["Shared / best"],
            at_most=GOAL,
        )
        for size, each in ratios.items()
    ]


def report(times: dict[str, dict[str, list[float]]], rounds: int, *, keep: bool) -> None:
    """Print and keep medians, and the fastest round of each, which a busy machine disturbs less."""
    figures = {
        label: {
            size: {way: round(summary(values), 3) for way, values in column.items()}
            for size, column in times.items()
        }
        for label, summary in (("p50 ms", statistics.median), ("fastest ms", min))
    }
    ratios: dict[str, dict[str, object]] = {}
    for label, columns in figures.items():
        print(f"{label:24}" + "".join(f"{size:>10}" for size in columns))
        for way in next(iter(columns.values())):
            print(f"{way:24}" + "".join(f"{column[way]:10.2f}" for column in columns.values()))
        for size, column in columns.items():
            best = min(TRANSPORTS, key=column.__getitem__)
            ratio = round(column["Shared"] / column[best], 2)
            local = round(column["Double, in process"] / column["memcpy twice"], 2)
            ratios.setdefault(size, {})[label.removesuffix(" ms")] = {
                "best transport": best,
                "Shared / best": ratio,
                "Double / memcpy": local,
            }
            print(f"{size}: Shared takes {ratio}x of {best}, Double {local}x of memcpy")
    if keep:
        path = write_result("weight_sync", figures, judge(ratios), ratios=ratios, rounds=rounds)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
