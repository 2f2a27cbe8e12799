"""Join the rows of several environment workers for one inference call, and split the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlightning.errors import ContractError
from rlightning.types import EnvRet, PolicyResponse, map_leaves

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ROW_OWNERS", "join_rows", "rows_of", "split_rows"]

ROW_OWNERS = "_row_owners"
"""Key of a joined ``info``: (environment id, number of rows) of each worker, in order."""
_MASKS = ("_final_obs", "_idle", "_lost")


def rows_of(env_ret: EnvRet) -> int | None:
    """Return how many rows `env_ret` has, or None where it is one row without a leading axis."""
    flags = env_ret.last_terminated
    return int(flags.shape[0]) if getattr(flags, "ndim", 0) else None


def join_rows(env_rets: Sequence[EnvRet]) -> EnvRet:
    """Return one `EnvRet` with the rows of all, in order, always with a leading row axis.

    Of `info` only ``final_obs`` and the masks of rows are joined; rows whose episode did not end
    hold their current observation in ``final_obs``. `ROW_OWNERS` says whose the rows are.
    """
    counts = [rows_of(env_ret) for env_ret in env_rets]
    if len(env_rets) == 1 and counts[0] is not None:
        return env_rets[0]

    def joined(values: list[Any]) -> Any:
        with_axis = [
            map_leaves(_add_axis, value) if count is None else value
            for value, count in zip(values, counts, strict=True)
        ]
        return _concatenate(with_axis)

    owners = ((env_ret.env_id, count or 1) for env_ret, count in zip(env_rets, counts, strict=True))
    info: dict[str, Any] = {ROW_OWNERS: tuple(owners)}
    for key in _MASKS:
        if any(key in env_ret.info for env_ret in env_rets):
            masks = [
                env_ret.info.get(key, np.zeros(() if count is None else count, dtype=bool))
                for env_ret, count in zip(env_rets, counts, strict=True)
            ]
            info[key] = joined(masks)
    if "_final_obs" in info:
        info["final_obs"] = joined(
            [env_ret.info.get("final_obs", env_ret.observation) for env_ret in env_rets]
        )
    return EnvRet(
        env_id="+".join(env_ret.env_id for env_ret in env_rets),
        observation=joined([env_ret.observation for env_ret in env_rets]),
        last_reward=joined([env_ret.last_reward for env_ret in env_rets]),
        last_terminated=joined([env_ret.last_terminated for env_ret in env_rets]),
        last_truncated=joined([env_ret.last_truncated for env_ret in env_rets]),
        info=info,
    )


def split_rows(response: PolicyResponse, env_rets: Sequence[EnvRet]) -> list[PolicyResponse]:
    """Return one response per `EnvRet`, each with its own rows; undoes `join_rows`.

    Raises:
        ContractError: a field has not one entry per row.
    """
    counts = [rows_of(env_ret) for env_ret in env_rets]
    total = sum([1 if count is None else count for count in counts])
    for name, value in response.extras.items():
        shape = value.shape if type(value) is torch.Tensor else None
        if not shape or shape[0] != total:
            _check_rows(name, value, total)
    if len(env_rets) == 1 and counts[0] is not None:
        response.env_id = env_rets[0].env_id
        return [response]
    parts: list[PolicyResponse] = []
    start = 0
    for env_ret, count in zip(env_rets, counts, strict=True):
        rows: int | slice = start if count is None else slice(start, start + count)
        start += 1 if count is None else count
        fields = {name: _take(value, rows) for name, value in response.extras.items()}
        parts.append(PolicyResponse(env_ret.env_id, **fields))
    return parts


def _check_rows(name: str, value: Any, total: int) -> None:
    def check(leaf: Any) -> Any:
        shape = getattr(leaf, "shape", None)
        if leaf is not None and (not shape or shape[0] != total):
            kind = type(value if isinstance(value, list) else leaf).__name__
            found = f"has shape {tuple(shape)}" if shape is not None else f"is of type {kind}"
            raise ContractError(
                f"the response field {name!r} {found}; a policy with batched_rollout = True "
                f"answers a tensor or array with one entry per row, here [{total}, ...]"
            )
        return leaf

    map_leaves(check, value)


def _take(value: Any, rows: int | slice) -> Any:
    return map_leaves(lambda leaf: None if leaf is None else leaf[rows], value)


def _add_axis(leaf: Any) -> Any:
    return leaf[None] if isinstance(leaf, (torch.Tensor, np.ndarray)) else np.asarray(leaf)[None]


def _concatenate(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict):
        return {key: _concatenate([value[key] for value in values]) for key in first}
    if isinstance(first, tuple):
        return tuple(_concatenate(list(items)) for items in zip(*values, strict=True))
    tensor = next((value for value in values if isinstance(value, torch.Tensor)), None)
    if tensor is not None:
        return torch.cat([torch.as_tensor(value, device=tensor.device) for value in values])
    return np.concatenate(values)
