"""`Offload`: take a network's memory off its device while others need it, and bring it back.

For train and eval workers that share a GPU and take turns (``cluster.enable_offload``). Parameters,
buffers, gradients and optimizer state keep their identity, so that optimizers and wrappers go on
with the very same objects; what they share memory with, they share it again afterwards. In between
the tensors are empty: whoever uses them by mistake gets an error of shapes, not wrong numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

__all__ = ["Offload"]


@dataclass(slots=True)
class _Piece:
    """The memory that some tensors share, on the host, and how each lies in it."""

    device: torch.device
    content: torch.Tensor
    tensors: list[tuple[torch.Tensor, tuple[int, ...], tuple[int, ...], int]]


class Offload:
    """The tensors of a network and its optimizers, on their device or on the host.

    Args:
        network: its parameters and buffers, with their gradients.
        optimizers: whose state goes along.
        gradients: whether gradients are kept; otherwise they are dropped.
    """

    def __init__(
        self,
        network: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer] = (),
        *,
        gradients: bool = True,
    ) -> None:
        self._network = network
        self._optimizers = list(optimizers)
        self._gradients = gradients
        self._pieces: list[_Piece] = []

    @property
    def size_bytes(self) -> int:
        """Memory on the host; 0 while everything is on its device."""
        return sum(piece.content.nbytes for piece in self._pieces)

    @torch.no_grad()
    def offload(self) -> None:
        """Move everything to the host and free its memory on the device; again does nothing."""
        if self._pieces:
            return
        if not self._gradients:
            for parameter in self._network.parameters():
                parameter.grad = None
        pieces: dict[int, _Piece] = {}
        for tensor in self._tensors():
            memory = tensor.untyped_storage()
            piece = pieces.get(memory.data_ptr())
            if piece is None:
                piece = _Piece(tensor.device, _on_host(tensor), [])
                pieces[memory.data_ptr()] = piece
            shape, stride = tuple(tensor.shape), tensor.stride()
            piece.tensors.append((tensor, shape, stride, int(tensor.storage_offset())))
        self._pieces = list(pieces.values())
        for piece in self._pieces:
            for tensor, *_ in piece.tensors:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=piece.device)
        if any(piece.device.type == "cuda" for piece in self._pieces):
            torch.cuda.empty_cache()  # other processes cannot use what this one's cache keeps

    @torch.no_grad()
    def reload(self) -> None:
        """Bring everything back to its device; again does nothing."""
        pieces, self._pieces = self._pieces, []
        for piece in pieces:
            memory = piece.content.to(piece.device).untyped_storage()
            for tensor, shape, stride, start in piece.tensors:
                whole = torch.empty(0, dtype=tensor.dtype, device=piece.device)
                tensor.data = whole.set_(memory, start, shape, stride)

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor once; those without elements have no memory to free."""
        seen: set[int] = set()
        for tensor in self._all_tensors():
            if id(tensor) not in seen and tensor.numel():
                seen.add(id(tensor))
                yield tensor

    def _all_tensors(self) -> Iterator[torch.Tensor]:
        yield from self._network.parameters()
        yield from self._network.buffers()
        for parameter in self._network.parameters():
            if parameter.grad is not None:
                yield parameter.grad
        for optimizer in self._optimizers:
            for state in optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of all memory behind `tensor`, in memory that a GPU copies fast from."""
    memory = tensor.untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
    content = torch.empty(raw.shape, dtype=torch.uint8, pin_memory=tensor.is_cuda)
    return content.copy_(raw)
