"""Running statistics are exact, mergeable, frozen when asked and precise for long runs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlightning.ops.normalization import RunningMeanStd, batch_moments, merge_moments


def test_moments_by_hand():
    moments = batch_moments(torch.tensor([[1.0, 0.0], [3.0, 0.0]]))
    assert moments.mean.tolist() == [2.0, 0.0]
    assert moments.var.tolist() == [1.0, 0.0]
    assert moments.n_samples.item() == 2
    assert moments.mean.dtype == torch.float64


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_merging_any_split_equals_the_pooled_data(seed, sizes):
    rng = torch.Generator().manual_seed(seed)
    data = torch.randn(sum(sizes), 3, generator=rng) * 5 + 100
    merged = merge_moments([batch_moments(part) for part in torch.split(data, sizes)])
    pooled = batch_moments(data)
    assert merged.n_samples == pooled.n_samples
    assert torch.allclose(merged.mean, pooled.mean)
    assert torch.allclose(merged.var, pooled.var)


def test_updates_equal_one_pass_over_everything():
    data = torch.randn(100, 4) * 3 - 7
    stats = RunningMeanStd((4,))
    for part in data.split(7):
        stats.update(part)
    assert torch.allclose(stats.mean, data.double().mean(0))
    assert torch.allclose(stats.var, data.double().var(0, correction=0))
    assert stats.count.item() == 100


def test_workers_that_merge_the_same_pool_agree_and_count_once():
    """Two workers share history, see different data, exchange only what is new, twice."""
    first, second = RunningMeanStd((2,)), RunningMeanStd((2,))
    seen = []
    for _ in range(2):
        new = [torch.randn(10, 2), torch.randn(6, 2) + 5]
        seen += new
        pool = merge_moments([batch_moments(part) for part in new])
        first.merge(pool)
        second.merge(pool)
    everything = torch.cat(seen).double()
    for stats in (first, second):
        assert stats.count.item() == 32
        assert torch.allclose(stats.mean, everything.mean(0))
        assert torch.allclose(stats.var, everything.var(0, correction=0))


def test_before_any_data_it_is_the_identity():
    value = torch.tensor([[1.5, -2.0]])
    assert torch.allclose(RunningMeanStd((2,)).normalize(value), value)


def test_normalized_data_has_mean_zero_std_one_and_comes_back():
    data = torch.randn(1000, 3) * torch.tensor([1.0, 10.0, 0.1]) + 4
    stats = RunningMeanStd((3,), clip=None)
    stats.update(data)
    normalized = stats.normalize(data)
    assert normalized.dtype == torch.float32
    assert torch.allclose(normalized.mean(0), torch.zeros(3), atol=1e-4)
    assert torch.allclose(normalized.std(0, correction=0), torch.ones(3), atol=1e-4)
    assert torch.allclose(stats.denormalize(normalized), data, atol=1e-4)


def test_extremes_are_clipped_and_a_constant_feature_stays_finite():
    stats = RunningMeanStd((1,), clip=5.0)
    stats.update(torch.full((10, 1), 3.0))
    assert stats.normalize(torch.tensor([[1e6], [3.0], [-1e6]])).squeeze(1).tolist() == [5, 0, -5]


def test_statistics_are_frozen_in_evaluation():
    stats = RunningMeanStd((2,))
    stats.update(torch.randn(5, 2))
    before = {k: v.clone() for k, v in stats.state_dict().items()}
    stats.eval()
    stats.update(torch.randn(5, 2) + 100)
    assert all(torch.equal(before[k], v) for k, v in stats.state_dict().items())
    assert set(before) == {"mean", "var", "count"}


def test_a_scalar_counts_past_what_float32_can():
    stats = RunningMeanStd()
    stats.count.fill_(2.0**25)
    stats.update(torch.zeros(1))
    assert stats.count.item() == 2.0**25 + 1


def test_a_batch_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\(5, 2\).*\(3,\)"):
        RunningMeanStd((3,)).update(torch.zeros(5, 2))


def test_buffers_are_changed_in_place():
    stats = RunningMeanStd((2,))
    held = stats.mean
    stats.update(torch.ones(3, 2))
    assert held.tolist() == [1.0, 1.0]


def test_normalizing_follows_every_way_of_changing_the_statistics():
    """The single-precision copy is never stale: updates, loading, copying in place, moving."""
    stats, other = RunningMeanStd((1,)), RunningMeanStd((1,))
    other.update(torch.tensor([[3.0], [9.0]]))
    value = torch.tensor([[5.0]])

    def copy_in_place():
        with torch.no_grad():
            stats.mean.fill_(7.0)

    for change in (
        lambda: stats.update(torch.tensor([[1.0], [2.0]])),
        lambda: stats.load_state_dict(other.state_dict()),
        copy_in_place,
        lambda: stats.load_state_dict({**other.state_dict()}, assign=True),
        lambda: stats.to("cpu"),
    ):
        stats.normalize(value)
        change()
        expected = (5.0 - stats.mean.item()) / stats.std.item()
        assert stats.normalize(value).item() == pytest.approx(expected, rel=1e-6)


def test_scaling_divides_by_the_deviation_alone():
    stats = RunningMeanStd()
    stats.update(torch.tensor([10.0, 14.0]))
    assert stats.scale(torch.tensor([12.0])).item() == pytest.approx(6.0)
    assert stats.unscale(torch.tensor([6.0])).item() == pytest.approx(12.0)
