"""One base seed to the seeds of every worker and row: all different, the same in every run.

A seed is 31 bits: one bit says whether it is for training or evaluation, the other 30 are a
bijection of (worker, row), shifted by a hash of the base seed. So two rows of a run can never
share a seed, and an evaluation never starts from a training state, by construction.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

__all__ = ["derive_seeds", "row_seeds"]

_BITS = 30
_ROW_BITS = 16
_ODD = 0x2545F491  # odd, so that multiplication is a bijection modulo 2**30

Purpose = Literal["train", "eval"]


def derive_seeds(
    seed: int, num_envs: int, *, worker_index: int = 0, purpose: Purpose = "train"
) -> list[int]:
    """Return one seed per row, each in ``[0, 2**31)``.

    Args:
        seed: the base seed of the run, not negative.
        num_envs: how many rows the worker has, at most 65536.
        worker_index: which worker, below 16384.
        purpose: evaluation seeds are never training seeds.

    Raises:
        ValueError: an argument is out of its range.
    """
    if seed < 0:
        raise ValueError(f"seed is {seed}; expected a number >= 0")
    if not 0 < num_envs <= 1 << _ROW_BITS:
        raise ValueError(f"num_envs is {num_envs}; expected 1 to {1 << _ROW_BITS}")
    if not 0 <= worker_index < 1 << (_BITS - _ROW_BITS):
        raise ValueError(
            f"worker_index is {worker_index}; expected 0 to {(1 << (_BITS - _ROW_BITS)) - 1}"
        )
    offset = int(np.random.SeedSequence(seed).generate_state(1)[0])
    first = (offset + _ODD * (worker_index << _ROW_BITS)) % (1 << _BITS)
    return row_seeds((1 << _BITS) * (purpose == "eval") + first, num_envs)


def row_seeds(first: int, num_envs: int) -> list[int]:
    """Return the seeds of a worker's rows from its first row's, as `derive_seeds` gives them.

    Args:
        first: the seed of row 0.
        num_envs: rows.
    """
    high = first & (1 << _BITS)
    return [high | (first + _ODD * row) % (1 << _BITS) for row in range(num_envs)]
