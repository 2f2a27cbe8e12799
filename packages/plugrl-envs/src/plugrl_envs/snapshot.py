"""The state of environments as plain data, enough to continue their episodes bit for bit.

A state holds only numbers, strings, bools, None, lists, dicts with string keys, and numpy arrays of
numbers, so that any format can store it, and load it without executing code. What cannot be
captured (a simulator with state of its own, such as Box2D) yields None rather than half a state.

A state belongs to an environment made in the same way: it says nothing about which environment it
came from, and callables and specifications are taken to be the same.
"""

from __future__ import annotations

import collections
import inspect
import logging
import types
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["get_env_state", "get_state", "set_env_state", "set_state"]

State = dict[str, Any]


class _Uncapturable(Exception):  # noqa: N818  # a signal inside this module, not an error
    """Something was met whose state is unknown."""


_CONSTANT = (gym.envs.registration.EnvSpec, type, types.ModuleType, logging.Logger)
"""Kinds of attributes that making the environment again makes again."""

_RENDERING = frozenset({"screen", "screens", "surf", "clock", "viewer", "mujoco_renderer"})
_CONSTRUCTION = frozenset(
    {
        "_saved_kwargs",
        "_ezpickle_args",
        "_ezpickle_kwargs",
        "_cached_spec",
        "metadata",
        "_action_set",
    }
)


def get_state(vec_env: Any) -> State | None:
    """Return the state of a vector environment, or None if a part of it cannot be captured.

    Works for `plugrl_envs` vector environments whose rows are Gymnasium environments, in this
    process or in workers, and for native vector environments in plain Python.
    """
    if hasattr(vec_env, "get_state"):
        state: State | None = vec_env.get_state()
        return state
    if hasattr(vec_env, "get_states"):
        rows = vec_env.get_states()
    elif hasattr(vec_env, "envs"):
        rows = [get_env_state(env) for env in vec_env.envs]
    else:
        rows = [get_env_state(vec_env)]
    return None if any(row is None for row in rows) else {"rows": rows}


def set_state(vec_env: Any, state: State) -> None:
    """Restore what `get_state` returned into a vector environment made in the same way.

    Raises:
        ValueError: the state is for another number of rows, or of another kind.
    """
    if hasattr(vec_env, "set_state"):
        vec_env.set_state(state)
        return
    rows = state["rows"]
    if hasattr(vec_env, "set_states"):
        expected = vec_env.num_envs
    else:
        expected = len(vec_env.envs) if hasattr(vec_env, "envs") else 1
    if len(rows) != expected:
        raise ValueError(f"the state is for {len(rows)} rows; the environment has {expected}")
    if hasattr(vec_env, "set_states"):
        vec_env.set_states(rows)
        return
    envs = vec_env.envs if hasattr(vec_env, "envs") else [vec_env]
    for env, row in zip(envs, rows, strict=True):
        set_env_state(env, row)


def get_env_state(env: Any) -> State | None:
    """Return the state of one environment and its wrappers, or None if it cannot be captured."""
    try:
        return {"layers": [_get_object(layer) for layer in _layers(env)]}
    except _Uncapturable:
        return None


def set_env_state(env: Any, state: State) -> None:
    """Restore what `get_env_state` returned into an environment made in the same way.

    Raises:
        ValueError: the state has another number of wrappers.
    """
    layers, saved = _layers(env), state["layers"]
    if len(layers) != len(saved):
        raise ValueError(
            f"the state is for an environment with {len(saved) - 1} wrappers; "
            f"this one has {len(layers) - 1}"
        )
    for layer, fields in zip(layers, saved, strict=True):
        _set_object(layer, fields)


def _layers(env: Any) -> list[Any]:
    layers = [env]
    while isinstance(layers[-1], (gym.Wrapper, gym.vector.VectorWrapper)):
        layers.append(layers[-1].env)
    return layers


def _get_object(owner: Any) -> State:
    seen: dict[int, int] = {}
    return {
        name: _encode(value, name, seen)
        for name, value in vars(owner).items()
        if not _is_structure(owner, name, value)
    }


def _is_structure(owner: Any, name: str, value: Any) -> bool:
    """Return whether an attribute is how the environment was made rather than its state."""
    if name == "env" and isinstance(owner, (gym.Wrapper, gym.vector.VectorWrapper)):
        return True
    if name in _RENDERING or name in _CONSTRUCTION or isinstance(value, _CONSTANT):
        return True
    return inspect.isroutine(value) or type(value).__name__ in ("partial", "MjModel")


