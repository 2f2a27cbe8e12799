"""The fields of an environment worker's rows: found in the first row, held stable afterwards.

Every buffer turns rows into arrays here, once per step, so this is the hot path. Knows nothing
about where the arrays go.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rlightning.buffer.columns import Array, Path, as_array, dotted, leaves, torch_dtype
from rlightning.errors import ContractError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from rlightning.types import EnvMeta

__all__ = ["ENV_FLAGS", "Leaf", "RowSchema"]

ENV_FLAGS = {
    "last_reward": torch.float32,
    "last_terminated": torch.bool,
    "last_truncated": torch.bool,
    "last_steps": torch.int64,
}
"""The environment's one-number-per-row fields: always this dtype, always one axis."""


@dataclasses.dataclass(slots=True)
class Leaf:
    """One field, or one entry of a nested one."""

    path: Path
    keys: tuple[Any, ...]
    """How to get from the field's value to the entry."""
    row_shape: tuple[int, ...]
    """Shape of one environment's entry, without the row axis."""
    dtype: torch.dtype
    """Dtype of the column."""
    shapes: set[tuple[int, ...]]
    """Shapes seen so far that fit."""
    dtypes: set[Any]
    """Dtypes seen so far that fit."""

    @property
    def is_flag(self) -> bool:
        """Whether this is one of `ENV_FLAGS`."""
        return len(self.path) == 1 and self.path[0] in ENV_FLAGS


