"""Time is measured by a clock of the test's own."""

import pytest

from plugrl_env_client.runner.timing import Pacer, RolloutTiming


class Clock:
    def __init__(self):
        self.now_s = 0.0
        self.slept_s = []

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.slept_s.append(seconds)
        self.now_s += seconds


def test_parts_are_added_up_and_divided_by_the_whole():
    clock = Clock()
    timing = RolloutTiming(clock)
    for _ in range(2):
        with timing.measure("env_step"):
            clock.now_s += 3.0
        with timing.measure("infer_wait"):
            clock.now_s += 1.0
        timing.steps += 1
    clock.now_s = 10.0
    found = timing.as_dict()
    assert (found["env_step_s"], found["env_step_fraction"]) == (6.0, 0.6)
    assert (found["infer_wait_s"], found["infer_wait_fraction"]) == (2.0, 0.2)
    assert found["effective_fps"] == 0.2
    assert timing.describe() == "0.2 steps/s (env_step 60%, infer_wait 20%)"


def test_a_part_that_raises_is_measured_too():
    clock = Clock()
    timing = RolloutTiming(clock)

    def part():
        with timing.measure("feedback"):
            clock.now_s += 2.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        part()
    assert timing.feedback == 2.0


def test_steps_keep_their_rate_whatever_they_take():
    clock = Clock()
    pacer = Pacer(10.0, clock=clock, sleep=clock.sleep)
    begun = []
    for work_s in (0.02, 0.09, 0.05, 0.0):
        assert pacer.wait()
        begun.append(clock.now_s)
        clock.now_s += work_s
    assert begun == pytest.approx([0.0, 0.1, 0.2, 0.3])


def test_a_small_delay_is_made_up_for():
    clock = Clock()
    pacer = Pacer(10.0, clock=clock, sleep=clock.sleep)
    pacer.wait()
    clock.now_s += 0.15
    assert pacer.wait()
    assert clock.now_s == pytest.approx(0.15)
    pacer.wait()
    assert clock.now_s == pytest.approx(0.2)


def test_a_long_delay_is_told_and_not_made_up_for_by_a_burst():
    clock = Clock()
    pacer = Pacer(10.0, clock=clock, sleep=clock.sleep)
    pacer.wait()
    clock.now_s += 5.0
    assert not pacer.wait()
    assert pacer.wait()
    assert clock.now_s == pytest.approx(5.1)


def test_no_rate_never_waits():
    clock = Clock()
    assert Pacer(None, clock=clock, sleep=clock.sleep).wait()
    assert clock.slept_s == []
