"""`Layout`: how a set of weights lies in one contiguous piece of memory.

A set is any nesting of dictionaries, lists and tuples with tensors, numpy arrays and plain values
as leaves. Every tensor takes a stretch that begins at a multiple of 64 bytes; the rest is an
outline. Two sets with equal layouts may take turns in the same memory. Knows nothing about
versions, readers or processes; the memory may be on any device.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rlightning.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Entry", "Layout", "copy_into", "memory_for"]

_ALIGNMENT = 64
_PLAIN = (str, int, float, bool, type(None))


class Entry(NamedTuple):
    """One tensor of a set, and where it lies."""

    name: str
    """Where it stands in the set, for messages: ``weights.actor.0.weight``."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Its first byte."""
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The outline of a set and the stretch of each of its tensors."""

    outline: Any
    """Nested lists: a tag and its children; tensors are numbered in the order of `entries`."""
    entries: tuple[Entry, ...]
    size_bytes: int
    """Memory that the tensors take together, gaps included."""

    @classmethod
    def of(cls, weights: Any) -> tuple[Layout, list[torch.Tensor]]:
        """Return the layout of a set and its tensors, in the order of `entries`.

        Raises:
            ContractError: it holds a sparse tensor, or a named tuple.
        """
        walk = _Walk()
        outline = walk.outline(weights, "")
        return cls(outline, tuple(walk.entries), walk.end), walk.tensors

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors that lie in `memory`, a ``[>= size_bytes]`` uint8 tensor."""
        return [
            memory[entry.start : entry.start + entry.size_bytes].view(entry.dtype).view(entry.shape)
            for entry in self.entries
        ]

    def build(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the set whose tensors these are, without copying them."""
        return _build(self.outline, tensors)

    def to_json(self) -> bytes:
        """Return the layout as text, for another process.

        Raises:
            ContractError: the set holds a value that text cannot carry.
        """
        entries = [
            (entry.name, str(entry.dtype).removeprefix("torch."), entry.shape, entry.start)
            for entry in self.entries
        ]
        return json.dumps([self.outline, entries, self.size_bytes], default=_refuse).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Layout:
        """Return the layout that `to_json` wrote."""
        outline, entries, size_bytes = json.loads(text)
        return cls(outline, tuple(_entry(*entry) for entry in entries), size_bytes)


def memory_for(layout: Layout, device: torch.device | str) -> torch.Tensor:
    """Return new uint8 memory that a set of this layout fits into."""
    return torch.empty(layout.size_bytes, dtype=torch.uint8, device=device)


@torch.no_grad()
def copy_into(views: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """Copy each tensor into its view.

    Copies that leave a GPU are waited for; copies within one are ordered by its stream.
    """
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)


class _Walk:
    """Collects the tensors of a set while it is outlined."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.tensors: list[torch.Tensor] = []
        self.end = 0

    def outline(self, value: Any, name: str) -> Any:
        if isinstance(value, torch.Tensor):
            return ["t", self._add(value.detach(), name)]
        if isinstance(value, np.ndarray):
            return [
                "n",
                self._add(torch.from_numpy(np.require(value, requirements=["C", "W"])), name),
            ]
        if isinstance(value, Mapping):
            children = [self.outline(item, f"{name}.{key}") for key, item in value.items()]
            return ["d", list(value), children]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            raise ContractError(
                f"{name[1:] or 'the weights'} is a {type(value).__name__}; weights are nested "
                "dictionaries, lists and tuples"
            )
        if isinstance(value, (list, tuple)):
            children = [self.outline(item, f"{name}.{i}") for i, item in enumerate(value)]
            return ["l" if isinstance(value, list) else "u", children]
        return ["v", value]

    def _add(self, tensor: torch.Tensor, name: str) -> int:
        if tensor.layout is not torch.strided:
            raise ContractError(f"{name[1:]} is a sparse tensor; weights are dense tensors")
        entry = _entry(name[1:], tensor.dtype, tuple(tensor.shape), self.end)
        self.end += entry.size_bytes + -entry.size_bytes % _ALIGNMENT
        self.entries.append(entry)
        self.tensors.append(tensor)
        return len(self.entries) - 1


def _entry(name: str, dtype: torch.dtype | str, shape: Sequence[int], start: int) -> Entry:
    kind: torch.dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    count = 1
    for size in shape:
        count *= size
    return Entry(name, kind, tuple(shape), start, count * kind.itemsize)


def _build(node: Any, tensors: Sequence[torch.Tensor]) -> Any:
    tag, content = node[0], node[1]
    if tag == "t":
        return tensors[content]
    if tag == "n":
        return tensors[content].cpu().numpy()
    if tag == "v":
        return content
    if tag == "d":
        return {key: _build(item, tensors) for key, item in zip(content, node[2], strict=True)}
    children = [_build(item, tensors) for item in content]
    return children if tag == "l" else tuple(children)


def _refuse(value: Any) -> Any:
    raise ContractError(
        f"the weights hold a {type(value).__name__}; between processes they are tensors, arrays, "
        "numbers and text in dictionaries, lists and tuples"
    )
