"""Flat rows as sequences: which rows follow each other, and how to lay them side by side in time.

A batch is flat rows ``[B, ...]``. Where rows of one environment stand together in the order of
time, they form a sequence, described by its length alone: sequences follow each other without
gaps, so that lengths ``[S]`` with the sum ``B`` say everything. Knows nothing about networks.
"""

import torch
from torch import Tensor

__all__ = ["pad_sequences", "sequence_lengths", "sequence_rows", "unpad_sequences"]


def sequence_lengths(
    step_B: Tensor, cut_B: Tensor | None = None, *, max_length: int | None = None
) -> Tensor:
    """Find the longest sequences that a batch of rows makes.

    A row goes on with the sequence of the row before it where its step is one more and no cut lies
    between them.

    Args:
        step_B: int64 [B], one more from a row to the row that followed it in time.
        cut_B: bool [B], whether the sequence ends with this row whatever follows (an episode's
            end); None where nothing does.
        max_length: sequences are cut after that many rows; None leaves them whole.

    Returns:
        Lengths, int64 [S] on the CPU.
    """
    step = step_B.cpu()
    starts_B = torch.ones(len(step), dtype=torch.bool)
    starts_B[1:] = step[1:] != step[:-1] + 1
    if cut_B is not None:
        starts_B[1:] |= cut_B.cpu()[:-1].bool()
    start_S = starts_B.nonzero().squeeze(-1)
    if max_length is not None:
        row_B = torch.arange(len(step))
        since_start_B = row_B - start_S[starts_B.cumsum(0) - 1]
        start_S = (since_start_B % max_length == 0).nonzero().squeeze(-1)
    return torch.diff(start_S, append=torch.tensor([len(step)]))


def sequence_rows(length_S: Tensor, order_S: Tensor) -> Tensor:
    """Return which rows of a batch stand where once its sequences are put into another order.

    Args:
        length_S: int64 [S].
        order_S: a permutation of the sequences, int64 [S].

    Returns:
        Row numbers, int64 [B], on the device of ``length_S``.
    """
    start_S = length_S.cumsum(0) - length_S
    length, start = length_S[order_S], start_S[order_S]
    new_start = length.cumsum(0) - length
    shift_B = torch.repeat_interleave(start - new_start, length)
    return torch.arange(len(shift_B), device=shift_B.device) + shift_B


def _grid(length_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return for every place [L, S] the row that stands there, and whether there is one."""
    start_S = length_S.cumsum(0) - length_S
    time_L = torch.arange(int(length_S.max()), device=length_S.device).unsqueeze(1)
    exists_LS = time_L < length_S
    row_LS = torch.where(exists_LS, start_S + time_L, 0)
    return row_LS, exists_LS


def pad_sequences(rows_B: Tensor, length_S: Tensor) -> Tensor:
    """Lay sequences side by side, time first.

    Args:
        rows_B: [B, ...].
        length_S: int64 [S] with the sum B, on the same device.

    Returns:
        [L, S, ...]; places after a sequence's end hold a copy of the batch's first row, so that
        whatever is computed there is finite. `unpad_sequences` drops them.
    """
    row_LS, _ = _grid(length_S)
    return rows_B[row_LS]


def unpad_sequences(padded_LS: Tensor, length_S: Tensor) -> Tensor:
    """Undo `pad_sequences`: from [L, S, ...] to the flat rows [B, ...]."""
    _, exists_LS = _grid(length_S)
    return padded_LS.transpose(0, 1)[exists_LS.T]