class RowSchema:
    """Checks rows and flattens them, the same leaves in the same order every time.

    Args:
        meta: the worker's spaces and number of rows N.
    """

    def __init__(self, meta: EnvMeta) -> None:
        self.rows = meta.num_envs or 1
        shape = getattr(meta.action_space, "shape", None)
        self._action_ndim = None if shape is None else len(shape)
        self.leaves: list[Leaf] = []
        self._plan: list[tuple[Leaf, str, tuple[Any, ...], set[tuple[int, ...]], set[Any]]] = []
        self._count = -1
        self._containers: list[tuple[str, tuple[Any, ...], int]] = []

    @property
    def paths(self) -> list[Path]:
        """The leaves' paths, in order; empty before the first row."""
        return [leaf.path for leaf in self.leaves]

    def arrays(self, fields: Mapping[str, Any], answered: Collection[str]) -> list[Array]:
        """Return one array per leaf, each of which broadcasts to ``[N, *row_shape]``.

        Args:
            fields: the row, by name.
            answered: the names that a policy answered: for a worker of one row they may carry a
                leading axis of one, which the environment's fields never do.

        Raises:
            ContractError: a field is missing or new, not numeric, or changes its shape or dtype.
        """
        if self._count < 0:
            self._discover(fields, answered)
        if len(fields) != self._count:
            self._explain(fields)
        out: list[Array] = []
        try:
            for leaf, name, keys, shapes, dtypes in self._plan:
                value = fields[name]
                for key in keys:
                    value = value[key]
                if type(value) is not np.ndarray:
                    value = _array(leaf.path, value)
                if value.shape not in shapes or value.dtype not in dtypes:
                    value = self._adapt(leaf, value)
                out.append(value)
            for name, keys, length in self._containers:
                value = fields[name]
                for key in keys:
                    value = value[key]
                if len(value) != length:
                    self._explain(fields)
        except (KeyError, IndexError, TypeError):
            self._explain(fields)
            raise
        return out

    # ---- the first row -------------------------------------------------------------------------

    def _discover(self, fields: Mapping[str, Any], answered: Collection[str]) -> None:
        action = fields.get("action") if "action" in answered else None
        ndim = getattr(action, "ndim", None)
        with_axis = self.rows > 1 or (
            self._action_ndim is not None and ndim == self._action_ndim + 1
        )
        found: list[Leaf] = []
        for name, value in fields.items():
            axis = with_axis if name in answered else self.rows > 1
            keys = dict(_keys(name, value))
            found += [
                self._leaf(path, keys[path], as_array(path, leaf), has_axis=axis)
                for path, leaf in leaves(name, value)
            ]
        self.leaves = found
        self._plan = [(leaf, leaf.path[0], leaf.keys, leaf.shapes, leaf.dtypes) for leaf in found]
        self._count = len(fields)
        self._containers = [
            item for name, value in fields.items() for item in _containers(name, (), value)
        ]

    def _leaf(self, path: Path, keys: tuple[Any, ...], array: Array, *, has_axis: bool) -> Leaf:
        shape = tuple(array.shape)
        if path[0] in ENV_FLAGS and len(path) == 1:
            leaf = Leaf(path, keys, (), ENV_FLAGS[path[0]], {(), (self.rows,)}, set())
            self._adapt(leaf, array)
            return leaf
        if self.rows > 1 and (not shape or shape[0] != self.rows):
            raise ContractError(
                f"the field {dotted(path)!r} has shape {shape}; expected a leading axis of "
                f"{self.rows}, one entry per environment"
            )
        row_shape = shape[1:] if has_axis and shape and shape[0] == self.rows else shape
        dtype = torch_dtype(array.dtype)
        return Leaf(
            path,
            keys,
            row_shape,
            torch.float32 if dtype == torch.float64 else dtype,
            {shape},
            {array.dtype},
        )

    # ---- rows that differ from the first -------------------------------------------------------

    def _adapt(self, leaf: Leaf, array: Array) -> Array:
        """Return `array` in a shape that fits `leaf`, and remember what is fine as it is."""
        shape = tuple(array.shape)
        if shape not in leaf.shapes:
            if not leaf.is_flag or int(np.prod(shape)) != self.rows:
                before = "one number" if leaf.is_flag else _listed(leaf.shapes)
                raise ContractError(
                    f"the field {dotted(leaf.path)!r} has shape {shape}; expected "
                    f"{before} for {self.rows} environment(s): keep the shape of every field stable"
                )
            array = array.reshape(self.rows)
        if array.dtype not in leaf.dtypes:
            found = torch_dtype(as_array(leaf.path, array).dtype)
            if leaf.dtype != torch.bool and not torch.can_cast(found, leaf.dtype):
                raise ContractError(
                    f"the field {dotted(leaf.path)!r} has dtype {array.dtype}; its column is "
                    f"{leaf.dtype}, as its first row was: keep the dtype of every field stable"
                )
            leaf.dtypes.add(array.dtype)
        return array

    def _explain(self, fields: Mapping[str, Any]) -> None:
        """Raise if the leaves of `fields` are not the first row's."""
        now = {path for name, value in fields.items() for path, _ in leaves(name, value)}
        changed = sorted(dotted(path) for path in now ^ set(self.paths))
        if changed:
            raise ContractError(
                f"the fields {changed} are not in every row: keep the fields of every row the "
                "same; what does not apply to a row can hold zeros"
            )


def _array(path: Path, value: Any) -> Array:
    """Return `value` as an array, which is checked and copied faster than a tensor, if it can be.

    Raises:
        ContractError: it holds something that is not numbers.
    """
    if not isinstance(value, torch.Tensor):
        return as_array(path, value)
    try:
        array: Array = value.numpy()
    except (RuntimeError, TypeError):  # it needs a gradient, is elsewhere, or is bfloat16
        return value
    return array


def _listed(shapes: set[tuple[int, ...]]) -> str:
    return " or ".join(str(shape) for shape in sorted(shapes))


def _keys(name: str, value: Any) -> list[tuple[Path, tuple[Any, ...]]]:
    """Return every leaf's path and the real keys (integers for tuples) that lead to it."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, tuple):
        items = list(enumerate(value))
    else:
        return [] if value is None else [((name,), ())]
    return [
        ((name, *path), (key, *rest)) for key, item in items for path, rest in _keys(str(key), item)
    ]


def _containers(
    name: str, keys: tuple[Any, ...], value: Any
) -> list[tuple[str, tuple[Any, ...], int]]:
    """Return where the nested values stand and how many entries each has."""
    if not isinstance(value, (dict, tuple)):
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    below = [item for key, entry in items for item in _containers(name, (*keys, key), entry)]
    return [(name, keys, len(value)), *below]
