"""Weights in shared memory: whole for every process, whoever is slow, ends or is killed."""

import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from rlightning.errors import ContractError
from rlightning.weights import CPUWeightBuffer, ShardedWeightBuffer

SHM = pathlib.Path("/dev/shm")


def weights(value, tensors=4, size=1000):
    return {
        "weights": {"net": {f"p{i}": torch.full((size,), float(value)) for i in range(tensors)}},
        "extra": {"count": torch.tensor(value)},
    }


def value_of(payload):
    """The one value that all numbers of a set have; -1 where they differ."""
    values = {float(t[0]) for t in payload["weights"]["net"].values()}
    values |= {float(t.min()) for t in payload["weights"]["net"].values()}
    values |= {float(t.max()) for t in payload["weights"]["net"].values()}
    values.add(float(payload["extra"]["count"]))
    return values.pop() if len(values) == 1 else -1


def pieces(buffer):
    parts = getattr(buffer, "parts", [buffer])
    return sorted(path.name for part in parts for path in SHM.glob(f"{part.name}-*"))


@pytest.fixture(params=["Shared", "Sharded"])
def buffer(request):
    made = CPUWeightBuffer() if request.param == "Shared" else ShardedWeightBuffer(3)
    yield made
    made.close()
    assert pieces(made) == []


def attached(buffer):
    return pickle.loads(pickle.dumps(buffer))


def test_a_version_is_read_where_it_was_published_and_through_an_attached_buffer(buffer):
    reader = attached(buffer)
    assert reader.version == buffer.version == -1
    for version in (0, 1, 5):
        buffer.publish(version, weights(version))
        for each in (buffer, reader):
            assert each.version == version
            with each.read() as (seen, payload):
                assert (seen, value_of(payload)) == (version, version)
            assert value_of(each.get()[1]) == version
    assert reader.staleness(2) == 3


def test_what_was_gotten_stays_and_what_was_lent_is_in_shared_memory(buffer):
    buffer.publish(0, weights(0))
    _, kept = buffer.get()
    for version in (1, 2, 3):
        buffer.publish(version, weights(version))
    assert value_of(kept) == 0


@pytest.mark.parametrize("how", ["get", "read"])
def test_nothing_is_readable_before_the_first_version(buffer, how):
    with pytest.raises(RuntimeError, match="call publish first"):
        attached(buffer).get() if how == "get" else attached(buffer).read().__enter__()


def test_versions_only_grow(buffer):
    buffer.publish(2, weights(2))
    for version in (2, 1):
        with pytest.raises(ValueError, match=f"version {version} was published after version 2"):
            buffer.publish(version, weights(9))
    assert value_of(buffer.get()[1]) == 2


def test_larger_sets_get_larger_memory_and_the_smaller_goes(buffer):
    reader = attached(buffer)
    buffer.publish(0, weights(0))
    before = pieces(buffer)
    assert value_of(reader.get()[1]) == 0
    buffer.publish(1, weights(1, tensors=50, size=5000))
    after = pieces(buffer)
    assert len(after) == len(before)
    assert set(after) & set(before) == {name for name in before if name.endswith("header")}
    assert value_of(reader.get()[1]) == 1
    assert len(reader.get()[1]["weights"]["net"]) == 50
    buffer.publish(2, weights(2))
    assert pieces(buffer) == after
    assert value_of(reader.get()[1]) == 2


def test_plain_values_may_change_with_every_version(buffer):
    reader = attached(buffer)
    for version in range(4):
        buffer.publish(version, {"w": torch.ones(2), "note": "x" * version, "n": [version]})
        payload = reader.get()[1]
        assert (payload["note"], payload["n"]) == ("x" * version, [version])


def test_what_other_processes_cannot_understand_is_refused_and_the_old_version_stays(buffer):
    buffer.publish(0, weights(0))
    with pytest.raises(ContractError, match="between processes they are"):
        buffer.publish(1, {"w": object()})
    assert value_of(buffer.get()[1]) == 0
    buffer.publish(2, weights(2))
    assert value_of(buffer.get()[1]) == 2


def test_waiting_ends_with_the_version_or_the_deadline(buffer):
    reader = attached(buffer)
    assert not reader.wait_for(0, timeout_s=0.01)
    done = []
    thread = threading.Thread(target=lambda: done.append(reader.wait_for(1, timeout_s=30)))
    thread.start()
    buffer.publish(0, weights(0))
    buffer.publish(1, weights(1))
    thread.join(30)
    assert done == [True]


