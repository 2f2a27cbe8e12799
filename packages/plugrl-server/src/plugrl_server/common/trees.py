"""Nested mappings and dataclasses of arrays: map, cut by row, join, describe.

A tree is an array (numpy or torch), None, a mapping of trees, or a dataclass whose fields are
trees. Every array has the batch first. Knows nothing about what the arrays mean.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlightning.types.convert import is_tensor

__all__ = ["concatenate", "leaves", "map_tree", "num_rows", "take"]


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply `function` to every leaf but None; keep mappings (as dicts) and dataclasses."""
    if tree is None:
        return None
    if isinstance(tree, Mapping):
        return {key: map_tree(function, value) for key, value in tree.items()}
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changes = {
            item.name: map_tree(function, getattr(tree, item.name))
            for item in dataclasses.fields(tree)
            if item.init
        }
        return dataclasses.replace(tree, **changes)
    return function(tree)


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every leaf but None with its path."""
    if tree is None:
        return
    if type(tree) is np.ndarray:
        yield path, tree
        return
    if isinstance(tree, Mapping):
        items = [(str(key), value) for key, value in tree.items()]
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        items = [(item.name, getattr(tree, item.name)) for item in dataclasses.fields(tree)]
    else:
        yield path, tree
        return
    for key, value in items:
        yield from leaves(value, (*path, key))


def take(tree: Any, rows: Any) -> Any:
    """Take rows of every leaf: a slice gives views, an index array copies; lists are cut too."""

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, list):
            return leaf[rows] if isinstance(rows, slice) else [leaf[int(i)] for i in rows]
        return leaf[rows]

    return map_tree(cut, tree)


def concatenate(trees: Sequence[Any]) -> Any:
    """Join trees of one structure along the batch.

    Raises:
        ValueError: their structures or shapes differ.
    """
    first = trees[0]
    if len(trees) == 1 or first is None:
        return first
    if type(first) is np.ndarray:
        return np.concatenate(trees)
    if isinstance(first, Mapping):
        keys = first.keys()
        for tree in trees:
            if tree.keys() != keys:
                raise ValueError("cannot join batches whose names differ")
        return {key: concatenate([tree[key] for tree in trees]) for key in first}
    if isinstance(first, list):
        return [item for tree in trees for item in tree]
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [item.name for item in dataclasses.fields(first) if item.init]
        joined = {name: concatenate([getattr(tree, name) for tree in trees]) for name in names}
        return dataclasses.replace(first, **joined)
    if is_tensor(first):
        import torch

        return torch.cat(list(trees))
    return np.concatenate(trees)


def num_rows(tree: Any) -> int:
    """Return the batch size: the leading axis of the first leaf.

    Raises:
        ValueError: there is no leaf to read it from.
    """
    leaf = _first_leaf(tree)
    if leaf is None:
        raise ValueError("an empty tree has no batch size")
    return len(leaf)


def _first_leaf(tree: Any) -> Any:
    if type(tree) is np.ndarray:
        return tree
    if type(tree) is not dict:
        return next((leaf for _, leaf in leaves(tree)), None)
    for child in tree.values():
        leaf = _first_leaf(child)
        if leaf is not None:
            return leaf
    return None
