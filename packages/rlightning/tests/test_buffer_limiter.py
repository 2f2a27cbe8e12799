"""`RateLimiter`: who may go on, at any ratio of inserts to samples."""

import numpy as np
import pytest

from rlightning.buffer.limiter import RateLimiter


def test_without_a_ratio_only_the_smallest_size_counts():
    limiter = RateLimiter(min_size=10)
    limiter.samples = 10**9
    assert not limiter.can_sample(1, size=9)
    assert limiter.can_sample(10**6, size=10)
    assert limiter.can_insert(10**6)


def test_sampling_stops_when_it_is_ahead_and_inserting_when_it_is_behind():
    limiter = RateLimiter(min_size=100, samples_per_insert=4, error_buffer=40)
    limiter.inserts = 100
    assert limiter.can_sample(40, size=100)
    limiter.samples = 40
    assert not limiter.can_sample(1, size=100)
    limiter.inserts = 110  # worth 40 samples more
    assert limiter.can_sample(40, size=110)
    assert limiter.can_insert(10)  # 20 inserts of 4 samples, 40 of them taken
    assert not limiter.can_insert(11)


def test_the_first_rows_may_always_be_inserted():
    limiter = RateLimiter(min_size=100, samples_per_insert=1, error_buffer=1)
    assert limiter.can_insert(100)
    assert limiter.can_insert(101)
    assert not limiter.can_insert(102)


@pytest.mark.parametrize("ratio", [0.25, 1.0, 8.0, 256.0])
def test_a_fast_learner_and_a_fast_environment_both_hold_the_ratio(ratio):
    rng = np.random.default_rng(0)
    limiter = RateLimiter(min_size=64, samples_per_insert=ratio, error_buffer=max(64, 4 * ratio))
    for _ in range(20_000):
        learner = rng.random() < (0.9 if rng.random() < 0.5 else 0.1)
        if learner and limiter.can_sample(32, size=limiter.inserts):
            limiter.samples += 32
        elif limiter.can_insert(4):
            limiter.inserts += 4
    drift = (limiter.inserts - 64) * ratio - limiter.samples
    assert limiter.samples > 0
    assert abs(drift) <= limiter.error_buffer


def test_a_restored_limiter_does_not_catch_up():
    one = RateLimiter(min_size=10, samples_per_insert=2, error_buffer=4)
    one.inserts, one.samples = 1000, 1980
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
        ({"samples_per_insert": 8, "error_buffer": 7}, "at least samples_per_insert, 8"),
    ],
)
def test_impossible_numbers_are_refused(keys, text):
    with pytest.raises(ValueError, match=text):
        RateLimiter(**keys)


def test_a_batch_that_never_fits_is_refused_instead_of_waiting_forever():
    limiter = RateLimiter(min_size=100, samples_per_insert=1, error_buffer=20)
    with pytest.raises(ValueError, match="at least 32"):
        limiter.can_sample(64, size=1000)
    assert RateLimiter(min_size=1000, samples_per_insert=1).error_buffer == 100
