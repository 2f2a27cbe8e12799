"""The profiler adds up durations by name, whatever happens inside."""

import asyncio
import logging

import pytest

from rlightning.utils.profiler import profiler


class Owner:
    def __init__(self):
        self.timing_raw = {}

    @profiler.timer_wrap()
    def work(self, value):
        """Say what was given."""
        return value

    @profiler.timer_wrap("renamed", log_to_metric=True)
    async def work_async(self, value):
        return value

    @profiler.timer_wrap(enable=False)
    def untimed(self):
        return 1

    @profiler.timer_wrap()
    def fail(self):
        raise KeyError("inside")


def test_durations_are_counted_summed_and_averaged():
    timing = {}
    profiler.record_timing("step", 1.0, timing)
    profiler.record_timing("step", 3.0, timing)

    assert timing == {"step": {"count": 2, "total": 4.0, "avg": 2.0}}


def test_the_timer_measures_a_body_that_raises_too():
    timing = {}
    with pytest.raises(KeyError), profiler.timer("body", timing):
        raise KeyError("x")
    assert timing["body"]["count"] == 1


def test_a_disabled_timer_leaves_no_trace():
    timing = {}
    with profiler.timer("body", timing, enable=False):
        pass
    assert timing == {}


def test_a_wrapped_method_keeps_its_name_its_result_and_counts_failures():
    owner = Owner()
    assert owner.work(3) == 3
    assert Owner.work.__doc__ == "Say what was given."
    with pytest.raises(KeyError, match="inside"):
        owner.fail()
    assert owner.untimed() == 1
    assert {name: entry["count"] for name, entry in owner.timing_raw.items()} == {
        "work": 1,
        "fail": 1,
    }


def test_a_wrapped_coroutine_is_timed_around_its_body():
    owner = Owner()
    assert asyncio.run(owner.work_async(4)) == 4
    assert owner.timing_raw["renamed"]["count"] == 1


def test_one_line_is_logged_at_the_level_asked_for(caplog):
    with caplog.at_level(logging.INFO, logger="rlightning"):
        profiler.record_timing("quiet", 0.5, {})
        profiler.record_timing("loud", 0.5, {}, "info")
    assert [record.message for record in caplog.records] == ["time_profile/loud: 0.5000s"]


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match="'loudest' is not a log level"):
        profiler.record_timing("x", 0.1, {}, "loudest")


def test_gpu_memory_is_silent_without_a_gpu(caplog, monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    profiler.log_gpu_memory_usage("after init")
    assert not caplog.records


def test_the_summary_lists_the_largest_total_first():
    timing = {}
    profiler.record_timing("small", 0.1, timing)
    profiler.record_timing("large", 2.0, timing)
    lines = profiler.summary(timing).splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["large", "small"]
    assert lines[1].split()[1:] == ["1", "2.000", "2000.000"]
