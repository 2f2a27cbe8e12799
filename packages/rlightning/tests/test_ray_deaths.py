"""What the error says where a worker is gone: which, why, and what can be done."""

import logging
import re
import sys
import time

import pytest

from rlightning.errors import WorkerLostError
from rlightning.runtime.base import WorkerSpec
from rlightning.runtime.host import WorkerSetup

ray = pytest.importorskip("ray")

from ray.exceptions import (  # noqa: E402
    ActorDiedError,
    NodeDiedError,
    OutOfMemoryError,
    RayError,
    WorkerCrashedError,
)

from rlightning.runtime.ray import RayRuntime, _why  # noqa: E402

pytestmark = pytest.mark.ray

MONITOR = """1 worker(s) were killed due to the node running low on memory. Memory on the node \
(IP: 10.0.0.7, ID: a58c) was 22.54GB used / 23.54GB limit (0.957519)
Selected to kill: (Task: task name=_Actor.call, pid=14, actual memory used=1.50GB, worker ID=1)
(Task: task name=_Actor.call, pid=41, actual memory used=9.25GB, worker ID=2)"""


def test_an_out_of_memory_kill_is_named_with_what_was_used():
    text = _why(OutOfMemoryError(MONITOR), 41)
    assert "its node ran out of memory (22.54GB of 23.54GB used); it held 9.25GB itself" in text
    assert _why(OutOfMemoryError("no details"), 41).startswith(
        "it was killed because its node ran out of memory. Start fewer"
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (NodeDiedError("The node 3f has died."), "its node left the cluster"),
        (WorkerCrashedError(), "killed from outside|crash|died"),
        (ActorDiedError(), "died"),
        (RayError("The actor ended.\nIts exit code was 3.\n"), r"^Its exit code was 3\.$"),
        (None, "its connection broke"),
    ],
)
def test_other_deaths_are_named_too(error, reason):
    assert re.search(reason, _why(error, 1))


class Sleeper:
    """Takes time."""

    def nap(self, seconds, note=None):
        time.sleep(seconds)
        return note


@pytest.fixture(scope="module")
def little_memory():
    """A cluster whose monitor finds that there is no memory for any worker."""
    config = {"memory_usage_threshold": 0.01, "memory_monitor_refresh_ms": 500}
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, logging_level=logging.ERROR,
        log_to_driver=False, _system_config=config,
    )  # fmt: skip
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("note", [None, {"a": slice(1)}], ids=["socket", "ray"])
def test_a_worker_that_the_memory_monitor_kills_is_lost_for_that_reason(little_memory, note):
    runtime = RayRuntime("local", setup=WorkerSetup(sys_path=tuple(sys.path)))
    worker = runtime.spawn(WorkerSpec(name="env-3", make=Sleeper))
    with pytest.raises(WorkerLostError, match="worker env-3 is lost: it was killed because its"):
        worker.call("nap", 100, note).result()
    with pytest.raises(WorkerLostError, match="ran out of memory"):
        worker.call("nap", 0).result()
    runtime.close()
