"""Gymnasium spaces as the JSON that Minari keeps in its metadata."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from gymnasium import spaces

from rlightning.errors import ContractError

__all__ = ["space_from_json", "space_to_json"]


def space_to_json(space: spaces.Space[Any]) -> str:
    """Describe Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of them."""
    return json.dumps(_describe(space))


def _describe(space: spaces.Space[Any]) -> dict[str, Any]:
    if isinstance(space, spaces.Box):
        described: dict[str, Any] = {
            "shape": list(space.shape),
            "low": space.low.tolist(),
            "high": space.high.tolist(),
        }
    elif isinstance(space, spaces.Discrete):
        described = {"start": int(space.start), "n": int(space.n)}
    elif isinstance(space, spaces.MultiDiscrete):
        described = {"nvec": space.nvec.tolist(), "start": np.asarray(space.start).tolist()}
    elif isinstance(space, spaces.MultiBinary):
        described = {"n": space.n if isinstance(space.n, int) else list(space.shape)}
    elif isinstance(space, spaces.Dict):
        parts = {key: _describe(part) for key, part in space.spaces.items()}
        return {"type": "Dict", "subspaces": parts}
    elif isinstance(space, spaces.Tuple):
        return {"type": "Tuple", "subspaces": [_describe(part) for part in space.spaces]}
    else:
        raise ContractError(f"the space {space} cannot be kept in a dataset")
    return {"type": type(space).__name__, "dtype": str(space.dtype), **described}


def space_from_json(text: str | dict[str, Any]) -> spaces.Space[Any]:
    """Return the space that `space_to_json`, or Minari, described.

    Raises:
        ContractError: it is of another kind.
    """
    given = json.loads(text) if isinstance(text, str) else text
    kind = given.get("type")
    if kind == "Box":
        dtype = np.dtype(given["dtype"])
        low, high = (np.array(given[name], dtype) for name in ("low", "high"))
        return spaces.Box(low, high, tuple(given["shape"]), dtype.type)
    if kind == "Discrete":
        return spaces.Discrete(int(given["n"]), start=int(given.get("start", 0)))
    if kind == "MultiDiscrete":
        return spaces.MultiDiscrete(given["nvec"], start=given.get("start"))
    if kind == "MultiBinary":
        return spaces.MultiBinary(given["n"])
    if kind == "Dict":
        return spaces.Dict({k: space_from_json(part) for k, part in given["subspaces"].items()})
    if kind == "Tuple":
        return spaces.Tuple([space_from_json(part) for part in given["subspaces"]])
    raise ContractError(f"the dataset's space is a {kind}, which holds no arrays of one shape")
