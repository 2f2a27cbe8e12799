"""The facades against a bare echo of the same library and the same bytes.

One cycle is infer, action, feedback. Three programs do it, with server and client in two processes:

- ``bare`` sends the very frames that the facades send, and answers with the very action frame,
  without looking: same library, same number of messages, same bytes.
- ``hand`` turns arrays into bytes and back at both ends, with msgpack and numpy and not one check:
  dtypes and shapes are agreed beforehand. It is the least that a program in Python can do.
- ``ours`` are the facades: they encode, check, keep records and decode at both ends.

All take turns in small blocks, so that a busy machine hits them alike; the processor time of both
processes together says what a cycle costs on any machine.

Run it alone: ``python benchmarks/echo.py [--quick]``. With ``picows`` installed it is measured too.
"""

import argparse
import asyncio
import importlib.util
import multiprocessing
import os
import statistics
import time
from pathlib import Path

import msgpack
import numpy as np
from common import goal, write_result

from plugrl_protocol import (
    CLOSE_FINISHED,
    Action,
    Endpoint,
    EndpointConfig,
    EnvClient,
    Feedback,
    Infer,
    encode,
    make_observation,
)
from plugrl_protocol.links import ClientOptions, ServerOptions, choose

GOAL = 1.1
ACTION = np.zeros((4, 1, 7), np.float32)
MESSAGES = {"state only": 64, "two images": 4}


class Answer:
    """Answer at once, from the event loop."""

    def connected(self, connection):
        pass

    def infer(self, connection, request):
        connection.answer(ACTION)

    def feedback(self, connection, report):
        pass

    def disconnected(self, connection, close):
        pass


class Bare:
    """Answer every second message with the same bytes, without looking."""

    def __init__(self, reply):
        self.reply = reply
        self.turn = 0

    def __call__(self, frame):
        self.turn ^= 1
        return self.reply if self.turn else None


LAYOUT = {
    "base": ((1, 224, 224, 3), np.uint8), "wrist": ((1, 224, 224, 3), np.uint8),
    "pose": ((1, 17), np.float32), "text": ((1,), "<U1"), "env_indices": ((1,), np.int64),
    "step_ids": ((1,), np.int64), "rewards": ((1,), np.float32), "terminated": ((1,), np.bool_),
    "truncated": ((1,), np.bool_), "steps": ((1,), np.int64), "env_ids": ((1,), np.int64),
    "action": (ACTION.shape, ACTION.dtype),
}  # fmt: skip
PACK = msgpack.Packer(default=np.ndarray.tobytes).pack


def unpack(frame):
    """Lay the arrays of a message that was packed by hand on its bytes."""
    tree = msgpack.unpackb(frame)
    maps = [tree]
    while maps:
        level = maps.pop()
        for key, value in level.items():
            if type(value) is dict:
                maps.append(value)
            elif type(value) is bytes:
                shape, dtype = LAYOUT[key]
                level[key] = np.ndarray(shape, dtype, value)
    return tree


class Hand:
    """Answer every infer, by hand."""

    def __init__(self, _):
        pass

    def __call__(self, frame):
        message = unpack(frame)
        if message["message_type"] == "infer":
            return PACK(Action(env_ids=message["env_indices"], action=ACTION).to_wire())
        return None


async def listen_websockets(make_answer, greeting=None):
    """The same library, used directly."""
    from websockets.asyncio.server import serve

    async def handle(connection):
        answer = make_answer()
        if greeting is not None:
            await connection.send(greeting)
        async for frame in connection:
            reply = answer(frame)
            if reply is not None:
                await connection.send(reply)

    server = await serve(handle, "127.0.0.1", 0, compression=None, max_size=None)
    return server, server.sockets[0].getsockname()[1]


async def listen_picows(make_answer, greeting=None):
    import picows

    class Listener(picows.WSListener):
        def on_ws_connected(self, transport):
            self.answer = make_answer()
            if greeting is not None:
                transport.send(picows.WSMsgType.BINARY, greeting)

        def on_ws_frame(self, transport, frame):
            if frame.msg_type == picows.WSMsgType.CLOSE:
                transport.disconnect()
                return
            reply = self.answer(frame.get_payload_as_bytes())
            if reply is not None:
                transport.send(picows.WSMsgType.BINARY, reply)

    server = await picows.ws_create_server(
        lambda request: Listener(), "127.0.0.1", 0, max_frame_size=2**30
    )
    return server, server.sockets[0].getsockname()[1]


def bare_client(library, url):
    """Give send, receive and close of the same library, used directly.

    picows has no blocking client: our link is the bare one there, a loop in a thread and a queue.
    """
    if library == "websockets":
        from websockets.sync.client import connect

        connection = connect(url, compression=None, max_size=None).__enter__()
        return connection.send, connection.recv, connection.close
    link = choose(library).connect(ClientOptions(url=url))
    return link.send, lambda: link.receive(None), lambda: link.close(CLOSE_FINISHED)


def run_server(library, reply, pipe):
    async def main():
        config = EndpointConfig(library=library, listen=ServerOptions())
        listen = listen_websockets if library == "websockets" else listen_picows
        async with Endpoint(Answer(), config=config) as endpoint:
            bare, bare_port = await listen(lambda: Bare(reply))
            hand, hand_port = await listen(lambda: Hand(reply))
            pipe.send({"ours": endpoint.port, "bare": bare_port, "hand": hand_port})
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
            del bare, hand  # they listened until here

    asyncio.run(main())