def _encode(value: Any, name: str, seen: dict[int, int]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray):
        return _encode_array(value, seen)
    if isinstance(value, np.generic):
        return {"kind": "scalar", "value": _encode_array(np.asarray(value), {})}
    if type(value) in (list, tuple):
        parts = [_encode(part, name, seen) for part in value]
        return {"kind": type(value).__name__, "value": parts}
    if isinstance(value, collections.deque):
        parts = [_encode(part, name, seen) for part in value]
        return {"kind": "deque", "value": parts, "maxlen": value.maxlen}
    if type(value) in (dict, collections.OrderedDict):
        keys = [_encode(key, name, seen) for key in value]
        values = [_encode(part, name, seen) for part in value.values()]
        return {"kind": "dict", "keys": keys, "value": values}
    return _encode_known(value)


def _encode_array(value: np.ndarray[Any, Any], seen: dict[int, int]) -> State:
    if value.dtype.hasobject:
        raise _Uncapturable
    if id(value) in seen:  # one array under two names stays one array
        return {"kind": "same", "value": seen[id(value)]}
    seen[id(value)] = len(seen)
    if _is_numbers(value.dtype):
        return {"kind": "array", "value": value.copy()}
    if value.dtype.names:
        raise _Uncapturable
    content = np.frombuffer(value.tobytes(), dtype=np.uint8)
    return {"kind": "raw", "value": content, "dtype": value.dtype.str, "shape": list(value.shape)}


def _is_numbers(dtype: np.dtype[Any]) -> bool:
    """Whether an array holds numbers that are known beyond numpy: no text, date or long double."""
    return (
        dtype.isnative
        and dtype.kind in "biufc"
        and dtype.itemsize <= (16 if dtype.kind == "c" else 8)
    )


def _encode_known(value: Any) -> State:
    if isinstance(value, np.random.Generator):
        return {"kind": "generator", "value": _plain(value.bit_generator.state)}
    if isinstance(value, np.random.RandomState):
        return {"kind": "random_state", "value": _plain(value.get_state(legacy=False))}
    if isinstance(value, gym.Space):
        return {"kind": "space", "value": _space_states(value)}
    module = type(value).__module__
    if module.startswith("mujoco.") and type(value).__name__ == "MjData":
        return {"kind": "mujoco", "value": _get_mujoco(value)}
    if module.startswith("ale_py") and hasattr(value, "cloneState"):
        return {"kind": "ale", "value": _get_ale(value)}
    if module.startswith("minatar."):
        return {"kind": "object", "value": _get_object(value)}
    raise _Uncapturable


def _get_mujoco(data: Any) -> State:
    """Return the integration state and the derived arrays, which lag one substep behind it."""
    import mujoco  # whoever holds MjData has it

    kind = mujoco.mjtState.mjSTATE_INTEGRATION
    state = np.empty(mujoco.mj_stateSize(data.model, kind), dtype=np.float64)
    mujoco.mj_getState(data.model, data, state, kind)
    derived = {name: value.copy() for name, value in _mujoco_arrays(data)}
    return {"state": state, "derived": derived}


def _set_mujoco(data: Any, saved: State) -> None:
    import mujoco  # whoever holds MjData has it

    for name, value in _mujoco_arrays(data):
        other = saved["derived"].get(name)
        if other is not None and other.shape == value.shape:
            value[...] = other
    mujoco.mj_setState(data.model, data, saved["state"], mujoco.mjtState.mjSTATE_INTEGRATION)


def _mujoco_arrays(data: Any) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Return the arrays whose size the model fixes; the others live for one step only."""
    found = []
    for name in dir(data):
        if name.startswith(("_", "efc", "iefc", "island", "contact", "dof_island", "tree_island")):
            continue
        value = getattr(data, name)
        if isinstance(value, np.ndarray) and value.size and value.flags.writeable:
            found.append((name, value))
    return found


def _space_states(space: Any) -> list[Any]:
    """Return the generator states of a space and its parts, None where not seeded yet."""
    own = getattr(space, "_np_random", None)
    states = [None if own is None else _plain(own.bit_generator.state)]
    for part in _space_parts(space):
        states.extend(_space_states(part))
    return states


def _set_space_states(space: Any, states: list[Any]) -> list[Any]:
    """Restore the first of `states` into `space` and its parts; return what is left."""
    first, *rest = states
    if first is not None:
        _restore_generator(space.np_random, first)
    for part in _space_parts(space):
        rest = _set_space_states(part, rest)
    return rest


def _space_parts(space: Any) -> list[Any]:
    parts = getattr(space, "spaces", ())
    return list(parts.values()) if isinstance(parts, dict) else list(parts)


def _plain(value: Any) -> Any:
    """Return a generator's state with big integers as strings, which any format can hold."""
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    if isinstance(value, np.ndarray):
        return value.copy()
    return hex(value) if type(value) is int and value.bit_length() > 63 else value


