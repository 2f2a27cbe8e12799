"""The clauses of a server about the form of messages: each spoiled message closes with resync.

Importing this module adds its checks to ``server_checks.CHECKS``.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from plugrl_protocol.conformance.clauses import SkippedError, ViolationError
from plugrl_protocol.conformance.raw import feedback_map, infer_map, pack, spelled
from plugrl_protocol.conformance.server_checks import (
    Setup,
    clause,
    need_distinct_rows,
    need_feature,
    reusing,
)
from plugrl_protocol.messages import FEATURE_REUSE, FEATURE_STEPS

_BOMB_LEVELS = 300
_BOMB_KEYS = 300_000


def spoiled_infer(setup: Setup, name: str, **changes: Any) -> None:
    """Expect resync for an infer with a change."""
    with setup.client() as client:
        client.send(infer_map(setup.target, [0, 1], **changes))
        client.closing(name)


def spoiled_feedback(setup: Setup, name: str, **changes: Any) -> None:
    """Expect resync for a feedback with a change, after an honest exchange."""
    with setup.client() as client:
        client.round(name, [0, 1])
        client.report([0, 1], **changes)
        # A server that takes it says nothing: the next infer tells.
        client.send(infer_map(setup.target, [9]))
        client.closing(name)


def accepted_feedback(setup: Setup, name: str, **changes: Any) -> None:
    """Expect a feedback to be taken."""
    with setup.client() as client:
        client.round(name, [0, 1])
        client.report([0, 1], **changes)
        client.round(name, [0])


def spoiled_array(setup: Setup, name: str, data: bytes, dtype: Any, shape: Any) -> None:
    """Expect resync for a lying array, where it is read and where it is only carried."""
    lie = spelled(data, dtype, shape)
    target = setup.target
    observation = target.observation(2)
    observation["states"] = {target.state_key: lie}
    spoiled_infer(setup, name, data=observation)
    with setup.client() as client:
        client.round(name, [0])
        client.report([0], info={"carried": lie})
        client.send(infer_map(target, [0]))
        client.closing(name)


# ----------------------------------------------------------------------------------------- bytes


@clause("garbage", 5, "undecodable bytes close that connection with resync")
def _garbage(setup: Setup) -> None:
    whole = pack(infer_map(setup.target, [0]))
    for frame in (
        b"\xc1\xff\x00garbage",
        b"",
        whole[:-5],
        whole + b"\x00",
        b"\xdf\xff\xff\xff\xff",
    ):
        with setup.client() as client:
            client.send(frame)
            client.closing("garbage")


@clause("text-frame", 5, "a text frame closes that connection with resync")
def _text_frame(setup: Setup) -> None:
    for frame in ("hello", ""):
        with setup.client() as client:
            client.send(frame)
            client.closing("text-frame")
    with setup.client() as client:
        client.round("text-frame", [0])
        client.send("hello")
        client.closing("text-frame")


@clause("root", 5, "a root that is not a map closes with resync")
def _root(setup: Setup) -> None:
    for root in (1, None, "infer", b"infer", [infer_map(setup.target, [0])], np.zeros(2)):
        with setup.client() as client:
            client.send(pack(root))
            client.closing("root")


@clause("map-keys", 2, "map keys are strings; only arrays have bin keys")
def _map_keys(setup: Setup) -> None:
    target = setup.target
    by_bytes: dict[Any, Any] = {
        key.encode(): value for key, value in infer_map(target, [0]).items()
    }
    by_number: dict[Any, Any] = {**infer_map(target, [0]), 7: 1}
    for message in (by_bytes, by_number):
        with setup.client() as client:
            client.send(pack(message))
            client.closing("map-keys")


@clause("depth-bomb", 2, "a too-deep tree is refused")
def _depth_bomb(setup: Setup) -> None:
    for frame in (b"\x81\xa1k" * 50_000, b"\x91" * 100_000):
        with setup.client() as client:
            client.send(frame)
            client.closing("depth-bomb")
    tree: Any = 1
    for _ in range(_BOMB_LEVELS):
        tree = {"k": tree}
    with setup.client() as client:
        client.round("depth-bomb", [0])
        client.report([0], info=tree)
        client.send(infer_map(setup.target, [0]))
        client.closing("depth-bomb")


@clause("key-bomb", 5, "a frame that is costly to decode is refused by bounds")
def _key_bomb(setup: Setup) -> None:
    # Under the cap, so that it is the keys that are refused.
    fitting = _BOMB_KEYS if setup.max_message_mb is None else int(setup.max_message_mb * 2**20 / 13)
    wide = {str(number): number for number in range(min(_BOMB_KEYS, fitting))}
    with setup.client() as client:
        client.round("key-bomb", [0])
        client.report([0], info=wide)
        client.send(infer_map(setup.target, [0]))
        client.closing("key-bomb")


# ---------------------------------------------------------------------------------------- arrays


def _refused_dtype(dtype: Any, size: int, name: str) -> None:
    @clause(name, 2, f"dtype {dtype!r} is refused on decode")
    def _check(setup: Setup) -> None:
        width = setup.target.state_dim
        # Zeros, so that a server which takes them for pointers holds nulls, and lives to be told.
        spoiled_array(setup, name, bytes(2 * width * size), dtype, [2, width])


_refused_dtype("|O", 8, "dtype-object")
_refused_dtype("|V4", 4, "dtype-void")
_refused_dtype("<c8", 8, "dtype-complex")
_refused_dtype("|S4", 4, "dtype-bytes")
_refused_dtype("<M8[s]", 8, "dtype-datetime")
_refused_dtype("<m8[s]", 8, "dtype-timedelta")
_refused_dtype("<f4,<f4", 8, "dtype-structured")
_refused_dtype("<x9", 9, "dtype-unknown")
_refused_dtype(["<f4"], 4, "dtype-not-a-string")


@clause("data-too-long", 2, "data holds exactly prod(shape) * itemsize bytes")
def _data_too_long(setup: Setup) -> None:
    width = setup.target.state_dim
    spoiled_array(setup, "data-too-long", bytes(8 * width + 4), "<f4", [2, width])


@clause("data-too-short", 2, "data holds exactly prod(shape) * itemsize bytes")
def _data_too_short(setup: Setup) -> None:
    width = setup.target.state_dim
    spoiled_array(setup, "data-too-short", bytes(8 * width - 4), "<f4", [2, width])


@clause("shape-negative", 2, "a negative shape is refused")
def _shape_negative(setup: Setup) -> None:
    for shape in ([-1, -2], [-1, 4], [2, -1]):
        spoiled_array(setup, "shape-negative", bytes(32), "<f4", shape)


@clause("shape-overflow", 2, "an overflowing shape is refused")
def _shape_overflow(setup: Setup) -> None:
    for shape in ([2**62, 4], [2**32, 2**32], [0, 2**40], [2**63, 2]):
        spoiled_array(setup, "shape-overflow", b"", "<f4", shape)


@clause("shape-not-ints", 2, "a shape is a list of ints")
def _shape_not_ints(setup: Setup) -> None:
    width = setup.target.state_dim
    for shape in ([2.0, float(width)], ["2", str(width)], 2, None, {"n": 2}):
        spoiled_array(setup, "shape-not-ints", bytes(8 * width), "<f4", shape)


@clause("big-endian", 5, "big-endian arrays are accepted and converted")
def _big_endian(setup: Setup) -> None:
    target = setup.target
    with setup.client() as client:
        honest = client.round("big-endian", [0, 1], data=target.observation(2, 3.0))
        client.report([0, 1], terminated=np.ones(2, np.bool_), rewards=np.ones(2, ">f4"))
        observation = target.observation(2, 3.0)
        swapped = observation["states"][target.state_key].astype(">f4")
        observation["states"] = {target.state_key: swapped}
        changes = {"env_indices": np.array([0, 1], ">i8"), "step_ids": np.zeros(2, ">i8")}
        found = client.round("big-endian", [0, 1], data=observation, **changes)
    _same_where_it_shows(setup, "big-endian", honest, found)


@clause("int-states", 5, "integer states are accepted and converted")
def _int_states(setup: Setup) -> None:
    target = setup.target
    for dtype in ("<i8", "|u1", "<i2"):
        observation = target.observation(2, 3.0)
        counts = observation["states"][target.state_key].astype(dtype)
        with setup.client() as client:
            honest = client.round("int-states", [0, 1], data=observation)
            client.report([0, 1], terminated=np.ones(2, np.bool_))
            observation = {**observation, "states": {target.state_key: counts}}
            found = client.round("int-states", [0, 1], data=observation)
        _same_where_it_shows(setup, "int-states", honest, found)


def _same_where_it_shows(
    setup: Setup, name: str, honest: np.ndarray[Any, Any], found: np.ndarray[Any, Any]
) -> None:
    if setup.echo and not np.allclose(honest, found):
        raise ViolationError(name, "accepted, but read as other numbers")


# ------------------------------------------------------------------------------------- messages


@clause("missing-key", 5, "a message that lacks a key closes with resync")
def _missing_key(setup: Setup) -> None:
    for key in ("message_type", "data", "env_indices", "step_ids"):
        spoiled_infer(setup, "missing-key", **{key: None})
    for key in ("images", "states", "text"):
        observation = setup.target.observation(2)
        del observation[key]
        spoiled_infer(setup, "missing-key", data=observation)
    for key in ("obs", "rewards", "terminated", "truncated", "info", "env_indices", "step_ids"):
        spoiled_feedback(setup, "missing-key", **{key: None})


@clause("duplicate-index", 3, "env_indices are unique in a message")
def _duplicate_index(setup: Setup) -> None:
    spoiled_infer(setup, "duplicate-index", env_indices=np.array([1, 1]))
    spoiled_feedback(setup, "duplicate-index", env_indices=np.array([1, 1]))


@clause("negative-index", 3, "env_indices are small and not negative")
def _negative_index(setup: Setup) -> None:
    spoiled_infer(setup, "negative-index", env_indices=np.array([0, -1]))
    spoiled_infer(setup, "negative-index", env_indices=np.array([0, 2**62]))


@clause("index-dtype", 4, "env_indices and step_ids are <i8 [n]")
def _index_dtype(setup: Setup) -> None:
    for wrong in (np.array([0.0, 1.0]), np.array(["0", "1"]), np.array([[0, 1]]), [0, "1"], None):
        value = spelled(b"", "<i8", [0]) if wrong is None else wrong
        spoiled_infer(setup, "index-dtype", env_indices=value)
        spoiled_infer(setup, "index-dtype", step_ids=value)


@clause("no-envs", 5, "n = 0 is malformed")
def _no_envs(setup: Setup) -> None:
    with setup.client() as client:
        client.send(infer_map(setup.target, []))
        client.closing("no-envs")
    with setup.client() as client:
        client.round("no-envs", [0])
        client.send(feedback_map(setup.target, []))
        client.send(infer_map(setup.target, [0]))
        client.closing("no-envs")


@clause("leading-dimension", 5, "a wrong leading dimension closes with resync")
def _leading_dimension(setup: Setup) -> None:
    name, target = "leading-dimension", setup.target
    spoiled_infer(setup, name, step_ids=np.zeros(3, np.int64))
    for rows in (1, 3):
        spoiled_infer(setup, name, data=target.observation(rows))
        spoiled_feedback(setup, name, obs=target.observation(rows))
        spoiled_feedback(setup, name, rewards=np.ones(rows, np.float32))
        spoiled_feedback(setup, name, terminated=np.zeros(rows, np.bool_))
        spoiled_feedback(setup, name, truncated=np.zeros(rows, np.bool_))
        spoiled_feedback(setup, name, step_ids=np.zeros(rows, np.int64))
    for group in ("states", "text"):
        observation = target.observation(2)
        observation[group] = target.observation(3)[group]
        spoiled_infer(setup, name, data=observation)
        spoiled_feedback(setup, name, obs=observation)


@clause("observation-form", 4, "images are |u1 [n,h,w,c], states floating [n,d], text n strings")
def _observation_form(setup: Setup) -> None:
    name, target = "observation-form", setup.target

    def spoil(**groups: Any) -> None:
        spoiled_infer(setup, name, data={**target.observation(2), **groups})

    spoil(images={"c": np.zeros((2, 4, 4, 3), np.float32)})
    spoil(images={"c": np.zeros((2, 4, 4), np.uint8)})
    spoil(images=[])
    spoil(states={target.state_key: np.zeros(2, np.float32)})
    spoil(states={target.state_key: np.full((2, target.state_dim), "x")})
    spoil(states={target.state_key: [[0.0] * target.state_dim] * 2})
    spoil(text="one for all")
    spoil(text=[1, 2])
    spoiled_infer(setup, name, data=[1, 2])


@clause("text-forms", 2, "text may be a <U array or an array of strings")
def _text_forms(setup: Setup) -> None:
    for text in (["pick", "place it"], np.array(["pick", "place it"]), ["", "é"]):
        with setup.client() as client:
            observation = {**setup.target.observation(2), "text": text}
            client.round("text-forms", [0, 1], data=observation)
            client.report([0, 1], obs=observation)
            client.round("text-forms", [0])


@clause("reward-kinds", 4, "rewards of any float kind are accepted")
def _reward_kinds(setup: Setup) -> None:
    for kind in ("<f2", "<f4", "<f8"):
        accepted_feedback(setup, "reward-kinds", rewards=np.ones(2, kind))


@clause("integer-rewards", 5, "integer rewards are malformed")
def _integer_rewards(setup: Setup) -> None:
    for wrong in (np.ones(2, np.int64), np.ones(2, np.bool_), [1.0, 2.0], np.ones((2, 1))):
        spoiled_feedback(setup, "integer-rewards", rewards=wrong)


@clause("nonfinite-rewards", 5, "a reward that is NaN or infinite is malformed")
def _nonfinite_rewards(setup: Setup) -> None:
    for wrong in (np.nan, np.inf, -np.inf):
        spoiled_feedback(setup, "nonfinite-rewards", rewards=np.array([0.0, wrong], np.float32))


@clause("flag-dtype", 4, "terminated and truncated are |b1 [m]")
def _flag_dtype(setup: Setup) -> None:
    for wrong in (np.zeros(2, np.uint8), np.zeros(2, np.float32), [False, False]):
        spoiled_feedback(setup, "flag-dtype", terminated=wrong)
        spoiled_feedback(setup, "flag-dtype", truncated=wrong)


@clause("info-split", 4, "info is split along its first array of length m")
def _info_split(setup: Setup) -> None:
    episode = {"r": np.ones(2), "l": np.ones(2, np.int64), "s": np.zeros(2, np.bool_)}
    for info in (
        {},
        {"episode": episode, "note": "beside", "number": 3},
        {"episode": {**episode, "mask": np.array([True, False])}},
        {"top": np.zeros((2, 3))},
    ):
        accepted_feedback(setup, "info-split", info=info, terminated=np.array([True, False]))
    with setup.client() as client:
        client.round("info-split", [0])
        client.report([0], info={"note": "one env needs no array"})
        client.round("info-split", [0])


@clause("info-unsplittable", 4, "info with nothing to split by is a protocol error if m > 1")
def _info_unsplittable(setup: Setup) -> None:
    for info in ({"note": "x"}, {"a": np.zeros(3)}, {"a": {"b": {"c": np.zeros(2)}}}):
        spoiled_feedback(setup, "info-unsplittable", info=info)
    spoiled_feedback(setup, "info-unsplittable", info=[1, 2])


# ------------------------------------------------------------------------------------- features


@clause("reuse", 6, "a reused row is that of the env's last feedback on this connection")
def _reuse(setup: Setup) -> None:
    target = setup.target
    with setup.client() as client:
        need_feature(client, FEATURE_REUSE)
        client.round("reuse", [0, 1])
        client.report([0, 1], obs=target.observation(2, 5.0))
        client.send(reusing(target, [1, 0]))
        reused = client.action("reuse", [1, 0])
        client.report([0, 1], obs=target.observation(2, 5.0))
        mixed = client.round(
            "reuse", [0, 1], data=target.observation(1, 5.0), reuse=np.array([False, True])
        )
    with setup.client() as client:
        try:
            need_distinct_rows(setup, client)
        except SkippedError:
            return
        fresh = client.round("reuse", [0, 1], data=target.observation(2, 5.0))
    if not (np.allclose(reused, fresh) and np.allclose(mixed, fresh)):
        raise ViolationError("reuse", "actions differ from those for the same rows sent afresh")


@clause("reuse-before-feedback", 6, "reuse without an earlier feedback closes with resync")
def _reuse_before_feedback(setup: Setup) -> None:
    with setup.client() as client:
        need_feature(client, FEATURE_REUSE)
        client.send(reusing(setup.target, [0]))
        client.closing("reuse-before-feedback")
    with setup.client() as client:
        client.round("reuse-before-feedback", [0, 1])
        client.report([0])
        client.send(reusing(setup.target, [0, 2]))
        client.closing("reuse-before-feedback")


@clause("reuse-after-done", 6, "reuse after a done closes with resync")
def _reuse_after_done(setup: Setup) -> None:
    for flag in ("terminated", "truncated"):
        with setup.client() as client:
            need_feature(client, FEATURE_REUSE)
            client.round("reuse-after-done", [0, 1])
            client.report([0, 1], **{flag: np.array([True, False])})
            client.send(reusing(setup.target, [0, 1]))
            client.closing("reuse-after-done")


@clause("reuse-rows", 6, "data is batched to the rows that are not reused")
def _reuse_rows(setup: Setup) -> None:
    target = setup.target
    spoiled: list[dict[str, Any]] = [
        {"data": target.observation(2)},
        {"data": target.observation(1)},
        {"reuse": np.array([True])},
        {"reuse": np.array([1, 1])},
        {"reuse": [True, True]},
        {"data": target.observation(2), "reuse": np.array([True, False])},
    ]
    for changes in spoiled:
        with setup.client() as client:
            need_feature(client, FEATURE_REUSE)
            client.round("reuse-rows", [0, 1])
            client.report([0, 1])
            client.send(reusing(target, [0, 1], **changes))
            client.closing("reuse-rows")


@clause("steps-range", 6, "steps are <i8 [m] within 1..H")
def _steps_range(setup: Setup) -> None:
    with setup.client() as client:
        need_feature(client, FEATURE_STEPS)
        horizon = client.round("steps-range", [0]).shape[0]
    for wrong in (
        np.array([0, 1]),
        np.array([1, horizon + 1]),
        np.array([1, -1]),
        np.array([1]),
        np.array([1.0, 1.0]),
        [1, 1],
    ):
        spoiled_feedback(setup, "steps-range", steps=wrong)


@clause("extension-types", 2, "msgpack extension types are refused")
def _extension_types(setup: Setup) -> None:
    with setup.client() as client:
        client.send(pack(infer_map(setup.target, [0], stamp=msgpack.ExtType(5, b"1234"))))
        client.closing("extension-types")