def cpu_us(*pids):
    """Read the processor time that processes took so far, where Linux tells it exactly."""
    total_ns = 0
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            total_ns += int(task.read_text().split()[0])
    return total_ns / 1000


def messages(kind):
    """Make pairs as one client sends them: the env stays; pose, images, step id, reward change."""
    rng, observations, pairs = np.random.default_rng(0), [], []
    for _ in range(MESSAGES[kind]):
        images = None
        if kind == "two images":
            images = {
                name: rng.integers(0, 255, (1, 224, 224, 3)).astype(np.uint8)
                for name in ("base", "wrist")
            }
        pose = rng.normal(size=(1, 17)).astype("f4")
        observations.append(make_observation(num_envs=1, images=images, states={"pose": pose}))
    for number, seen in enumerate(observations):
        ids, step_ids = np.zeros(1, np.int64), np.full(1, number, np.int64)
        infer = Infer(env_indices=ids, step_ids=step_ids, observation=seen)
        feedback = Feedback(
            env_indices=ids, step_ids=step_ids, rewards=rng.normal(size=1).astype("f4"),
            observation=observations[(number + 1) % len(observations)],
            terminated=np.zeros(1, np.bool_), truncated=np.zeros(1, np.bool_),
            steps=np.full(1, 4),
        )  # fmt: skip
        pairs.append((infer, feedback))
    return pairs


def blocks(kind, library, *, rounds, size):
    """Alternate blocks; give cycle times and processor times, in microseconds."""
    pairs = messages(kind)
    frames = [(encode(infer.to_wire()), encode(report.to_wire())) for infer, report in pairs]
    reply = encode(
        {"message_type": "action", "data": {"env_ids": np.zeros(1, np.int64), "action": ACTION}}
    )
    ours_end, far_end = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(
        target=run_server, args=(library, reply, far_end), daemon=True
    )
    server.start()
    ports = ours_end.recv()
    client = EnvClient(f"ws://127.0.0.1:{ports['ours']}", reuse=False, library=library)
    client.connect()
    send, receive, hang_up = bare_client(library, f"ws://127.0.0.1:{ports['bare']}")
    send_by_hand, receive_by_hand, hang_up_by_hand = bare_client(
        library, f"ws://127.0.0.1:{ports['hand']}"
    )

    def ours(number):
        infer, report = pairs[number % len(pairs)]
        client.infer(infer)
        client.feedback(report)

    def hand(number):
        infer, report = pairs[number % len(pairs)]
        send_by_hand(PACK(infer.to_wire()))
        unpack(receive_by_hand())
        send_by_hand(PACK(report.to_wire()))

    def bare(number):
        infer, report = frames[number % len(frames)]
        send(infer)
        receive()
        send(report)

    cycles = {"ours": ours, "hand": hand, "bare": bare}
    times = {name: [] for name in cycles}
    cpu = {name: [] for name in cycles}
    for number in range(rounds + 2):
        for name, cycle in cycles.items():
            cpu_begin = cpu_us(os.getpid(), server.pid)
            for turn in range(number * size, (number + 1) * size):
                begin = time.perf_counter()
                cycle(turn)
                if number >= 2:
                    times[name].append((time.perf_counter() - begin) * 1e6)
            if number >= 2:
                cpu[name].append((cpu_us(os.getpid(), server.pid) - cpu_begin) / size)
    client.close()
    hang_up()
    hang_up_by_hand()
    ours_end.send("done")
    server.join(10)
    return times, cpu, sum(map(len, frames[0])) + len(reply)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds, size = (10, 20) if quick else (60, 50)
    libraries = ["websockets"]
    if importlib.util.find_spec("picows") is not None:
        libraries.append("picows")
    rows = []
    for library in libraries:
        for kind in ("state only", "two images"):
            times, cpu, size_bytes = blocks(kind, library, rounds=rounds, size=size)
            row = {"library": library, "message": kind, "bytes": size_bytes}
            for name in ("ours", "hand", "bare"):
                found = sorted(times[name])
                row[f"{name}_p50_us"] = round(statistics.median(found))
                row[f"{name}_p10_us"] = round(found[len(found) // 10])
                row[f"{name}_p99_us"] = round(found[int(0.99 * len(found))])
                row[f"{name}_cpu_us"] = round(statistics.median(cpu[name]))
            for what in ("p50", "p10", "cpu"):
                for name in ("ours", "hand"):
                    over = row[f"{name}_{what}_us"] / max(1, row[f"bare_{what}_us"])
                    row[f"{name}_over_bare_{what}"] = round(over, 3)
            rows.append(row)
    shown = ["library", "message", "bytes"]
    shown += [f"{name}_{what}_us" for what in ("p50", "cpu") for name in ("ours", "hand", "bare")]
    shown += [
        f"{name}_over_bare_{what}" for what in ("p50", "p10", "cpu") for name in ("ours", "hand")
    ]
    print(" | ".join(f"{name:>11}" for name in shown))
    for row in rows:
        print(" | ".join(f"{row[name]!s:>{max(11, len(name))}}" for name in shown))
    goals = [
        goal(
            f"{row['library']}, {row['message']}: median cycle, times a bare echo",
            row["ours_over_bare_p50"],
            at_most=GOAL,
        )
        for row in rows
    ]
    if not quick:
        write_result("echo", rows, goals, load=round(os.getloadavg()[0], 1))


if __name__ == "__main__":
    main()
