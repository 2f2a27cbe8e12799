import functools
import time

import gymnasium as gym
import numpy as np
import psutil
import pytest

from plugrl_envs import (
    EnvTimeoutError,
    EnvWorkerError,
    WorkerOptions,
    get_state,
    make_vec,
    set_state,
)
from plugrl_envs.async_vector import AsyncRows
from plugrl_envs.testing import CounterEnv, FaultyEnv, SpaceEnv

TIMEOUT_S = 1.0


def workers():
    """Return the live or unreaped worker processes of this test process."""
    children = psutil.Process().children(recursive=True)
    helpers = ("resource_tracker", "multiprocessing.forkserver")
    found = []
    for child in children:
        try:
            if child.status() == psutil.STATUS_ZOMBIE or not any(
                helper in " ".join(child.cmdline()) for helper in helpers
            ):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(autouse=True)
def _no_process_is_left_behind():
    """Workers start by fork here: quick, and every child of this process is then a worker."""
    before = {child.pid for child in workers()}
    yield
    assert {child.pid for child in workers()} == before


def faulty_rows(fault, on, *, bad=1, timeout_s=TIMEOUT_S):
    fns = [FaultyEnv] * 3
    fns[bad] = functools.partial(FaultyEnv, fault, on=on)
    return AsyncRows(
        fns, step_timeout_s=timeout_s, start_timeout_s=timeout_s + 3, start_method="fork"
    )


@pytest.mark.parametrize("on", ["reset", "step"])
@pytest.mark.parametrize("fault", ["raise", "hang", "ignore", "die"])
def test_a_broken_row_is_named_within_the_deadline(fault, on):
    env = faulty_rows(fault, on)

    def use():
        env.reset(seed=0)
        for _ in range(3):
            env.step(np.zeros(3, int))

    begin = time.monotonic()
    expected = EnvTimeoutError if fault in ("hang", "ignore") else EnvWorkerError
    with pytest.raises(expected, match=f"environment 1 failed during {on}") as caught:
        use()
    assert time.monotonic() - begin < TIMEOUT_S + 3
    assert caught.value.index == 1
    reason = {"raise": "ZeroDivisionError: the simulator is broken", "die": "exit code 7"}
    assert reason.get(fault, "no answer within 1 s") in str(caught.value)
    assert env.closed
    with pytest.raises(RuntimeError, match="closed vector environment"):
        env.step(np.zeros(3, int))
    env.close()


@pytest.mark.parametrize("fault", ["raise", "die"])
def test_an_environment_that_cannot_be_made_is_named(fault):
    with pytest.raises(EnvWorkerError, match="environment 1 failed during start"):
        faulty_rows(fault, "make")


def test_the_default_start_method_works_and_leaves_no_worker():
    env = make_vec("CartPole-v1", 2, vectorization="async")
    first, _ = env.reset(seed=0)
    assert first.shape == (2, 4)
    env.step(np.array([0, 1]))
    env.close()
    env.close()  # closing twice is allowed


def test_rows_with_different_spaces_are_refused():
    fns = [CounterEnv, functools.partial(SpaceEnv, gym.spaces.Discrete(10))]
    with pytest.raises(ValueError, match="environment 1 has observation_space"):
        AsyncRows(fns, start_method="fork")


def test_an_unknown_start_method_is_refused():
    with pytest.raises(ValueError, match="start_method is 'teleport'; this system has"):
        AsyncRows([CounterEnv], start_method="teleport")


def test_async_equals_sync_step_by_step_infos_included():
    options = WorkerOptions(start_method="fork")
    one = make_vec("MountainCarContinuous-v0", 3, vectorization="async", workers=options)
    two = make_vec("MountainCarContinuous-v0", 3)
    one.action_space.seed(0)
    assert np.array_equal(one.reset(seed=5)[0], two.reset(seed=5)[0])
    for _ in range(50):
        actions = one.action_space.sample()
        for left, right in zip(one.step(actions), two.step(actions), strict=True):
            if isinstance(left, dict):
                assert left == right == {}
            else:
                assert np.array_equal(left, right)
                assert left.dtype == right.dtype
    one.close()


def test_returned_arrays_do_not_change_with_later_steps():
    env = make_vec(CounterEnv, 2, vectorization="async", workers=WorkerOptions(start_method="fork"))
    first, _ = env.reset(seed=0)
    kept = [first, *env.step(np.zeros(2, int))[:4]]
    copies = [array.copy() for array in kept]
    for _ in range(4):
        env.step(np.ones(2, int))
    for array, before in zip(kept, copies, strict=True):
        assert np.array_equal(array, before)
    env.close()


def test_methods_and_attributes_of_rows_are_reached():
    env = make_vec(CounterEnv, 2, vectorization="async", workers=WorkerOptions(start_method="fork"))
    env.reset(seed=0)
    assert env.call("episode") == (0, 0)
    with pytest.raises(EnvWorkerError, match="no_such_thing"):
        env.call("no_such_thing")


def test_state_of_workers_continues_episodes():
    env = make_vec(CounterEnv, 2, vectorization="async", workers=WorkerOptions(start_method="fork"))
    env.reset(seed=0)
    env.step(np.zeros(2, int))
    state = get_state(env)
    expected = [env.step(np.zeros(2, int)) for _ in range(6)]
    set_state(env, state)
    for left, right in zip(expected, [env.step(np.zeros(2, int)) for _ in range(6)], strict=True):
        assert all(np.array_equal(left[part], right[part]) for part in range(4))
    env.close()
