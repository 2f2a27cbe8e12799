"""The facades against a bare echo of the same library and the same bytes.

One cycle is infer, action, feedback. The bare side sends the very frames that the facades send and
answers with the very action frame, without looking: same library, same number of messages, same
bytes. Ours encodes, checks, keeps records and decodes at both ends. Server and client are two
processes. Both sides take turns in small blocks, so that a busy machine hits both alike; the
processor time of both processes together says what a cycle costs on any machine.

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

import numpy as np
from common import write_result

from plugrl_protocol import (
    CLOSE_FINISHED,
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


def bare_websockets(reply):
    """The same library, used directly."""
    from websockets.asyncio.server import serve

    async def handle(connection):
        async for _ in connection:
            await connection.send(reply)
            await connection.recv()

    async def listen():
        server = await serve(handle, "127.0.0.1", 0, compression=None, max_size=None)
        return server, server.sockets[0].getsockname()[1]

    return listen


def bare_picows(reply):
    import picows

    class Listener(picows.WSListener):
        def on_ws_connected(self, transport):
            self.turn = 0

        def on_ws_frame(self, transport, frame):
            if frame.msg_type == picows.WSMsgType.CLOSE:
                transport.disconnect()
                return
            frame.get_payload_as_bytes()
            self.turn ^= 1
            if self.turn:
                transport.send(picows.WSMsgType.BINARY, reply)

    async def listen():
        server = await picows.ws_create_server(
            lambda request: Listener(), "127.0.0.1", 0, max_frame_size=2**30
        )
        return server, server.sockets[0].getsockname()[1]

    return listen


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
        bare = bare_websockets if library == "websockets" else bare_picows
        async with Endpoint(Answer(), config=config) as endpoint:
            _server, port = await bare(reply)()
            pipe.send((endpoint.port, port))
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)

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
    rng, pairs = np.random.default_rng(0), []
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
        ids, step_ids = np.zeros(1, np.int64), np.full(1, number, np.int64)
        infer = Infer(env_indices=ids, step_ids=step_ids, observation=seen)
        feedback = Feedback(
            env_indices=ids, step_ids=step_ids, observation=seen,
            rewards=rng.normal(size=1).astype("f4"), terminated=np.zeros(1, np.bool_),
            truncated=np.zeros(1, np.bool_), steps=np.full(1, 4),
        )  # fmt: skip
        pairs.append((infer, feedback))
    return pairs


def blocks(kind, library, *, rounds, size):
    """Alternate blocks of ours and bare; give cycle times and processor times, in microseconds."""
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
    port, bare_port = ours_end.recv()
    client = EnvClient(f"ws://127.0.0.1:{port}", reuse=False, library=library)
    client.connect()
    send, receive, hang_up = bare_client(library, f"ws://127.0.0.1:{bare_port}")

    def ours(number):
        infer, report = pairs[number % len(pairs)]
        client.infer(infer)
        client.feedback(report)

    def bare(number):
        infer, report = frames[number % len(frames)]
        send(infer)
        receive()
        send(report)

    times = {"ours": [], "bare": []}
    cpu = {"ours": [], "bare": []}
    for number in range(rounds + 2):
        for name, cycle in (("ours", ours), ("bare", bare)):
            cpu_begin = cpu_us(os.getpid(), server.pid)
            for turn in range(size):
                begin = time.perf_counter()
                cycle(turn)
                if number >= 2:
                    times[name].append((time.perf_counter() - begin) * 1e6)
            if number >= 2:
                cpu[name].append((cpu_us(os.getpid(), server.pid) - cpu_begin) / size)
    client.close()
    hang_up()
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
            ours, bare = sorted(times["ours"]), sorted(times["bare"])
            rows.append(
                {
                    "library": library,
                    "message": kind,
                    "bytes": size_bytes,
                    "ours_p50_us": round(statistics.median(ours)),
                    "bare_p50_us": round(statistics.median(bare)),
                    "ours_p10_us": round(ours[len(ours) // 10]),
                    "bare_p10_us": round(bare[len(bare) // 10]),
                    "ours_p99_us": round(ours[int(0.99 * len(ours))]),
                    "bare_p99_us": round(bare[int(0.99 * len(bare))]),
                    "ours_cpu_us": round(statistics.median(cpu["ours"])),
                    "bare_cpu_us": round(statistics.median(cpu["bare"])),
                    "cycles_per_s": round(1e6 / statistics.median(ours)),
                    "ratio_cpu": round(
                        statistics.median(cpu["ours"]) / max(1.0, statistics.median(cpu["bare"])), 3
                    ),
                    "ratio_p10": round(ours[len(ours) // 10] / bare[len(bare) // 10], 3),
                    "ratio_p50": round(statistics.median(ours) / statistics.median(bare), 3),
                }
            )
    head = list(rows[0])
    print(" | ".join(f"{name:>12}" for name in head))
    for row in rows:
        print(" | ".join(f"{row[name]!s:>12}" for name in head))
    goals = [
        {
            "goal": f"{row['library']}, {row['message']}: p50 within 1.1x of a bare echo",
            "found": row["ratio_p50"],
            "limit": GOAL,
            "holds": row["ratio_p50"] <= GOAL,
        }
        for row in rows
    ]
    for goal in goals:
        print(f"{'holds' if goal['holds'] else 'FAILS'}: {goal['goal']}: {goal['found']}")
    if not quick:
        write_result("echo", rows, goals=goals, load=round(os.getloadavg()[0], 1))


if __name__ == "__main__":
    main()