def _unplain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _unplain(part) for key, part in value.items()}
    return int(value, 16) if isinstance(value, str) and value.startswith("0x") else value


def _restore_generator(generator: np.random.Generator, state: State) -> None:
    state = _unplain(state)
    name = type(generator.bit_generator).__name__
    if name != state["bit_generator"]:
        raise ValueError(f"the state is of a {state['bit_generator']} generator; found a {name}")
    generator.bit_generator.state = state


def _set_object(owner: Any, fields: State) -> None:
    arrays: list[np.ndarray[Any, Any]] = []
    for name, saved in fields.items():
        _set_field(owner, name, saved, arrays)


def _set_field(owner: Any, name: str, saved: Any, arrays: list[np.ndarray[Any, Any]]) -> None:
    """Restore one attribute: simulators and spaces in place, generators and plain data anew."""
    kind = saved["kind"] if isinstance(saved, dict) else None
    current = getattr(owner, name, None)
    if kind == "generator":
        setattr(owner, name, _new_generator(saved["value"]))
    elif kind == "random_state":
        random_state = current if current is not None else np.random.RandomState()
        random_state.set_state(_unplain(saved["value"]))
        setattr(owner, name, random_state)
    elif kind == "space":
        _set_space_states(current, saved["value"])
    elif kind == "mujoco":
        _set_mujoco(current, saved["value"])
    elif kind == "ale":
        _set_ale(current, saved["value"])
    elif kind == "object":
        _set_object(current, saved["value"])
    else:
        setattr(owner, name, _decode(saved, arrays))


def _new_generator(state: State) -> np.random.Generator:
    """Return a generator in `state`, which was captured from one of numpy's own kinds."""
    kinds = {
        kind.__name__: kind
        for kind in (
            np.random.PCG64,
            np.random.PCG64DXSM,
            np.random.MT19937,
            np.random.Philox,
            np.random.SFC64,
        )
    }
    name = state["bit_generator"]
    if name not in kinds:
        raise ValueError(f"the state is of a {name!r} generator; known are {', '.join(kinds)}")
    generator = np.random.Generator(kinds[name]())
    _restore_generator(generator, state)
    return generator


def _get_ale(ale: Any) -> np.ndarray[Any, Any]:
    """Return the emulator's state, and put the emulator itself through a restore.

    The state lacks what the video chip last latched, so that a sprite may be missing from the next
    frames after a restore. Both the run that goes on and the run that resumes pass through the same
    restore here, and so see the same frames.
    """
    state = ale.cloneState(include_rng=True).__getstate__()
    saved: np.ndarray[Any, Any] = np.frombuffer(state, dtype=np.uint8).copy()
    _set_ale(ale, saved)
    return saved


def _set_ale(ale: Any, saved: np.ndarray[Any, Any]) -> None:
    import ale_py  # whoever holds an ALE interface has it

    ale.reset_game()  # brings what the state lacks to one known value
    state: Any = ale_py.ALEState.__new__(ale_py.ALEState)
    state.__setstate__(saved.tobytes())
    ale.restoreState(state)


def _decode(saved: Any, arrays: list[np.ndarray[Any, Any]]) -> Any:
    if not isinstance(saved, dict):
        return saved
    kind, value = saved["kind"], saved["value"]
    if kind == "array":
        arrays.append(value.copy())
        return arrays[-1]
    if kind == "raw":
        content = np.frombuffer(value.tobytes(), dtype=saved["dtype"])
        arrays.append(content.reshape(saved["shape"]).copy())
        return arrays[-1]
    if kind == "same":
        return arrays[value]
    if kind == "scalar":
        return _decode(value, [])[()]
    parts = [_decode(part, arrays) for part in value]
    if kind == "dict":
        keys = [_decode(key, arrays) for key in saved["keys"]]
        return dict(zip(keys, parts, strict=True))
    if kind == "deque":
        return collections.deque(parts, maxlen=saved["maxlen"])
    return tuple(parts) if kind == "tuple" else parts