def test_a_publisher_waits_for_readers_of_the_memory_it_needs_and_says_if_in_vain():
    buffer = CPUWeightBuffer(timeout_s=0.05)
    reader = attached(buffer)
    buffer.publish(0, weights(0))
    with reader.read() as (version, payload):
        buffer.publish(1, weights(1))
        with pytest.raises(TimeoutError, match="a reader has held the weights before version 1"):
            buffer.publish(2, weights(2))
        assert (version, value_of(payload)) == (0, 0)
        assert value_of(reader.get()[1]) == 1
    buffer.publish(2, weights(2))
    assert value_of(reader.get()[1]) == 2
    buffer.close()


def test_a_closed_buffer_is_gone_for_everybody(buffer):
    reader = attached(buffer)
    buffer.publish(0, weights(0))
    assert value_of(reader.get()[1]) == 0
    buffer.close()
    buffer.close()
    with pytest.raises(RuntimeError, match="are gone: their publisher has ended"):
        reader.get()
    with pytest.raises(RuntimeError, match="are gone: their publisher has ended"):
        attached(buffer)


def test_a_buffer_that_is_forgotten_leaves_nothing_behind():
    buffer = CPUWeightBuffer()
    buffer.publish(0, weights(0))
    name = buffer.name
    assert list(SHM.glob(f"{name}-*"))
    del buffer
    assert list(SHM.glob(f"{name}-*")) == []


def test_weights_that_do_not_fit_are_refused_with_the_room_there_is(monkeypatch):
    from rlightning.weights import shared_memory

    class Full:
        f_bavail, f_frsize = 1, 4096

    buffer = CPUWeightBuffer()
    monkeypatch.setattr(shared_memory.os, "statvfs", lambda _: Full)
    with pytest.raises(OSError, match=r"MB of weights do not fit into the 0 MB that /dev/shm has"):
        buffer.publish(0, weights(0))
    monkeypatch.setattr(shared_memory, "_FOLDER", pathlib.Path("/nowhere"))
    with pytest.raises(OSError, match="on Linux"):
        CPUWeightBuffer()
    monkeypatch.undo()
    buffer.publish(0, weights(0))
    buffer.close()


def test_what_a_dead_process_left_is_swept_away_and_the_living_keep_theirs(monkeypatch):
    from rlightning.weights import shared_memory

    monkeypatch.setattr(shared_memory, "_MINUTE", 0.0)
    monkeypatch.setattr(shared_memory, "PREFIX", f"rlightning-w-test{os.getpid()}-")
    living = CPUWeightBuffer()
    living.publish(0, weights(0))
    left = [SHM / f"{shared_memory.PREFIX}gone-{part}" for part in ("header", "2", "3")]
    left += [SHM / f"{shared_memory.PREFIX}headless-{part}" for part in ("2", "3")]
    for path in left:
        path.write_bytes(b"0" * 64)
    another = CPUWeightBuffer()
    assert not any(path.exists() for path in left)
    assert value_of(living.get()[1]) == 0
    living.close()
    another.close()


