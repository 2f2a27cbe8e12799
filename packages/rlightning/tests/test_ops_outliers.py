"""Unusual rows, by hand."""

import pytest
import torch

from rlightning.ops.outliers import find_usual_rows

ZERO = torch.zeros(())


def test_a_row_more_than_ten_thousand_spreads_from_the_median_is_unusual():
    # Median 2, distances 1, 0, 1, ...: the scale is 2, and so 20,002 is the last usual number.
    rows = torch.tensor([[1.0], [2.0], [3.0], [20_003.0], [2.0]])
    assert find_usual_rows(rows, ZERO, ZERO).tolist() == [True, True, True, False, True]
    rows[3] = 20_002.0
    assert find_usual_rows(rows, ZERO, ZERO) is None


def test_one_unusual_number_makes_its_row_unusual():
    rows = torch.zeros(3, 2)
    rows[1, 1] = -1e6
    assert find_usual_rows(rows, ZERO, ZERO).tolist() == [True, False, True]


def test_a_batch_of_large_numbers_is_usual():
    assert find_usual_rows(torch.full((4, 1), 1e12), ZERO, ZERO) is None


def test_a_wide_spread_so_far_lets_further_numbers_in():
    rows = torch.tensor([[0.0], [0.0], [1e6]])
    assert find_usual_rows(rows, ZERO, torch.tensor([200.0])) is None
    assert find_usual_rows(rows, ZERO, torch.tensor([50.0])).tolist() == [True, True, False]


@pytest.mark.parametrize("far", [1e5, -1e5, 1e14])
def test_without_any_usual_row_all_stay(far):
    rows = torch.tensor([[0.0, far], [far, 0.0], [0.0, 0.0]])[:2]
    assert find_usual_rows(rows, ZERO, ZERO) is None
