"""From time-major rows of several environments to flat columns, one environment after another."""

from __future__ import annotations

from typing import Any

import torch

from rlightning.buffer.columns import Path, as_array, leaves
from rlightning.errors import ContractError

__all__ = ["flat_columns", "flatten_env_major"]


def flatten_env_major(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[T, N, ...]`` as ``[N*T, ...]``, each environment's steps together; copied."""
    steps, rows, *rest = tensor.shape
    by_env = torch.empty((rows, steps, *rest), dtype=tensor.dtype, device=tensor.device)
    return by_env.copy_(tensor.transpose(0, 1)).flatten(0, 1)


def flat_columns(
    episode: Any, num_envs: int, *, device: str | None = None
) -> dict[Path, torch.Tensor]:
    """Return a mapping of ``[T, ...]`` or ``[T, N, ...]`` values as flat copied columns."""
    if not hasattr(episode, "items"):
        raise ContractError(
            f"expected a mapping of names to [T, ...] arrays, found a {type(episode).__name__}"
        )
    if hasattr(episode, "to_dict"):
        episode = episode.to_dict()
    rows: dict[Path, torch.Tensor] = {}
    for name, value in episode.items():
        for path, leaf in leaves(str(name), value):
            tensor = torch.as_tensor(as_array(path, leaf)).detach()
            if num_envs > 1 and (tensor.ndim < 2 or tensor.shape[1] != num_envs):
                raise ContractError(
                    f"the field {'.'.join(path)!r} has shape {tuple(tensor.shape)}; expected "
                    f"[T, {num_envs}, ...]"
                )
            tensor = flatten_env_major(tensor) if num_envs > 1 else tensor.clone()
            kept = torch.float32 if tensor.dtype == torch.float64 else tensor.dtype
            rows[path] = tensor.to(device=device or tensor.device, dtype=kept)
    lengths = {int(tensor.shape[0]) if tensor.ndim else -1 for tensor in rows.values()}
    if len(lengths) != 1 or lengths & {-1, 0}:
        raise ContractError(
            f"the transitions' fields have the lengths {sorted(lengths)}; expected one length, the "
            "number of transitions, for all"
        )
    return rows
