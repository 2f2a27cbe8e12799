"""The wire's codec against plain msgpack: microseconds per message, both ways.

Two baselines, same machine, same run, over the same messages, which differ in their data:

- ``raw``: msgpack packs and unpacks the message with bytes in the place of each array. The bytes
  are there already and stay bytes: no array is read, none is made, nothing is checked.
- ``by hand``: the least that makes ``raw`` usable, written for this one message: ``tobytes`` of
  each array and ``packb``; ``unpackb`` and a view of each array (no copy), without any check.

Each function takes turns in short slices, and its best slice counts: a busy machine hits all alike.
Run it alone: ``python benchmarks/codec.py [--quick]``.
"""

import argparse
import os
import time

import msgpack
import numpy as np
from common import goal, write_result

from plugrl_protocol import Decoder, Encoder, Infer, make_observation

GOAL = 1.3
MESSAGES = {"state only": 64, "two images": 4}


def trees(kind):
    """Make messages as one client sends them: the env stays, the pose and the step id change."""
    rng = np.random.default_rng(0)
    made = []
    for number in range(MESSAGES[kind]):
        images = None
        if kind == "two images":
            images = {
                name: rng.integers(0, 255, (1, 224, 224, 3)).astype(np.uint8)
                for name in ("base", "wrist")
            }
        seen = make_observation(
            num_envs=1, images=images, states={"pose": rng.normal(size=(1, 17)).astype("f4")}
        )
        ids, steps = np.zeros(1, np.int64), np.full(1, number, np.int64)
        made.append(Infer(env_indices=ids, step_ids=steps, observation=seen).to_wire())
    return made


def pack_by_hand(pack, tree):
    seen = tree["data"]
    return pack(
        {
            "message_type": tree["message_type"],
            "data": {
                "images": {name: image.tobytes() for name, image in seen["images"].items()},
                "states": {"pose": seen["states"]["pose"].tobytes()},
                "text": seen["text"].tobytes(),
            },
            "env_indices": tree["env_indices"].tobytes(),
            "step_ids": tree["step_ids"].tobytes(),
        }
    )


def unpack_by_hand(unpack, frame):
    tree = unpack(frame)
    seen, view = tree["data"], np.ndarray
    images, states = seen["images"], seen["states"]
    for name, data in images.items():
        images[name] = view((1, 224, 224, 3), np.uint8, data)
    states["pose"] = view((1, 17), np.float32, states["pose"])
    seen["text"] = view((1,), "<U1", seen["text"])
    tree["env_indices"] = view((1,), np.int64, tree["env_indices"])
    tree["step_ids"] = view((1,), np.int64, tree["step_ids"])
    return tree


def best_us(functions, *, repeats):
    """Time functions on lists of arguments, in turn; give the best of each, in us per call."""
    best = [float("inf")] * len(functions)
    for _ in range(repeats):
        for index, (function, arguments) in enumerate(functions):
            begin = time.perf_counter()
            for argument in arguments:
                function(argument)
            took = (time.perf_counter() - begin) / len(arguments) * 1e6
            best[index] = min(best[index], took)
    return best


def measure(kind, *, repeats):
    messages = trees(kind)
    encoder, decoder, packer, unpack = Encoder(), Decoder(), msgpack.Packer(), msgpack.unpackb
    frames = [encoder.encode(tree) for tree in messages]
    raw_frames = [pack_by_hand(packer.pack, tree) for tree in messages]
    raw_trees = [unpack(frame) for frame in raw_frames]
    for frame in frames:
        found = decoder.decode(frame)
    pose = found["data"]["states"]["pose"]
    zero_copy = bool(np.shares_memory(pose, np.frombuffer(frames[-1], np.uint8)))
    times = best_us(
        [
            (encoder.encode, messages),
            (packer.pack, raw_trees),
            (lambda tree: pack_by_hand(packer.pack, tree), messages),
            (decoder.decode, frames),
            (unpack, raw_frames),
            (lambda frame: unpack_by_hand(unpack, frame), raw_frames),
        ],
        repeats=repeats,
    )
    return [
        {
            "message": kind,
            "bytes": len(frames[0]),
            "way": way,
            "ours_us": round(ours, 2),
            "raw_us": round(raw, 2),
            "by_hand_us": round(hand, 2),
            "over_raw": round(ours / raw, 2),
            "over_by_hand": round(ours / hand, 2),
            "zero_copy": zero_copy,
        }
        for way, (ours, raw, hand) in (("encode", times[:3]), ("decode", times[3:]))
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rows = [row for kind in ("state only", "two images") for row in
            measure(kind, repeats=100 if quick else 1000)]  # fmt: skip
    head = list(rows[0])
    print(" | ".join(f"{name:>12}" for name in head))
    for row in rows:
        print(" | ".join(f"{row[name]!s:>12}" for name in head))
    judged = []
    for kind in ("two images", "state only"):
        of_kind = [row for row in rows if row["message"] == kind]
        for name, column in (("raw bytes", "over_raw"), ("raw bytes, by hand", "over_by_hand")):
            found = max(row[column] for row in of_kind)
            judged.append(goal(f"{kind}: times msgpack with {name}", found, at_most=GOAL))
    if not quick:
        write_result("codec", rows, judged, load=round(os.getloadavg()[0], 1))


if __name__ == "__main__":
    main()
