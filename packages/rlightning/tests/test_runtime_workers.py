"""Workers without a cluster: the host's side, futures, proxies, restarts."""

import logging

import numpy as np
import pytest

from rlightning.errors import ConfigError, WorkerLostError
from rlightning.runtime.base import Done, Future, Handle, Runtime, WorkerSpec
from rlightning.runtime.group import gather
from rlightning.runtime.host import Failure, Host, WorkerSetup
from rlightning.runtime.proxy import Proxy
from rlightning.runtime.supervision import Supervised
from rlightning.testing import LocalRuntime


class Counter:
    """Counts."""

    step = 2

    def __init__(self, start=0):
        self.count = start

    def add(self, number=1):
        self.count += number
        return self.count

    @property
    def doubled(self):
        return self.count * 2

    def fail(self):
        logging.getLogger("rlightning.test").warning("about to fail")
        raise ConfigError("no good")


@pytest.fixture
def host():
    logger = logging.getLogger("rlightning")
    before = logger.handlers[:], logger.level, logger.propagate
    host = Host(WorkerSetup(seed=1))
    host.adopt(Counter())
    yield host
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_a_host_returns_results_and_what_was_logged(host):
    assert host.call("add", (3,), {}) == (3, None)
    failure, logs = host.call("fail", (), {})
    assert isinstance(failure, Failure)
    assert logs == [["rlightning.test", logging.WARNING, "about to fail", None]]


def test_an_error_reaches_the_caller_with_its_type_and_its_traceback(host):
    failure, _ = host.call("fail", (), {})
    with pytest.raises(ConfigError, match="no good") as caught:
        failure.raise_("env-3")
    note = "\n".join(caught.value.__notes__)
    assert "in worker env-3" in note
    assert "def fail" not in note
    assert 'raise ConfigError("no good")' in note


def test_an_error_that_cannot_travel_arrives_as_text():
    host = Host.__new__(Host)
    host._is_portable = lambda error: False
    failure = host.failure(KeyError("odd"))
    assert type(failure.error) is RuntimeError
    assert "KeyError: 'odd'" in str(failure.error)


def test_workers_of_this_process_answer_at_once():
    runtime = LocalRuntime()
    handle = runtime.spawn(WorkerSpec(name="counter-0", make=Counter, args=(5,)))
    future = handle.call("add", number=2)
    assert future.poll()
    assert future.result() == 7
    with pytest.raises(ConfigError):
        handle.call("fail").result()
    runtime.close()
    with pytest.raises(WorkerLostError, match="worker counter-0 is lost: it was stopped"):
        handle.call("add").result()


def test_a_proxy_has_the_surface_of_the_class():
    proxy = Proxy(Counter, LocalRuntime().spawn(WorkerSpec(name="c", make=Counter)))
    assert proxy.step == 2
    assert proxy.add(4) == 4
    assert proxy.doubled == 8
    assert proxy.begin("add").result() == 5
    with pytest.raises(AttributeError, match="subtract"):
        proxy.subtract(1)
    assert repr(proxy) == "<Counter in worker c>"


class Slow(Future):
    """Ready after so many looks; then returns, or raises."""

    def __init__(self, looks, value):
        self.looks, self.value = looks, value

    def poll(self, timeout_s=0.0):
        self.looks -= 1
        return self.looks < 0

    def result(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def test_answers_are_gathered_in_order():
    assert gather([Slow(3, "a"), Done("b"), Slow(1, "c")]) == ["a", "b", "c"]


def test_the_first_failure_is_raised_while_others_still_wait():
    with pytest.raises(ConfigError, match="down"):
        gather([Slow(10**9, "waits for the other"), Slow(2, ConfigError("down"))])


class Mortal(Handle):
    """Answers until its worker's life is over."""

    def __init__(self, name, life):
        self.name, self.life, self.stopped = name, life, False

    def call(self, method, *args, timeout_s=None, **kwargs):
        self.life -= 1
        if self.life < 0:
            return Slow(0, WorkerLostError(self.name, reason="it was killed"))
        return Done((method, args))

    def stop(self):
        self.stopped = True


class Mortals(Runtime):
    def __init__(self, *lives):
        self.lives = list(lives)
        self.handles = []

    def spawn(self, spec):
        self.handles.append(Mortal(spec.name, self.lives.pop(0)))
        return self.handles[-1]

    def close(self): ...


SPEC = WorkerSpec(name="env-0", make=Counter)


def lost(worker):
    with pytest.raises(WorkerLostError) as caught:
        worker.call("add").result()
    return caught.value


def test_a_dead_worker_is_replaced_and_prepared():
    runtime = Mortals(1, 5)
    worker = Supervised(runtime, SPEC, max_restarts=2)
    assert worker.call("add").result() == ("add", ())
    result = worker.restore(lost(worker), lambda handle: handle.call("init").result())
    assert result == ("init", ())
    assert worker.restarts == 1
    assert [handle.stopped for handle in runtime.handles] == [True, False]
    assert worker.call("add", 1).result() == ("add", (1,))


def test_a_worker_that_keeps_dying_ends_with_the_first_reason():
    worker = Supervised(Mortals(0, 0, 0), SPEC, max_restarts=2)
    error = WorkerLostError("env-0", reason="the simulator ran out of licences")
    with pytest.raises(WorkerLostError) as caught:
        worker.restore(error, lambda handle: handle.call("init").result())
    assert worker.restarts == 2
    assert "2 times" in str(caught.value)
    assert "licences" in str(caught.value)
    assert caught.value.__cause__ is error


def test_without_restarts_the_error_is_the_workers_own():
    worker = Supervised(Mortals(0), SPEC, max_restarts=0)
    with pytest.raises(WorkerLostError, match=r"it was killed$"):
        worker.restore(lost(worker), lambda handle: None)


def test_a_users_error_while_a_new_worker_starts_is_not_swallowed():
    def prepare(handle):
        raise ValueError("bad scene")

    worker = Supervised(Mortals(0, 5), SPEC, max_restarts=3)
    with pytest.raises(ValueError, match="bad scene"):
        worker.restore(lost(worker), prepare)


def test_a_seed_makes_the_global_generators_of_a_worker_its_own():
    draws = []
    for seed in (1, 1, 2):
        logger = logging.getLogger("rlightning")
        before = logger.handlers[:], logger.level, logger.propagate
        Host(WorkerSetup(seed=seed)).adopt(Counter())
        logger.handlers, logger.propagate = before[0], before[2]
        logger.setLevel(before[1])
        draws.append(np.random.rand())
    assert draws[0] == draws[1] != draws[2]
