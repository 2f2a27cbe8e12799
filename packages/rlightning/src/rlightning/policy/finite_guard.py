"""Stop learning before NaN or infinity reaches the parameters, and say where it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rlightning.checkpoint import save_offender
from rlightning.errors import NonFiniteError
from rlightning.policy.state import find_optimizers

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator

    from torch import nn

__all__ = ["FiniteGuard"]


class FiniteGuard:
    """Checks gradients before every optimizer step, parameters after every update.

    Args:
        policy: a TRAIN policy whose optimizers are attributes.

    Attributes:
        dump_dir: where the offending tensor and its batch are saved; nowhere while None.
    """

    def __init__(self, policy: nn.Module) -> None:
        self.dump_dir: pathlib.Path | None = None
        self._policy = policy
        self._source = type(policy).__name__
        self._batch: Any = None
        self._updates = 0
        self._names = {id(tensor): name for name, tensor in policy.named_parameters()}
        for optimizer in find_optimizers(policy).values():
            optimizer.register_step_pre_hook(self._before_step)

    def watch(self, batch: Any) -> None:
        """Remember the batch that the next gradients come from, and check its floats."""
        self._batch = batch
        self._updates += 1
        for name, tensor in _leaves(batch):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
                self.check(f"{name} in the batch", tensor)

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """Raise `NonFiniteError` where `tensor` is not finite everywhere."""
        if not bool(torch.isfinite(tensor).all()):
            self._raise(name, tensor)

    def check_parameters(self) -> None:
        """Raise `NonFiniteError` naming the first parameter that is not finite."""
        parameters = list(self._policy.named_parameters())
        if parameters and not bool(_all_finite([tensor for _, tensor in parameters])):
            for name, tensor in parameters:
                self.check(f"parameter {name}", tensor.detach())

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if parameters and not bool(_all_finite([p.grad for p in parameters])):
            for parameter in parameters:
                name = self._names.get(id(parameter), "a parameter")
                self.check(f"gradient of {name}", _stored(parameter.grad))

    def _raise(self, name: str, tensor: torch.Tensor) -> None:
        where = f"{int((~torch.isfinite(tensor)).sum())} of {tensor.numel()} numbers"
        rows = (
            torch.nonzero(~torch.isfinite(tensor).reshape(tensor.shape[0], -1).all(1))
            if (tensor.ndim)
            else torch.zeros(0)
        )
        if len(rows):
            where += f", first at index {int(rows[0])}"
        error = NonFiniteError(name, source=self._source, step=self._updates, where=where)
        if self.dump_dir is not None:
            path = self.dump_dir / f"update_{self._updates}.pt"
            error.dump = save_offender(
                path, name=name, tensor=tensor.detach().clone(), batch=_plain(self._batch)
            )
        raise error


def _all_finite(tensors: list[Any]) -> torch.Tensor:
    # The norm is finite where every number is, and where their squares overflow the caller looks
    # closer; one fused pass over all tensors.
    norms = torch._foreach_norm([_stored(tensor.detach()) for tensor in tensors])
    return torch.isfinite(torch.stack(norms)).all()


def _stored(tensor: Any) -> Any:
    """Return the numbers that a sparse tensor stores; a dense tensor as it is."""
    return tensor._values() if tensor.is_sparse else tensor


def _leaves(batch: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the fields of a nested mapping with their dotted names."""
    for name, value in batch.items() if hasattr(batch, "items") else ():
        if hasattr(value, "items"):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _plain(batch: Any) -> Any:
    """Return a nested mapping as dictionaries, which load without running code."""
    if not hasattr(batch, "items"):
        return batch
    return {name: _plain(value) for name, value in batch.items()}
