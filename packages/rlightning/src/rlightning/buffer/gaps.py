"""`Gaps`: rows of a segment that are no data, because an environment's client was away or lost.

An environment that lives elsewhere says so in its ``info``: ``_idle`` is true where a row repeats
what was there before, ``_lost`` where an episode begins although the one before had not ended. Idle
rows are left out, and so is all that is known of a lost episode; what remains falls into pieces,
each of which is consecutive in its environment. Knows nothing about columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlightning.buffer.columns import Indices

__all__ = ["Gaps"]


class Gaps:
    """What is missing from the rows of one worker.

    Args:
        envs: its environments N.
    """

    def __init__(self, envs: int) -> None:
        self._envs = envs
        self._idle: dict[int, np.ndarray[Any, Any]] = {}
        self._lost: dict[int, np.ndarray[Any, Any]] = {}

    def __bool__(self) -> bool:
        return bool(self._idle or self._lost)

    def note(self, row: int, info: Mapping[str, Any]) -> None:
        """Take what an environment says of a row."""
        for key, noted in (("_idle", self._idle), ("_lost", self._lost)):
            if key in info:
                noted[row] = np.asarray(info[key], dtype=bool).reshape(self._envs)

    def clear(self) -> None:
        """Forget everything."""
        self._idle, self._lost = {}, {}

    def shift(self, rows: int) -> None:
        """Take note that the first `rows` rows are gone."""
        for name in ("_idle", "_lost"):
            noted = getattr(self, name)
            setattr(self, name, {row - rows: m for row, m in noted.items() if row >= rows})

    def pieces(self, env: int, rows: range, over: Sequence[bool]) -> list[Indices]:
        """Return the rows of one environment that make transitions, piece by piece.

        Args:
            env: which environment.
            rows: the rows that there are.
            over: whether an episode ended with the step before a row, by row number.

        Returns:
            Ascending row numbers, at least two in each piece.
        """
        pieces: list[list[int]] = []
        current: list[int] = []
        for row in rows:
            if row in self._idle and self._idle[row][env]:
                continue
            if row in self._lost and self._lost[row][env]:
                while current and not over[current[-1]]:
                    current.pop()
                pieces.append(current)
                current = []
            current.append(row)
        pieces.append(current)
        return [np.asarray(piece, dtype=np.int64) for piece in pieces if len(piece) > 1]
