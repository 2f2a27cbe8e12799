"""Environments that wait for somebody outside the run, behind the handles of a cluster."""

import logging
import sys
import threading
import time

import gymnasium as gym
import numpy as np
import pytest

from rlightning.config import EnvConfig
from rlightning.env import BaseEnv, patient_worker
from rlightning.env.env_proxy import EnvProxy
from rlightning.env.patient_worker import PatientHandle, PatientWorker
from rlightning.errors import ContractError, StopRequested, WorkerLostError
from rlightning.runtime import stop_signal
from rlightning.runtime.base import Failed, WorkerSpec
from rlightning.runtime.supervision import Supervised
from rlightning.testing import LocalRuntime
from rlightning.types import EnvRet, PolicyResponse

LIMIT_S = 20


class Doorway:
    """Where environments wait, and who comes."""

    def __init__(self):
        self.opened = threading.Event()
        self.closes = []


@pytest.fixture
def doorway(monkeypatch):
    """A new doorway for the environments of a test; and nobody is asked to stop after it."""
    monkeypatch.setattr(stop_signal, "_listening", [])
    monkeypatch.setattr(Waiting, "doorway", Doorway())
    return Waiting.doorway


class Waiting(BaseEnv):
    """Waits in `reset` and `step` until somebody opens the door; shows its steps."""

    waits_for_others = True
    doorway = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.env = gym.make("CartPole-v1")
        self.steps = 0

    def wait(self):
        begin_s = time.monotonic()
        while not self.doorway.opened.wait(0.01):
            if stop_signal.stop_is_requested():
                raise StopRequested("asked to stop while it waited")
            assert time.monotonic() - begin_s < LIMIT_S
        if self.steps == 5:
            raise ContractError("the visitor speaks another language")
        return EnvRet(self.env_id, np.full(4, self.steps, np.float32))

    def reset(self):
        self.steps = 0
        return self.wait()

    def step(self, policy_resp):
        self.steps += 1
        return self.wait()

    def close(self):
        failed = sys.exc_info()[0] is not None
        self.doorway.closes.append((self.purpose, failed, stop_signal.stop_is_requested()))


class Workers:
    """The workers of a test: a local one for training, and what shares it."""

    def __init__(self):
        self.runtime, self.worker = LocalRuntime(), None

    def proxy(self, purpose):
        def spawn(make, recipe):
            owns = self.worker is None
            if owns:
                spec = WorkerSpec(name="env-0", make=PatientWorker, args=recipe)
                self.worker = Supervised(self.runtime, spec, max_restarts=2)
            return PatientHandle(self.worker, recipe, owns=owns)

        config = EnvConfig.from_dict({"name": "e", "backend": "none", "task": "none"})
        return EnvProxy(Waiting, config, 0, lambda response: response.action, purpose, spawn)

    def die(self):
        """Let the worker be gone at the next call."""
        self.runtime.close()


def act(env):
    return env._step(PolicyResponse(env.env_id, action=np.zeros(1, np.int64)))


def test_a_call_takes_as_long_as_it_waits_and_meanwhile_the_worker_answers(doorway):
    env = Workers().proxy("train")
    env.init()
    env.begin_reset()
    assert not env.is_ready(1.5), "several answers say that it still waits"
    threading.Timer(0.7, doorway.opened.set).start()
    env_ret = env._reset()
    assert env_ret.env_id == env.env_id
    assert env_ret.observation.tolist() == [0.0] * 4
    assert act(env).observation.tolist() == [1.0] * 4
    env.close()
    assert doorway.closes == [("train", False, False)]


def test_training_and_evaluation_share_a_worker_and_keep_apart(doorway):
    doorway.opened.set()
    workers = Workers()
    train, evaluation = workers.proxy("train"), workers.proxy("eval")
    for env in (train, evaluation):
        env.init()
        env._reset()
    act(train)
    assert act(train).observation[0] == 2
    assert act(evaluation).observation[0] == 1
    assert act(train).env_id == train.env_id != evaluation.env_id
    evaluation.close()
    assert act(train)
    train.close()
    assert [purpose for purpose, *_ in doorway.closes] == ["eval", "train"]


def test_what_an_environment_raises_is_raised_where_its_answer_is_asked_for(doorway):
    doorway.opened.set()
    env = Workers().proxy("train")
    env.init()
    env._reset()
    for _ in range(4):
        act(env)
    env.begin_step(PolicyResponse(env.env_id, action=np.zeros(1, np.int64)))
    assert env.is_ready(LIMIT_S)
    with pytest.raises(ContractError, match="another language"):
        env._step(None)


def test_a_run_that_is_asked_to_stop_ends_a_call_that_waits(doorway, monkeypatch):
    env = Workers().proxy("train")
    env.init()
    asked = threading.Event()
    monkeypatch.setattr(patient_worker, "stop_is_requested", asked.is_set)  # the trainer's
    threading.Timer(0.2, asked.set).start()
    with pytest.raises(StopRequested):
        env._reset()
    env.close()
    assert doorway.closes == [("train", False, True)]


def test_an_error_ends_what_still_waits_and_closing_tells_that_the_run_failed(doorway):
    env = Workers().proxy("train")
    env.init()
    env.begin_reset()
    try:
        raise ValueError("the learner has failed")
    except ValueError:
        env.close()
    [(purpose, failed, _)] = doorway.closes
    assert (purpose, failed) == ("train", True)


@pytest.mark.parametrize("first", ["train", "eval"])
def test_a_worker_that_dies_is_replaced_once_for_both(doorway, first, caplog):
    doorway.opened.set()
    workers = Workers()
    envs = {purpose: workers.proxy(purpose) for purpose in ("train", "eval")}
    for env in envs.values():
        env.init()
        env._reset()
        act(env)
    workers.die()
    one, other = (envs[first], envs["eval" if first == "train" else "train"])
    with caplog.at_level(logging.WARNING, "rlightning"):
        shown = act(one)
        assert shown.info["_lost"]
        assert act(other).info["_lost"]
    assert workers.worker.restarts == 1
    assert (one.take_lost_episodes(), other.take_lost_episodes()) == (1, 1)
    assert act(one).observation[0] == act(other).observation[0] == 1


def test_a_worker_that_dies_again_while_the_other_environment_returns_is_replaced_again(doorway):
    doorway.opened.set()
    workers = Workers()
    train, evaluation = workers.proxy("train"), workers.proxy("eval")
    for env in (train, evaluation):
        env.init()
        env._reset()
    workers.die()
    act(train)
    call, left = workers.worker._handle.call, iter([False])

    def dying(*args, **kwargs):
        if next(left, True):
            return call(*args, **kwargs)
        return Failed(WorkerLostError("env-0", reason="killed"))

    workers.worker._handle.call = dying
    assert act(evaluation).info["_lost"]
    assert workers.worker.restarts == 2
    assert act(train).info["_lost"]
