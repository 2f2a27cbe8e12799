"""Samplers: what each promises about its indices."""

import numpy as np
import pytest

from rlightning.buffer.sampler import AllDataSampler, BatchSampler, UniformSampler, make_sampler


def test_all_returns_every_row_once_in_order_or_shuffled():
    sampler = AllDataSampler(seed=0)
    assert sampler.sample(3, 6).tolist() == [0, 1, 2, 3, 4, 5]
    shuffled = sampler.sample(None, 50, shuffle=True)
    assert sorted(shuffled) == list(range(50))
    assert shuffled.tolist() != list(range(50))


def test_batch_is_distinct_rows_the_first_in_order_or_random_ones():
    sampler = BatchSampler(seed=0)
    assert sampler.sample(4, 10).tolist() == [0, 1, 2, 3]
    drawn = sampler.sample(40, 50, shuffle=True)
    assert len(set(drawn)) == 40
    assert drawn.tolist() != sorted(drawn)
    with pytest.raises(ValueError, match="7 rows was asked of 6"):
        sampler.sample(7, 6)


def test_uniform_draws_with_replacement_and_every_row_equally_often():
    counts = np.bincount(UniformSampler(seed=0).sample(100_000, 10), minlength=10)
    # Ten standard deviations of a binomial around the expected 10 000.
    assert (abs(counts - 10_000) < 950).all()
    assert UniformSampler().replacement
    assert not BatchSampler().replacement


@pytest.mark.parametrize("kind", ["all", "batch", "uniform"])
def test_no_batch_size_means_as_many_as_there_are(kind):
    indices = make_sampler(kind, seed=1).sample(None, 8, shuffle=True)
    assert indices.shape == (8,)
    assert indices.dtype == np.int64


@pytest.mark.parametrize("kind", ["all", "batch", "uniform"])
def test_the_same_seed_draws_the_same(kind):
    def draw(seed):
        return make_sampler(kind, seed=seed).sample(20, 20, shuffle=True).tolist()

    assert draw(5) == draw(5)
    assert draw(5) != draw(6)


@pytest.mark.parametrize("kind", ["all", "batch", "uniform"])
def test_sampling_from_nothing_is_refused(kind):
    with pytest.raises(ValueError, match="empty"):
        make_sampler(kind).sample(4, 0)


def test_only_samplers_without_replacement_can_take_everything():
    assert AllDataSampler().takes_all(3)
    assert BatchSampler().takes_all(None)
    assert not BatchSampler().takes_all(3)
    assert not UniformSampler().takes_all(None)
