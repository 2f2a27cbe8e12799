"""The wire's codec against plain msgpack: microseconds per message, both ways.

Two baselines, same machine, same run. ``msgpack, raw bytes`` packs and unpacks the message with
each array as its bytes, and leaves them bytes: nobody can compute with the result. ``by hand`` is
what that becomes usable with: ``tobytes`` and ``packb``, ``unpackb`` and ``frombuffer``.

Run it alone: ``python benchmarks/codec.py [--quick]``.
"""

import argparse
import os
import time

import msgpack
import numpy as np
from common import write_result

from plugrl_protocol import Decoder, Encoder, Infer, make_observation

GOAL = 1.3


def message(kind):
    images = None
    if kind == "two images":
        rng = np.random.default_rng(0)
        images = {
            name: rng.integers(0, 255, (1, 224, 224, 3)).astype(np.uint8)
            for name in ("base", "wrist")
        }
    seen = make_observation(num_envs=1, images=images, states={"pose": np.ones((1, 17), "f4")})
    ids = np.zeros(1, np.int64)
    return Infer(env_indices=ids, step_ids=ids, observation=seen).to_wire()


def swap(tree, make):
    if isinstance(tree, dict):
        return {key: swap(value, make) for key, value in tree.items()}
    return make(tree) if isinstance(tree, np.ndarray) else tree


def usable(tree, like):
    if isinstance(tree, dict):
        return {key: usable(value, like[key]) for key, value in tree.items()}
    if isinstance(like, np.ndarray):
        return np.frombuffer(tree, like.dtype).reshape(like.shape)
    return tree


def best_us(functions, *, repeats, seconds):
    """Time functions in turn, so that a busy moment hits all; give each one's best."""
    numbers = []
    for function in functions:
        begin = time.perf_counter()
        count = 0
        while time.perf_counter() - begin < seconds:
            function()
            count += 1
        numbers.append(max(1, count))
    best = [float("inf")] * len(functions)
    for _ in range(repeats):
        for index, (function, number) in enumerate(zip(functions, numbers, strict=True)):
            begin = time.perf_counter()
            for _ in range(number):
                function()
            best[index] = min(best[index], (time.perf_counter() - begin) / number * 1e6)
    return best


def measure(kind, *, repeats, seconds):
    tree = message(kind)
    encoder, decoder, packer = Encoder(), Decoder(), msgpack.Packer()
    frame = encoder.encode(tree)
    raw_tree = swap(tree, np.ndarray.tobytes)
    raw_frame = packer.pack(raw_tree)
    unpack = msgpack.unpackb
    found = decoder.decode(frame)
    pose = found["data"]["states"]["pose"]
    zero_copy = np.shares_memory(pose, np.frombuffer(frame, np.uint8))
    times = best_us(
        [
            lambda: encoder.encode(tree),
            lambda: packer.pack(raw_tree),
            lambda: packer.pack(swap(tree, np.ndarray.tobytes)),
            lambda: decoder.decode(frame),
            lambda: unpack(raw_frame),
            lambda: usable(unpack(raw_frame), tree),
        ],
        repeats=repeats,
        seconds=seconds,
    )
    rows = []
    for way, (ours, raw, hand) in (("encode", times[:3]), ("decode", times[3:])):
        rows.append(
            {
                "message": kind,
                "bytes": len(frame),
                "way": way,
                "ours_us": round(ours, 2),
                "raw_us": round(raw, 2),
                "by_hand_us": round(hand, 2),
                "over_raw": round(ours / raw, 2),
                "over_by_hand": round(ours / hand, 2),
                "zero_copy": bool(zero_copy),
            }
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    repeats, seconds = (5, 0.02) if quick else (25, 0.05)
    rows = [row for kind in ("state only", "two images") for row in
            measure(kind, repeats=repeats, seconds=seconds)]  # fmt: skip
    head = list(rows[0])
    print(" | ".join(f"{name:>12}" for name in head))
    for row in rows:
        print(" | ".join(f"{row[name]!s:>12}" for name in head))
    images = [row for row in rows if row["message"] == "two images"]
    goals = {
        "two images within 1.3x of msgpack with raw bytes": max(r["over_raw"] for r in images),
        "state only within 1.3x of the same by hand": max(
            r["over_by_hand"] for r in rows if r["message"] == "state only"
        ),
        "state only within 1.3x of msgpack with raw bytes": max(
            r["over_raw"] for r in rows if r["message"] == "state only"
        ),
    }
    judged = [
        {"goal": name, "found": value, "limit": GOAL, "holds": value <= GOAL}
        for name, value in goals.items()
    ]
    for goal in judged:
        print(f"{'holds' if goal['holds'] else 'FAILS'}: {goal['goal']}: {goal['found']}")
    if not quick:
        write_result("codec", rows, goals=judged, load=round(os.getloadavg()[0], 1))


if __name__ == "__main__":
    main()
