"""Sequences: found in flat rows, laid side by side, and put back."""

import pytest
import torch

from rlightning.ops.sequences import (
    pad_sequences,
    sequence_lengths,
    sequence_rows,
    unpad_sequences,
)


def naive_lengths(steps, cuts, max_length):
    """Row by row, as one would by hand."""
    lengths = [1]
    for row in range(1, len(steps)):
        follows = steps[row] == steps[row - 1] + 1 and not cuts[row - 1]
        if follows and (max_length is None or lengths[-1] < max_length):
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def test_a_gap_in_the_steps_and_a_cut_both_end_a_sequence():
    steps = torch.tensor([7, 8, 9, 100, 101, 102, 103, 10])
    cuts = torch.tensor([0, 0, 0, 0, 1, 0, 0, 0])
    assert sequence_lengths(steps).tolist() == [3, 4, 1]
    assert sequence_lengths(steps, cuts).tolist() == [3, 2, 2, 1]
    assert sequence_lengths(steps, cuts, max_length=2).tolist() == [2, 1, 2, 2, 1]


@pytest.mark.parametrize("max_length", [None, 1, 3, 50])
@pytest.mark.parametrize("seed", range(5))
def test_random_rows_make_the_sequences_of_the_naive_twin(seed, max_length):
    generator = torch.Generator().manual_seed(seed)
    steps = torch.cumsum(torch.randint(1, 3, (60,), generator=generator), 0)
    cuts = torch.rand(60, generator=generator) < 0.1
    found = sequence_lengths(steps, cuts, max_length=max_length)
    assert found.tolist() == naive_lengths(steps.tolist(), cuts.tolist(), max_length)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_padding_puts_time_first_and_unpadding_undoes_it(shape):
    lengths = torch.tensor([2, 4, 1])
    rows = torch.randn(7, *shape)
    padded = pad_sequences(rows, lengths)
    assert padded.shape == (4, 3, *shape)
    assert torch.equal(padded[:, 1], rows[2:6])
    assert torch.equal(padded[0], rows[[0, 2, 6]])
    assert torch.equal(unpad_sequences(padded, lengths), rows)


def test_padding_never_reaches_a_gradient():
    rows = torch.randn(5, 2, requires_grad=True)
    lengths = torch.tensor([4, 1])
    unpad_sequences(pad_sequences(rows, lengths) * 3.0, lengths).sum().backward()
    assert torch.equal(rows.grad, torch.full((5, 2), 3.0))


def test_reordered_sequences_keep_their_rows_together_and_in_order():
    lengths = torch.tensor([2, 3, 1])
    index = sequence_rows(lengths, torch.tensor([2, 0, 1]))
    assert index.tolist() == [5, 0, 1, 2, 3, 4]
