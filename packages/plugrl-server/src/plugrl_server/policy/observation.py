"""Read named state vectors out of an observation, and say what is there when they are not.

Needs no torch.
"""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_server.errors import ObservationError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["describe_states", "join_states"]


def describe_states(observation: Mapping[str, Any]) -> str:
    """Name the state vectors of an observation with their widths: ``states a:3,t:1``."""
    states = observation.get("states", {})
    listed = ",".join(f"{name}:{np.shape(value)[-1]}" for name, value in sorted(states.items()))
    return f"states {listed or 'none'}"


def join_states(
    observation: Mapping[str, Any], keys: Sequence[str], width: int, *, width_flag: str
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Concatenate state vectors into one float32 ``[n, width]``.

    Args:
        observation: the batched map.
        keys: which states, in order.
        width: of all of them together.
        width_flag: by which a command line sets `width`.

    Raises:
        ObservationError: a name is missing, or the widths do not add up.
    """
    states = observation["states"]
    joined: np.ndarray[Any, np.dtype[np.float32]] | None
    if len(keys) == 1 and getattr(states.get(keys[0]), "dtype", None) == np.float32:
        joined = states[keys[0]]
    else:
        with np.errstate(over="ignore"):  # what overflows is not learned from
            joined = _joined(states, keys)
    if joined is None or joined.shape[1] != width:
        raise ObservationError(
            describe_states(observation),
            f"{'+'.join(keys)}:{width}",
            hint=_hint(states, keys, width, width_flag),
        )
    return joined


def _hint(states: Mapping[str, Any], keys: Sequence[str], width: int, width_flag: str) -> str:
    """Say with which flags the policy would read what the client sends."""
    if not states:
        return "it acts on state vectors, send some"
    flags = []
    if any(key not in states for key in keys):
        keys = sorted(states)
        flags.append(f"--policy.state-keys {shlex.join(keys)}")
    found = sum(np.shape(states[key])[-1] for key in keys)
    if found != width:
        flags.append(f"{width_flag} {found}")
    return f"serve it with {' '.join(flags)}"


def _joined(
    states: Mapping[str, Any], keys: Sequence[str]
) -> np.ndarray[Any, np.dtype[np.float32]] | None:
    if any(key not in states for key in keys):
        return None
    if len(keys) == 1:
        return np.asarray(states[keys[0]], dtype=np.float32)
    return np.concatenate([states[key] for key in keys], axis=1, dtype=np.float32)
