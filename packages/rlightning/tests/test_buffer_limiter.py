"""`RateLimiter`: who may go on, at any ratio of inserts to samples."""

import pytest

from rlightning.buffer.limiter import RateLimiter


def test_without_a_ratio_only_the_smallest_size_counts():
    limiter = RateLimiter(min_size=10)
    limiter.samples = 10**9
    assert not limiter.can_sample(1, size=9)
    assert limiter.can_sample(10, size=10)
    assert not limiter.can_sample(11, size=10)
    assert limiter.can_insert(10**6)


def test_sampling_stops_when_it_is_ahead_and_inserting_when_it_is_behind():
    limiter = RateLimiter(min_size=100, samples_per_insert=4, error_buffer=50)
    limiter.inserts = 100
    assert limiter.can_sample(10, size=100)
    limiter.samples = 45
    assert not limiter.can_sample(6, size=100)
    assert limiter.can_sample(5, size=100)
    limiter.inserts = 110  # worth 40 samples more
    assert limiter.can_sample(10, size=110)
    assert limiter.can_insert(13)  # 23 inserts of 4 samples, 45 of them taken: 47 ahead
    assert not limiter.can_insert(14)


def test_rows_may_be_inserted_until_something_can_be_sampled():
    limiter = RateLimiter(min_size=100, samples_per_insert=1, error_buffer=200)
    limiter.inserts = 99
    assert limiter.can_insert(150)
    assert not limiter.can_sample(120, size=100)
    limiter.inserts = 119  # a batch of 120 was asked for since
    assert limiter.can_insert(1)


@pytest.mark.parametrize("error_buffer", [None, 2000.0])
@pytest.mark.parametrize("ratio", [0.25, 1.0, 8.0, 256.0])
@pytest.mark.parametrize(("batch", "rows"), [(32, 4), (1, 128), (300, 1)])
def test_a_fast_learner_and_a_fast_environment_both_hold_the_ratio(
    ratio, batch, rows, error_buffer
):
    if error_buffer is not None and 2 * error_buffer < batch + ratio * rows:
        error_buffer = batch + ratio * rows
    limiter = RateLimiter(min_size=64, samples_per_insert=ratio, error_buffer=error_buffer)
    for turn in range(4000):
        learner_first = turn % 1000 < 500
        may = {
            "sample": limiter.can_sample(batch, size=limiter.inserts),
            "insert": limiter.can_insert(rows),
        }
        assert any(may.values())
        order = ["sample", "insert"] if learner_first else ["insert", "sample"]
        if next(side for side in order if may[side]) == "sample":
            limiter.samples += batch
        else:
            limiter.inserts += rows
    drift = (limiter.inserts - max(64, batch)) * ratio - limiter.samples
    assert limiter.samples > 0
    assert abs(drift) <= limiter.error_buffer + ratio * rows


def test_a_restored_limiter_does_not_catch_up():
    one = RateLimiter(min_size=10, samples_per_insert=2, error_buffer=4)
    one.inserts, one.samples = 1000, 1980  # exactly 2 for each after the first 10
    two = RateLimiter(min_size=10, samples_per_insert=2, error_buffer=4)
    two.load_state_dict(one.state_dict())
    allowed = 0
    while two.can_sample(1, size=1000):
        two.samples += 1
        allowed += 1
    assert allowed == 4


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"min_size": 0}, "min_size is 0"),
        ({"samples_per_insert": 0.0}, "samples_per_insert is 0"),
        ({"samples_per_insert": 8, "error_buffer": 0}, "error_buffer is 0"),
    ],
)
def test_impossible_numbers_are_refused(keys, text):
    with pytest.raises(ValueError, match=text):
        RateLimiter(**keys)


def test_a_tolerance_at_which_both_sides_would_wait_is_refused():
    limiter = RateLimiter(min_size=100, samples_per_insert=1, error_buffer=20)
    limiter.inserts = 1000
    assert limiter.can_insert(1) in (True, False)
    with pytest.raises(ValueError, match=r"at least 32\.5"):
        limiter.can_sample(64, size=1000)
    with pytest.raises(ValueError, match="wait for each other"):
        limiter.can_insert(1)


def test_the_default_tolerance_grows_with_what_is_asked_for():
    limiter = RateLimiter(min_size=1000, samples_per_insert=2)
    assert limiter.error_buffer == 200
    limiter.can_sample(600, size=0)
    limiter.can_insert(100)
    assert limiter.error_buffer == 400
