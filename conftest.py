"""Fixtures of all tests."""

import logging
import os
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from typing import Any

import psutil
import pytest

_LOGGERS = ("plugrl_server", "plugrl_protocol", "plugrl_env_client", "rlightning")


@pytest.fixture(autouse=True)
def loggers_as_they_were() -> Iterator[None]:
    """Undo what a test's programs do to our loggers, which else say nothing to later tests."""
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


@pytest.fixture(scope="module")
def ray_cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A Ray cluster on this machine, for all tests of a module; nothing of it is left behind.

    Classes that the module defines go to workers by value: workers cannot import test modules.
    """
    ray = pytest.importorskip("ray")
    resource_tracker.ensure_running()  # Python's own, which shared memory starts: it ends with us
    before = {process.pid for process in psutil.process_iter()}
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_worker_niceness", "0")  # beside other work, workers count as much as tests
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    ray.cloudpickle.register_pickle_by_value(sys.modules[request.module.__name__])
    yield ray
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[request.module.__name__])
    ray.shutdown()
    patch.undo()
    ours = [
        process
        for process in psutil.process_iter(["name", "ppid"])
        if process.pid not in before and process.info["ppid"] == os.getpid()
    ]
    _, alive = psutil.wait_procs(ours, timeout=20)
    assert not alive
