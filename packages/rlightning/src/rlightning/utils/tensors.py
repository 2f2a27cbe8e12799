"""Where tensors live, and small module surgery. The one place device strings come from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["default_device", "set_nested_attr"]


def default_device() -> str:
    """Return the current CUDA device, or ``"cpu"`` where there is none."""
    import torch

    return f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"


def set_nested_attr(module: nn.Module, path: str, value: Any) -> None:
    """Set the attribute at a dotted `path` below `module`, for example ``"actor.trunk"``."""
    *parents, name = path.split(".")
    target: Any = module
    for parent in parents:
        target = getattr(target, parent)
    setattr(target, name, value)