def test_eight_threads_never_see_half_of_a_version(buffer):
    buffer.publish(0, weights(0))
    stop, torn, reads = threading.Event(), [], [0] * 8

    def read(index):
        reader, last = attached(buffer) if index % 2 else buffer, 0
        while not stop.is_set():
            with reader.read() as (version, payload):
                if value_of(payload) != version or version < last:
                    torn.append(version)
            last = version
            reads[index] += 1

    threads = [threading.Thread(target=read, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    deadline, version = time.monotonic() + 30, 0
    while time.monotonic() < deadline and (version < 20 or min(reads) < 5):
        version += 1
        buffer.publish(version, weights(version))
    stop.set()
    for thread in threads:
        thread.join(10)
    assert torn == []
    assert version >= 20
    assert min(reads) >= 5


PROCESSES = """
import glob, os, signal, sys, time
import torch
from rlightning.weights import CPUWeightBuffer, ShardedWeightBuffer
from rlightning.weights import cpu_weight_buffer

torch.set_num_threads(1)

def weights(value):
    return {f"p{i}": torch.full((20_000,), float(value)) for i in range(8)} | {"n": value}

def whole(version, payload):
    tensors = [payload[f"p{i}"] for i in range(8)]
    seen = {float(t.min()) for t in tensors} | {float(t.max()) for t in tensors}
    return seen == {float(version)} and payload["n"] == version

def fork(function):
    child = os.fork()
    if child:
        return child
    try:
        code = function()
    except BaseException:
        import traceback
        traceback.print_exc()
        code = 70
    os._exit(code or 0)

def ended(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def stress(kind):
    buffer = CPUWeightBuffer() if kind == "Shared" else ShardedWeightBuffer(2)
    handle = buffer.__reduce__()
    last_version = 60

    def read():
        reader, last, reads = handle[0](*handle[1]), -1, 0
        assert reader.wait_for(0, 60)
        while last < last_version:
            with reader.read() as (version, payload):
                if not whole(version, payload) or version < last:
                    return 3
            last = version
            reads += 1
        return 0 if reads >= 5 else 4

    def write(shard):
        writer = handle[0](*handle[1])
        for version in range(last_version + 1):
            if shard is None:
                writer.publish(version, weights(version))
            else:
                writer.publish_shard(version, shard, weights(version))
            time.sleep(0.002)  # lets readers of a busy machine see some of them
        assert readers_done.wait()

    import multiprocessing
    readers_done = multiprocessing.get_context("fork").Event()
    shards = [None] if kind == "Shared" else [0, 1]
    writers = [fork(lambda shard=shard: write(shard)) for shard in shards]
    readers = [fork(read) for _ in range(8)]
    codes = [ended(child) for child in readers]
    readers_done.set()
    codes += [ended(child) for child in writers]
    assert codes == [0] * len(codes), codes
    buffer.close()

def killed_while_it_wrote():
    buffer = CPUWeightBuffer(timeout_s=5)
    buffer.publish(0, weights(0))
    buffer.publish(1, weights(1))

    def write():
        def half(views, tensors):
            for view in views[:4]:
                view.fill_(99)
            os.kill(os.getpid(), signal.SIGKILL)
        cpu_weight_buffer.copy_into = half
        CPUWeightBuffer.attach(buffer.name).publish(2, weights(2))

    assert ended(fork(write)) == -signal.SIGKILL
    for _ in range(3):
        version, payload = buffer.get()
        assert version == 1 and whole(1, payload)
    heir = CPUWeightBuffer.attach(buffer.name)
    heir.publish(2, weights(2))
    version, payload = buffer.get()
    assert version == 2 and whole(2, payload)
    buffer.close()
    left = glob.glob(f"/dev/shm/{buffer.name}-*")
    assert left == [], left
    heir.close()

def killed_while_it_read():
    buffer = CPUWeightBuffer(timeout_s=20)
    buffer.publish(0, weights(0))

    def read():
        with CPUWeightBuffer.attach(buffer.name).read():
            os.kill(os.getpid(), signal.SIGKILL)

    assert ended(fork(read)) == -signal.SIGKILL
    buffer.publish(1, weights(1))
    buffer.publish(2, weights(2))
    assert buffer.get()[0] == 2
    buffer.close()

def a_fork_that_ends_takes_nothing_with_it():
    buffer = CPUWeightBuffer()
    buffer.publish(0, weights(0))
    assert ended(fork(lambda: buffer.close())) == 0
    assert buffer.get()[0] == 0
    buffer.close()

for kind in ("Shared", "Sharded"):
    stress(kind)
killed_while_it_wrote()
killed_while_it_read()
a_fork_that_ends_takes_nothing_with_it()
print("fine")
"""


def python(script, **options):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_eight_processes_see_whole_versions_and_who_is_killed_blocks_nobody():
    process = python(PROCESSES)
    try:
        out, err = process.communicate(timeout=110)
    finally:
        process.kill()
    assert (out, err, process.returncode) == ("fine\n", "", 0)


def test_a_killed_owner_leaves_no_memory_and_its_readers_are_told():
    script = """
import sys, time, torch
from rlightning.weights import CPUWeightBuffer
buffer = CPUWeightBuffer()
buffer.publish(0, {"w": torch.ones(1000)})
print(buffer.name, flush=True)
time.sleep(100)
"""
    process = python(script)
    name = process.stdout.readline().strip()
    reader = CPUWeightBuffer.attach(name, timeout_s=5)
    assert reader.get()[0] == 0
    assert len(list(SHM.glob(f"{name}-*"))) == 3
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    deadline = time.monotonic() + 30
    while list(SHM.glob(f"{name}-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(SHM.glob(f"{name}-*")) == []
    with pytest.raises(RuntimeError, match="are gone: their publisher has ended"):
        reader.get()


def test_an_exit_leaves_no_memory_and_no_complaint():
    script = """
import torch
from rlightning.weights import CPUWeightBuffer, ShardedWeightBuffer
kept = [CPUWeightBuffer(), ShardedWeightBuffer(2)]
for buffer in kept:
    buffer.publish(0, {"w": torch.ones(1000)})
    print(*(part.name for part in getattr(buffer, "parts", [buffer])))
lent = kept[0].read()
lent.__enter__()
"""
    process = python(script)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    for name in out.split():
        assert list(SHM.glob(f"{name}-*")) == []


def test_an_address_is_opened_on_the_machine_of_the_weights_and_nowhere_else(buffer):
    buffer.publish(0, weights(0))
    address = pickle.loads(pickle.dumps(buffer.address))
    assert value_of(address.open().get()[1]) == 0
    buffer.close()
    assert address.open() is None
