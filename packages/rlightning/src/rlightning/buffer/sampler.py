"""Samplers: which rows a batch holds. Seeded, and their state goes into checkpoints."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import numpy as np

__all__ = ["AllDataSampler", "BaseSampler", "BatchSampler", "UniformSampler", "make_sampler"]

Indices: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class BaseSampler(ABC):
    """Picks row indices.

    Args:
        replacement: whether a row may stand twice in a batch.
        seed: seeds the sampler's own generator.
    """

    def __init__(self, replacement: bool = False, *, seed: int | None = None) -> None:  # noqa: FBT001, FBT002  # the documented signature
        self.replacement = replacement
        self.generator = np.random.default_rng(seed)

    @abstractmethod
    def sample(self, batch_size: int | None, data_size: int, shuffle: bool = False) -> Indices:  # noqa: FBT001, FBT002  # the documented signature
        """Return row indices, int64.

        Args:
            batch_size: rows wanted; None means as many as there are.
            data_size: rows there are.
            shuffle: whether their order is random.

        Raises:
            ValueError: there are not enough rows.
        """

    def takes_all(self, batch_size: int | None) -> bool:
        """Whether `sample` returns every row exactly once."""
        return batch_size is None and not self.replacement

    def _size(self, batch_size: int | None, data_size: int) -> int:
        if data_size < 1:
            raise ValueError("the buffer is empty; add transitions before sampling")
        return data_size if batch_size is None else batch_size


class AllDataSampler(BaseSampler):
    """Every row once; `batch_size` does not matter."""

    def takes_all(self, batch_size: int | None) -> bool:
        """Always."""
        del batch_size
        return True

    def sample(self, batch_size: int | None, data_size: int, shuffle: bool = False) -> Indices:  # noqa: FBT001, FBT002  # the documented signature
        """Return all indices, in order or shuffled."""
        self._size(batch_size, data_size)
        return self.generator.permutation(data_size) if shuffle else np.arange(data_size)


class BatchSampler(BaseSampler):
    """A batch without replacement: random where shuffled, else the first rows in order."""

    def sample(self, batch_size: int | None, data_size: int, shuffle: bool = False) -> Indices:  # noqa: FBT001, FBT002  # the documented signature
        """Return distinct indices."""
        size = self._size(batch_size, data_size)
        if size > data_size:
            raise ValueError(f"a batch of {size} rows was asked of {data_size}")
        if not shuffle:
            return np.arange(size)
        return self.generator.choice(data_size, size, replace=False)


class UniformSampler(BaseSampler):
    """A batch with replacement."""

    def __init__(self, replacement: bool = True, *, seed: int | None = None) -> None:  # noqa: FBT001, FBT002  # the documented signature
        super().__init__(replacement, seed=seed)

    def sample(self, batch_size: int | None, data_size: int, shuffle: bool = False) -> Indices:  # noqa: FBT001, FBT002  # the documented signature
        """Return independent uniform indices; their order is random either way."""
        del shuffle
        return self.generator.integers(data_size, size=self._size(batch_size, data_size))


_SAMPLERS: dict[str, type[AllDataSampler | BatchSampler | UniformSampler]] = {
    "all": AllDataSampler,
    "batch": BatchSampler,
    "uniform": UniformSampler,
}


def make_sampler(kind: str, *, seed: int | None = None) -> BaseSampler:
    """Return the sampler that ``sampler.type`` names."""
    return _SAMPLERS[kind](seed=seed)
