"""The four messages as frozen values: what may be in them, and how they look as maps.

``parse_*`` takes a decoded frame and gives a checked message or raises `MalformedMessageError`;
``to_wire`` gives the map to encode. Every rule that needs no memory of the connection is here;
the module knows nothing of turns, time or sockets.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from plugrl_protocol.errors import MalformedMessageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from plugrl_protocol.templates import Array

PROTOCOL_VERSION: Final = 1
SERVER_NAME: Final = "plugrl-server"
FEATURE_REUSE: Final = "reuse-feedback-obs"
FEATURE_STEPS: Final = "chunk-steps"
ALL_FEATURES: Final = (FEATURE_REUSE, FEATURE_STEPS)

MAX_ENV_INDEX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Observation:
    """What a batch of envs sees. Maps may be empty; every array has the same leading dimension."""

    images: Mapping[str, npt.NDArray[np.uint8]] = field(default_factory=dict)
    """Name to ``|u1 [n, h, w, c]``."""
    states: Mapping[str, Array] = field(default_factory=dict)
    """Name to floating ``[n, d]``."""
    text: npt.NDArray[np.str_]
    """``<U [n]``: one instruction per env, ``""`` where there is none."""

    def __len__(self) -> int:
        return len(self.text)

    def arrays(self) -> Iterator[tuple[str, str, Array]]:
        """Yield ``(group, name, array)`` for every array of the observation, text last."""
        for name, image in self.images.items():
            yield "images", name, image
        for name, state in self.states.items():
            yield "states", name, state
        yield "text", "text", self.text

    def rows(self, index: npt.NDArray[Any] | slice) -> Observation:
        """Take rows: a view for a slice, a copy for an index or mask array."""
        return Observation(
            images={name: array[index] for name, array in self.images.items()},
            states={name: array[index] for name, array in self.states.items()},
            text=self.text[index],
        )

    def finite(self) -> npt.NDArray[np.bool_]:
        """Tell which rows are finite, ``|b1 [n]``: others must not be learned from."""
        rows = np.ones(len(self), np.bool_)
        for state in self.states.values():
            rows &= np.isfinite(state).all(axis=1)
        return rows

    def to_wire(self) -> dict[str, Any]:
        """Give the ``obs`` map of the wire."""
        return {"images": dict(self.images), "states": dict(self.states), "text": self.text}


def make_observation(
    *,
    num_envs: int,
    images: Mapping[str, Array] | None = None,
    states: Mapping[str, Array] | None = None,
    text: str | list[str] | Array | None = None,
) -> Observation:
    """Build an observation from what an environment gives.

    Args:
        num_envs: n, the leading dimension.
        images: name to ``uint8 [n, h, w, c]``.
        states: name to floating or integer ``[n, d]``; integers are converted.
        text: one string for all envs, or n of them; None means empty strings.

    Raises:
        MalformedMessageError: a dtype or a shape that the wire does not carry.
    """
    if text is None or isinstance(text, str):
        text = np.full(num_envs, text or "")
    return parse_observation(
        {"images": dict(images or {}), "states": dict(states or {}), "text": text}, num_envs
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metadata:
    """What the server says about itself, first and once. Absent means unknown, never zero."""

    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def features(self) -> frozenset[str]:
        """The features that the server lists."""
        listed = self.values.get("features", ())
        if not isinstance(listed, (list, tuple)):
            return frozenset()
        return frozenset(name for name in listed if isinstance(name, str))

    def positive(self, key: str) -> int | None:
        """Read a key such as ``action_horizon``: a positive int, or None when unknown."""
        value = self.values.get(key)
        return value if isinstance(value, int) and value > 0 else None

    def to_wire(self) -> dict[str, Any]:
        """Give the message map."""
        return {"message_type": "metadata", "data": dict(self.values)}


def make_metadata(
    *,
    server_version: str | None = None,
    algorithm: str | None = None,
    policy: str | None = None,
    action_horizon: int | None = None,
    action_dim: int | None = None,
    features: tuple[str, ...] = ALL_FEATURES,
    extra: Mapping[str, Any] | None = None,
) -> Metadata:
    """Build the metadata of a server; what is None is left out."""
    known = {
        "protocol_version": PROTOCOL_VERSION,
        "server": SERVER_NAME,
        "server_version": server_version,
        "algorithm": algorithm,
        "policy": policy,
        "action_horizon": action_horizon,
        "action_dim": action_dim,
        "features": list(features),
    }
    values = {key: value for key, value in known.items() if value is not None}
    return Metadata(values={**values, **(extra or {})})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Infer:
    """A client asks for actions of the envs whose chunk ran out (n of them)."""

    env_indices: npt.NDArray[np.int64]
    """``<i8 [n]``, unique."""
    step_ids: npt.NDArray[np.int64]
    """``<i8 [n]``: completed chunks in each env's episode."""
    observation: Observation
    """n rows; with ``reuse`` only the rows that are false there, in order."""
    reuse: npt.NDArray[np.bool_] | None = None
    """``|b1 [n]``: rows whose observation is that of the env's last feedback."""

    def to_wire(self) -> dict[str, Any]:
        """Give the message map."""
        message = {
            "message_type": "infer",
            "data": self.observation.to_wire(),
            "env_indices": self.env_indices,
            "step_ids": self.step_ids,
        }
        if self.reuse is not None:
            message["reuse"] = self.reuse
        return message


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Action:
    """The answer to one `Infer`: a chunk of H actions for each of its n envs."""

    env_ids: npt.NDArray[np.int64]
    """``<i8 [n]``: the ``env_indices`` of the infer, in its order."""
    action: Array
    """``[H, n, *da]``, time-major."""

    def to_wire(self) -> dict[str, Any]:
        """Give the message map."""
        return {
            "message_type": "action",
            "data": {"env_ids": self.env_ids, "action": self.action},
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Feedback:
    """What became of the chunks that finished on this step (m of them)."""

    env_indices: npt.NDArray[np.int64]
    """``<i8 [m]``, unique; need not equal the infer's."""
    step_ids: npt.NDArray[np.int64]
    """``<i8 [m]``."""
    observation: Observation
    """m rows; on a done the terminal observation."""
    rewards: Array
    """Floating ``[m]``: the sum over the chunk."""
    terminated: npt.NDArray[np.bool_]
    """``|b1 [m]``."""
    truncated: npt.NDArray[np.bool_]
    """``|b1 [m]``."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Free; split by `split_info`."""
    steps: npt.NDArray[np.int64] | None = None
    """``<i8 [m]``: env steps that each chunk ran (feature ``chunk-steps``)."""

    @property
    def done(self) -> npt.NDArray[np.bool_]:
        """``|b1 [m]``: rows whose episode ended."""
        ended: npt.NDArray[np.bool_] = self.terminated | self.truncated
        return ended

    def to_wire(self) -> dict[str, Any]:
        """Give the message map."""
        message = {
            "message_type": "feedback",
            "env_indices": self.env_indices,
            "step_ids": self.step_ids,
            "data": {
                "obs": self.observation.to_wire(),
                "rewards": self.rewards,
                "terminated": self.terminated,
                "truncated": self.truncated,
                "info": dict(self.info),
            },
        }
        if self.steps is not None:
            message["steps"] = self.steps
        return message


# ----------------------------------------------------------------------------------------- parse


def _describe(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of dtype {value.dtype.str} and shape {list(value.shape)}"
    return f"a {type(value).__name__}"


def _field(message: Mapping[str, Any], key: str, where: str) -> Any:
    try:
        return message[key]
    except KeyError:
        raise MalformedMessageError(f"{where} lacks the key {key!r}") from None


def _map(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MalformedMessageError(f"{where} is {_describe(value)}, expected a map")
    return value


def _vector(value: Any, dtype: type[np.generic], length: int | None, where: str) -> Array:
    """Check a vector: exact dtype, one dimension, ``length`` entries (None: any but zero)."""
    if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
        wanted = np.dtype(dtype).str
        raise MalformedMessageError(f"{where} is {_describe(value)}, expected {wanted} [n]")
    if length is None and len(value) == 0:
        raise MalformedMessageError(f"{where} is empty; a message names at least one env")
    if length is not None and len(value) != length:
        raise MalformedMessageError(f"{where} has {len(value)} entries for {length} envs")
    return value


def _least(array: Array) -> Any:
    """Find the smallest entry; `min` costs twice as much where there is but one."""
    listed = array.tolist()
    return listed[0] if len(listed) == 1 else min(listed)


def check_env_indices(indices: Array, where: str) -> None:
    """Refuse negative, huge or repeated env indices in an ``<i8 [n]``."""
    listed = indices.tolist()
    if min(listed) < 0 or max(listed) > MAX_ENV_INDEX:
        raise MalformedMessageError(f"{where} holds a negative or huge index")
    if len(listed) > 1 and len(set(listed)) != len(listed):
        raise MalformedMessageError(f"{where} names an env twice")


def check_step_ids(step_ids: Array, where: str) -> None:
    """Refuse negative step ids in an ``<i8 [n]``."""
    if _least(step_ids) < 0:
        raise MalformedMessageError(f"{where} holds a negative step id")


def check_steps(steps: Array) -> None:
    """Refuse chunks of no step in an ``<i8 [m]``."""
    if _least(steps) < 1:
        raise MalformedMessageError("feedback.steps holds a number below 1")


def check_rewards(rewards: Array) -> None:
    """Refuse a reward that is NaN or infinite in a floating ``[m]``."""
    # A sum is finite only if no term is NaN or infinite; the other way round it may overflow.
    if not isfinite(sum(rewards.tolist())) and not np.isfinite(rewards).all():
        raise MalformedMessageError("feedback.data.rewards holds a NaN or an infinity")


def _env_indices(value: Any, where: str) -> npt.NDArray[np.int64]:
    indices = _vector(value, np.int64, None, where)
    check_env_indices(indices, where)
    return indices


def _step_ids(value: Any, length: int, where: str) -> npt.NDArray[np.int64]:
    step_ids = _vector(value, np.int64, length, where)
    check_step_ids(step_ids, where)
    return step_ids


def _text(value: Any, length: int, where: str) -> npt.NDArray[np.str_]:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        value = np.array(value, dtype=np.str_) if value else np.zeros(0, "<U1")
    if not isinstance(value, np.ndarray) or value.dtype.kind != "U" or value.ndim != 1:
        raise MalformedMessageError(f"{where} is {_describe(value)}, expected n strings")
    if len(value) != length:
        raise MalformedMessageError(f"{where} has {len(value)} entries for {length} rows")
    return value


def _image(value: Any, length: int, where: str) -> npt.NDArray[np.uint8]:
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 4:
        raise MalformedMessageError(f"{where} is {_describe(value)}, expected |u1 [n, h, w, c]")
    if len(value) != length:
        raise MalformedMessageError(f"{where} has {len(value)} rows, expected {length}")
    return value


def _state(value: Any, length: int, where: str) -> Array:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu" or value.ndim != 2:
        raise MalformedMessageError(f"{where} is {_describe(value)}, expected floating [n, d]")
    if len(value) != length:
        raise MalformedMessageError(f"{where} has {len(value)} rows, expected {length}")
    if value.dtype.kind != "f":
        value = value.astype(np.result_type(value.dtype, np.float32))
    state: Array = value
    return state


def parse_observation(value: Any, length: int, where: str = "obs") -> Observation:
    """Check an ``obs`` map.

    Args:
        value: the decoded map.
        length: the leading dimension that every array must have.
        where: how errors name it.

    Raises:
        MalformedMessageError: a key missing, a wrong dtype, shape or leading dimension.
    """
    groups = _map(value, where)
    images = _map(_field(groups, "images", where), f"{where}.images")
    states = _map(_field(groups, "states", where), f"{where}.states")
    return Observation(
        images={k: _image(v, length, f"{where}.images[{k!r}]") for k, v in images.items()},
        states={k: _state(v, length, f"{where}.states[{k!r}]") for k, v in states.items()},
        text=_text(_field(groups, "text", where), length, f"{where}.text"),
    )


def message_type(message: Any) -> str:
    """Read ``message_type`` of a decoded frame.

    Raises:
        MalformedMessageError: the root is no map, or the key is missing or no string.
    """
    kind = _field(_map(message, "the message"), "message_type", "the message")
    if not isinstance(kind, str):
        raise MalformedMessageError(f"message_type is {_describe(kind)}, expected a string")
    return kind


def parse_metadata(message: dict[str, Any]) -> Metadata:
    """Check a ``metadata`` message; no key inside is required."""
    return Metadata(values=_map(_field(message, "data", "metadata"), "metadata.data"))


def parse_infer(message: dict[str, Any]) -> Infer:
    """Check an ``infer`` message.

    Raises:
        MalformedMessageError: anything that breaks the page.
    """
    env_indices = _env_indices(_field(message, "env_indices", "infer"), "infer.env_indices")
    n = len(env_indices)
    rows, reuse = n, None
    if "reuse" in message:
        reuse = _vector(message["reuse"], np.bool_, n, "infer.reuse")
        rows = n - int(np.count_nonzero(reuse))
    return Infer(
        env_indices=env_indices,
        step_ids=_step_ids(_field(message, "step_ids", "infer"), n, "infer.step_ids"),
        observation=parse_observation(_field(message, "data", "infer"), rows, "infer.data"),
        reuse=reuse,
    )


def parse_action(message: dict[str, Any]) -> Action:
    """Check an ``action`` message.

    Raises:
        MalformedMessageError: anything that breaks the page.
    """
    content = _map(_field(message, "data", "action"), "action.data")
    env_ids = _env_indices(_field(content, "env_ids", "action.data"), "action.data.env_ids")
    action = _field(content, "action", "action.data")
    if not isinstance(action, np.ndarray) or action.dtype.kind not in "fiub" or action.ndim < 2:
        raise MalformedMessageError(
            f"action.data.action is {_describe(action)}, expected [H, n, ...]"
        )
    if action.shape[0] == 0 or action.shape[1] != len(env_ids):
        raise MalformedMessageError(
            f"action.data.action has shape {list(action.shape)}, expected [H >= 1, {len(env_ids)}, "
            "...]: time first, then envs"
        )
    return Action(env_ids=env_ids, action=action)


def parse_feedback(message: dict[str, Any]) -> Feedback:
    """Check a ``feedback`` message, including that its ``info`` can be split.

    Raises:
        MalformedMessageError: anything that breaks the page.
    """
    env_indices = _env_indices(_field(message, "env_indices", "feedback"), "feedback.env_indices")
    m = len(env_indices)
    content = _map(_field(message, "data", "feedback"), "feedback.data")
    info = _map(_field(content, "info", "feedback.data"), "feedback.data.info")
    _check_splittable(info, m)
    steps = None
    if "steps" in message:
        steps = _vector(message["steps"], np.int64, m, "feedback.steps")
        check_steps(steps)
    return Feedback(
        env_indices=env_indices,
        step_ids=_step_ids(_field(message, "step_ids", "feedback"), m, "feedback.step_ids"),
        observation=parse_observation(_field(content, "obs", "feedback.data"), m, "feedback.obs"),
        rewards=_rewards(_field(content, "rewards", "feedback.data"), m),
        terminated=_flags(content, "terminated", m),
        truncated=_flags(content, "truncated", m),
        info=info,
        steps=steps,
    )


def _flags(content: Mapping[str, Any], key: str, length: int) -> npt.NDArray[np.bool_]:
    value = _field(content, key, "feedback.data")
    return _vector(value, np.bool_, length, f"feedback.data.{key}")


def _rewards(value: Any, length: int) -> Array:
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f" or value.shape != (length,):
        raise MalformedMessageError(
            f"feedback.data.rewards is {_describe(value)}, expected floating [{length}]"
        )
    check_rewards(value)
    return value


# ------------------------------------------------------------------------------------------ info


def _has_rows(value: Any, length: int) -> bool:
    return isinstance(value, np.ndarray) and value.ndim > 0 and len(value) == length


def _check_splittable(info: Mapping[str, Any], length: int) -> None:
    if not info or length == 1:
        return
    for value in info.values():
        if _has_rows(value, length):
            return
        if isinstance(value, dict) and any(_has_rows(v, length) for v in value.values()):
            return
    raise MalformedMessageError(
        f"feedback.data.info has no array of length {length} to be split by; send an empty map or "
        "one entry per env"
    )


def split_info(info: Mapping[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """Split an ``info`` map per env.

    Arrays of length ``num_envs`` at the top level or one map below are split; whatever stands
    beside them goes to every env.

    Args:
        info: the map of one feedback.
        num_envs: m of that feedback.

    Returns:
        One map per env.

    Raises:
        MalformedMessageError: nothing to split by, and more than one env.
    """
    _check_splittable(info, num_envs)

    def row(value: Any, env: int) -> Any:
        return value[env] if _has_rows(value, num_envs) else value

    return [
        {
            key: {k: row(v, env) for k, v in value.items()}
            if isinstance(value, dict)
            else row(value, env)
            for key, value in info.items()
        }
        for env in range(num_envs)
    ]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Episode:
    """A finished episode, as the client measured it."""

    env_index: int
    episode_return: float | None
    """Undiscounted sum of rewards; None when the client did not say."""
    length_steps: int | None
    """Env steps; None when the client did not say."""
    success: bool | None
    """None when the task knows no success."""


def read_episodes(feedback: Feedback) -> list[Episode]:
    """Read ``info["episode"]`` on done rows whose mask counts.

    Args:
        feedback: a checked feedback.

    Returns:
        One entry per finished episode, in row order; empty when the client sends none.

    Raises:
        MalformedMessageError: an entry of ``episode`` that is no number, or has the wrong length.
    """
    record = feedback.info.get("episode")
    if record is None:
        return []
    record = _map(record, "info.episode")
    rows = np.flatnonzero(feedback.done)
    m = len(feedback.env_indices)
    columns = {key: _column(record.get(key), m, key) for key in ("r", "l", "s", "mask")}
    episodes = []
    for row in rows.tolist():
        if columns["mask"] is not None and not columns["mask"][row]:
            continue
        values = {key: None if c is None else c[row] for key, c in columns.items()}
        episodes.append(
            Episode(
                env_index=int(feedback.env_indices[row]),
                episode_return=None if values["r"] is None else float(values["r"]),
                length_steps=None if values["l"] is None else int(values["l"]),
                success=None if values["s"] is None else bool(values["s"]),
            )
        )
    return episodes


def _column(value: Any, length: int, key: str) -> Array | None:
    if value is None:
        return None
    if isinstance(value, (int, float, list, np.generic)):
        try:
            value = np.asarray(value)
        except ValueError as error:  # a ragged list
            raise MalformedMessageError(f"info.episode.{key} is ragged") from error
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiub":
        raise MalformedMessageError(f"info.episode.{key} is {_describe(value)}, expected numbers")
    if value.ndim == 0:
        value = np.broadcast_to(value, (length,))
    if value.shape != (length,):
        raise MalformedMessageError(
            f"info.episode.{key} has shape {list(value.shape)}, expected [{length}]"
        )
    if not np.isfinite(value).all():
        raise MalformedMessageError(f"info.episode.{key} holds a NaN or an infinity")
    column: Array = value
    return column
