"""Frames of many environments in the order in which they arrived, for on-policy learning.

Environments take turns as they please, so frames are kept flat; `Segments` lines each environment's
frames up as a column of a ``[T, N]`` block, the form in which rlightning's `ops.returns` computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from plugrl_server.buffer.columns import TreeColumns
from plugrl_server.common.layout import check_layout, layout_of
from plugrl_server.common.trees import concatenate, leaves, take

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Bootstrap", "RolloutBuffer", "Segments"]

Indices = np.ndarray[Any, np.dtype[np.int64]]


class Bootstrap(NamedTuple):
    """Frames whose value needs the observation that followed, of clients that show the same.

    Attributes:
        frames: their positions, ``[K]``.
        observation: a batch of K rows, as policies take it.
    """

    frames: Indices
    observation: dict[str, Any]


class Segments:
    """Each environment's frames as a column of a block.

    A column shorter than the block is filled up with zeros behind its end, which leave every
    recursion that runs backwards untouched.

    Args:
        chains: which environment each frame belongs to, ``[n]``, in the order of arrival.
    """

    def __init__(self, chains: Indices) -> None:
        order = np.argsort(chains, kind="stable")
        _, starts, lengths = np.unique(chains[order], return_index=True, return_counts=True)
        column = np.repeat(np.arange(len(lengths)), lengths)
        time = np.arange(len(chains)) - np.repeat(starts, lengths)
        self._shape = (int(lengths.max()), len(lengths))
        self._order = torch.from_numpy(order)
        self._cell = torch.from_numpy(time * len(lengths) + column)
        self.last = order[starts + lengths - 1]
        """Position of each chain's last frame, ``[N]``."""
        follows = column[1:] == column[:-1]
        self._before, self._after = order[:-1][follows], order[1:][follows]

    def block(self, flat: Tensor) -> Tensor:
        """Put ``[n]`` into a block ``[T, N]``."""
        block = torch.zeros(self._shape, dtype=flat.dtype).view(-1)
        block[self._cell] = flat[self._order]
        return block.view(self._shape)

    def flat(self, block: Tensor) -> Tensor:
        """Undo `block`."""
        flat = torch.empty(len(self._order), dtype=block.dtype)
        flat[self._order] = block.reshape(-1)[self._cell]
        return flat

    def shift(self, value: Tensor) -> Tensor:
        """Give each frame the value of the next in its chain; zero for the last, ``[n]``."""
        shifted = torch.zeros_like(value)
        shifted[self._before] = value[self._after]
        return shifted


class RolloutBuffer:
    """Frames until the next learn step.

    Args:
        buffer_size: frames that make it full; a message that goes over is still stored whole.
        example_train_state: a train state of any batch size.
    """

    def __init__(self, buffer_size: int, example_train_state: Any) -> None:
        self.buffer_size = buffer_size
        self._layout = layout_of(example_train_state)
        scalars = {
            "chain": np.zeros(1, np.int64),
            "reward": np.zeros(1, np.float32),
            "steps": np.zeros(1, np.int64),
            "terminated": np.zeros(1, np.bool_),
            "truncated": np.zeros(1, np.bool_),
        }
        self._columns = TreeColumns(buffer_size, {"state": example_train_state, **scalars})
        self._length = 0
        # chain -> its newest frame, with what followed; position -> what followed, where truncated
        self._tails: dict[int, tuple[int, dict[str, Any], int]] = {}
        self._truncated: list[tuple[int, dict[str, Any], int]] = []

    def __len__(self) -> int:
        return self._length

    def full(self) -> bool:
        """Whether it is time to learn."""
        return self._length >= self.buffer_size

    def add(  # the columns of one frame
        self,
        *,
        train_state: Any,
        chains: Indices,
        rewards: Any,
        steps: Any,
        terminated: Any,
        truncated: Any,
        next_obs: dict[str, Any],
    ) -> None:
        """Store frames; every argument has ``m`` rows.

        Raises:
            PolicyContractError: the train state is not like the example.
        """
        check_layout("the train state", train_state, self._layout)
        start, stop = self._length, self._length + len(chains)
        if stop > self._columns.capacity:
            self._columns.grow(stop)
        scalars = {"chain": chains, "reward": rewards, "steps": steps}
        ends = {"terminated": terminated, "truncated": truncated}
        self._columns.write(slice(start, stop), {"state": train_state, **scalars, **ends})
        self._length = stop
        for row, chain in enumerate(chains.tolist()):
            self._tails[chain] = (start + row, next_obs, row)
        if truncated.any():
            for row in np.flatnonzero(truncated & ~terminated).tolist():
                self._truncated.append((start + row, next_obs, row))

    def read(self) -> dict[str, Any]:
        """Give all frames as tensors that share memory with the buffer.

        Returns:
            ``state`` (a tree), ``chain``, ``reward``, ``steps``, ``terminated``, ``truncated``.
        """
        rows: dict[str, Any] = self._columns.read(self._length)
        return rows

    def bootstrap(self) -> list[Bootstrap]:
        """Find the frames that look at what followed: truncated ones, and each chain's last.

        Clients may show more than the policy looks at, and not all the same: observations of other
        names or shapes are a batch of their own.
        """
        terminated = self.read()["terminated"]
        wanted = {frame: (obs, row) for frame, obs, row in self._truncated}
        for frame, obs, row in self._tails.values():
            if not terminated[frame]:
                wanted[frame] = (obs, row)
        groups: dict[Any, list[tuple[int, Any]]] = {}
        for frame, (obs, row) in sorted(wanted.items()):
            shown = tuple((path, np.shape(leaf)[1:]) for path, leaf in leaves(obs))
            piece = take(obs, slice(row, row + 1))
            groups.setdefault(shown, []).append((frame, piece))
        return [
            Bootstrap(
                np.array([frame for frame, _ in group], np.int64),
                concatenate([piece for _, piece in group]),
            )
            for group in groups.values()
        ]

    def reset(self) -> None:
        """Forget everything."""
        self._length = 0
        self._tails.clear()
        self._truncated.clear()

    # ---- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Copy the frames, as plain data and tensors."""
        following = {"tails": list(self._tails.values()), "truncated": self._truncated}
        return {
            "length": self._length,
            "columns": self._columns.state(self._length),
            "chains": list(self._tails),
            **{
                name: [[at, _plain(take(obs, slice(row, row + 1)))] for at, obs, row in entries]
                for name, entries in following.items()
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave."""
        self.reset()
        self._length = int(state["length"])
        if self._length > self._columns.capacity:
            self._columns.grow(self._length)
        self._columns.load(state["columns"])
        tails = [(at, _arrays(obs), 0) for at, obs in state["tails"]]
        self._tails = dict(zip(state["chains"], tails, strict=True))
        self._truncated = [(at, _arrays(obs), 0) for at, obs in state["truncated"]]


def _plain(observation: Any) -> Any:
    """Write strings as lists: a checkpoint holds numbers in arrays."""
    if isinstance(observation, Mapping):
        return {key: _plain(value) for key, value in observation.items()}
    is_text = isinstance(observation, np.ndarray) and observation.dtype.kind == "U"
    return observation.tolist() if is_text else observation


def _arrays(observation: Any) -> Any:
    if isinstance(observation, Mapping):
        return {key: _arrays(value) for key, value in observation.items()}
    return np.array(observation) if isinstance(observation, list) else observation
