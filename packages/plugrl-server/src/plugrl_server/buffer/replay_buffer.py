"""Transitions in a ring, drawn at random, for off-policy learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_server.buffer.columns import TreeColumns
from plugrl_server.common.layout import check_layout, layout_of
from plugrl_server.common.trees import num_rows, take
from rlightning.buffer.sampler import UniformSampler

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ReplayBuffer"]


class ReplayBuffer:
    """The last transitions, the oldest overwritten first.

    Args:
        buffer_size: how many are kept.
        example: a tree of arrays, batch first, whose names, shapes and dtypes transitions have.
        seed: of the draws.
    """

    def __init__(self, buffer_size: int, example: dict[str, Any], *, seed: int) -> None:
        self.buffer_size = buffer_size
        self._layout = layout_of(example)
        self._columns = TreeColumns(buffer_size, example)
        self._sampler = UniformSampler(seed=seed)
        self._next = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, transitions: dict[str, Any]) -> None:
        """Store ``m`` transitions, a tree like the example.

        Raises:
            PolicyContractError: it is not like the example.
        """
        check_layout("a transition", transitions, self._layout)
        count = num_rows(transitions)
        if count > self.buffer_size:
            transitions = take(transitions, slice(count - self.buffer_size, count))
            count = self.buffer_size
        room = min(count, self.buffer_size - self._next)
        stop = self._next + room
        self._columns.write(slice(self._next, stop), take(transitions, slice(0, room)))
        if room < count:
            self._columns.write(slice(0, count - room), take(transitions, slice(room, count)))
        self._next = (self._next + count) % self.buffer_size
        self._length = min(self._length + count, self.buffer_size)

    def sample(self, batch_size: int) -> Any:
        """Draw with replacement; a tree of tensors, copied.

        Raises:
            ValueError: there is nothing to draw from.
        """
        return self._columns.take(self._sampler.sample(batch_size, self._length))

    def state_dict(self, *, contents: bool = True) -> dict[str, Any]:
        """Copy the state of the draws, and the transitions if asked for."""
        state: dict[str, Any] = {"sampler": self._sampler.generator.bit_generator.state}
        if contents:
            columns: list[Tensor] = self._columns.state(self._length)
            state |= {"columns": columns, "next": self._next, "length": self._length}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` gave; without contents the buffer starts empty."""
        self._sampler.generator.bit_generator.state = state["sampler"]
        self._next, self._length = int(state.get("next", 0)), int(state.get("length", 0))
        if self._length > self.buffer_size:
            raise ValueError(
                f"the checkpoint holds {self._length} transitions; --algo.buffer-size is "
                f"{self.buffer_size}"
            )
        if "columns" in state:
            self._columns.load(state["columns"])

    @staticmethod
    def example(obs: Any, action: Any) -> dict[str, Any]:
        """Give the example of transitions ``obs, action -> reward, discount, next_obs``."""
        scalar = np.zeros(1, np.float32)
        return {
            "obs": obs,
            "action": action,
            "reward": scalar,
            "discount": scalar,
            "next_obs": obs,
        }
