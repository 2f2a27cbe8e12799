"""Every rule of the page that one message can break, and both ways through the codec."""

from dataclasses import replace

import numpy as np
import pytest

from plugrl_protocol import messages
from plugrl_protocol.codec import decode, encode
from plugrl_protocol.errors import MalformedMessageError
from plugrl_protocol.messages import (
    Action,
    Feedback,
    Infer,
    Metadata,
    make_metadata,
    make_observation,
    parse_action,
    parse_feedback,
    parse_infer,
    parse_metadata,
    parse_observation,
    read_episodes,
    split_info,
)


def ids(*values):
    return np.array(values, dtype=np.int64)


def obs_map(n, **changes):
    record = {
        "images": {"cam": np.zeros((n, 4, 5, 3), np.uint8)},
        "states": {"s": np.zeros((n, 2), np.float32)},
        "text": np.full(n, "go"),
    }
    record.update(changes)
    return record


def infer_map(n=2, **changes):
    message = {
        "message_type": "infer",
        "data": obs_map(n),
        "env_indices": np.arange(n),
        "step_ids": np.zeros(n, np.int64),
    }
    message.update(changes)
    return {k: v for k, v in message.items() if v is not None}


def feedback_map(m=2, **changes):
    data = {
        "obs": obs_map(m),
        "rewards": np.ones(m, np.float32),
        "terminated": np.zeros(m, np.bool_),
        "truncated": np.zeros(m, np.bool_),
        "info": {},
    }
    message = {
        "message_type": "feedback",
        "env_indices": np.arange(m),
        "step_ids": np.zeros(m, np.int64),
    }
    for key, value in changes.items():
        (data if key in data else message)[key] = value
    data = {k: v for k, v in data.items() if v is not None}
    return {"data": data, **{k: v for k, v in message.items() if v is not None}}


def action_map(h=3, n=2, **changes):
    data = {"env_ids": np.arange(n), "action": np.zeros((h, n, 4), np.float32)}
    data.update(changes)
    return {
        "message_type": "action",
        "data": {k: v for k, v in data.items() if v is not None},
    }


def test_an_infer_travels():
    sent = Infer(
        env_indices=ids(4, 1),
        step_ids=ids(0, 7),
        observation=make_observation(
            num_envs=2,
            images={"cam": np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)},
            states={"s": np.array([[1.0, 2.0], [3.0, 4.0]])},
            text=["pick", "place"],
        ),
        reuse=None,
    )
    got = parse_infer(decode(encode(sent.to_wire())))

    assert got.env_indices.tolist() == [4, 1]
    assert got.step_ids.tolist() == [0, 7]
    assert got.reuse is None
    assert got.observation.text.tolist() == ["pick", "place"]
    assert got.observation.states["s"].tolist() == [[1, 2], [3, 4]]
    assert got.observation.images["cam"][1, 0, 0].tolist() == [60, 61, 62]
    assert len(got.observation) == 2


def test_a_reusing_infer_is_batched_to_its_fresh_rows():
    got = parse_infer(infer_map(3, data=obs_map(1), reuse=np.array([True, False, True])))

    assert len(got.observation) == 1
    assert got.to_wire()["reuse"].tolist() == [True, False, True]
    parse_infer(infer_map(2, data=obs_map(0), reuse=np.array([True, True])))
    empty = {"images": {}, "states": {}, "text": []}
    parse_infer(infer_map(2, data=empty, reuse=np.array([True, True])))


def test_text_is_accepted_in_both_forms():
    listed = parse_observation(obs_map(2, text=["a", "bcd"]), 2)
    array = parse_observation(obs_map(2, text=np.array(["a", "bcd"])), 2)

    assert listed.text.tolist() == array.text.tolist() == ["a", "bcd"]
    assert listed.text.dtype.kind == "U"
    assert listed.to_wire()["text"].dtype.str == "<U3", "and the array is sent"


def test_integer_states_are_converted_and_big_endian_is_accepted():
    got = parse_observation(obs_map(1, states={"s": np.array([[1, 2]], np.int8)}), 1)
    assert got.states["s"].dtype == np.float32
    got = parse_observation(obs_map(1, states={"s": np.array([[2**40]])}), 1)
    assert got.states["s"].dtype == np.float64
    wire = infer_map(env_indices=np.array([0, 1], ">i8"))
    wire["data"]["states"]["s"] = np.array([[1.5], [2.5]], ">f8")
    got = parse_infer(decode(encode(wire)))
    assert got.observation.states["s"].tolist() == [[1.5], [2.5]]
    assert got.observation.states["s"].dtype.isnative


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"env_indices": None}, "lacks the key 'env_indices'"),
        ({"step_ids": None}, "lacks the key 'step_ids'"),
        ({"data": None}, "lacks the key 'data'"),
        ({"data": [1]}, "a list, expected a map"),
        ({"data": {"images": {}, "states": {}}}, "lacks the key 'text'"),
        ({"data": {"images": {}, "text": ["", ""]}}, "lacks the key 'states'"),
        ({"data": {"states": {}, "text": ["", ""]}}, "lacks the key 'images'"),
        ({"data": obs_map(3)}, "3 rows, expected 2"),
        ({"data": obs_map(2, text=["a"])}, "1 entries for 2 rows"),
        ({"data": obs_map(2, text="go")}, "expected n strings"),
        ({"data": obs_map(2, text=[1, 2])}, "expected n strings"),
        ({"data": obs_map(2, text=np.array([["a"], ["b"]]))}, "expected n strings"),
        ({"data": obs_map(2, images={"c": np.zeros((2, 4, 4, 3), "f4")})}, "expected |u1"),
        ({"data": obs_map(2, images={"c": np.zeros((2, 4, 4), "u1")})}, "expected |u1"),
        ({"data": obs_map(2, images={"c": np.zeros((1, 4, 4, 3), "u1")})}, "1 rows, expected 2"),
        ({"data": obs_map(2, images=[])}, "a list, expected a map"),
        ({"data": obs_map(2, states={"s": np.zeros(2)})}, "expected floating"),
        ({"data": obs_map(2, states={"s": np.zeros((2, 1), "?")})}, "expected floating"),
        ({"data": obs_map(2, states={"s": [[1.0], [2.0]]})}, "a list, expected floating"),
        ({"data": obs_map(2, states={"s": np.array([["a"], ["b"]])})}, "expected floating"),
        ({"env_indices": ids(1, 1)}, "names an env twice"),
        ({"env_indices": ids(0, -1)}, "negative"),
        ({"env_indices": ids(0, 2**31)}, "huge"),
        ({"env_indices": np.array([0, 1], np.int32)}, "expected <i8"),
        ({"env_indices": np.array([0.0, 1.0])}, "expected <i8"),
        ({"env_indices": [0, 1]}, "a list, expected <i8"),
        ({"env_indices": ids(0, 1).reshape(1, 2)}, "expected <i8"),
        ({"env_indices": ids(), "step_ids": ids(), "data": obs_map(0)}, "at least one env"),
        ({"step_ids": ids(0)}, "1 entries for 2 envs"),
        ({"step_ids": ids(0, -1)}, "negative step"),
        ({"step_ids": np.zeros(2)}, "expected <i8"),
        ({"reuse": np.array([True])}, "1 entries for 2 envs"),
        ({"reuse": np.array([0, 1])}, "expected |b1"),
        ({"reuse": np.array([True, False])}, "2 rows, expected 1"),
        ({"reuse": True}, "a bool, expected |b1"),
    ],
)
def test_an_infer_that_breaks_the_page_is_malformed(changes, complaint):
    with pytest.raises(MalformedMessageError) as caught:
        parse_infer(infer_map(**changes))
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ([1], "a list, expected a map"),
        (None, "a NoneType"),
        (np.zeros(2), "an array of dtype"),
        ({}, "lacks the key 'message_type'"),
        ({"message_type": 1}, "expected a string"),
    ],
)
def test_a_root_that_is_no_message_is_malformed(message, complaint):
    with pytest.raises(MalformedMessageError, match=complaint):
        messages.message_type(message)


def test_metadata_travels_and_absent_means_unknown():
    sent = make_metadata(server_version="1.2", policy="MLP", action_horizon=8, extra={"x": 1})
    got = parse_metadata(decode(encode(sent.to_wire())))

    assert got.values == {
        "protocol_version": 1,
        "server": "plugrl-server",
        "server_version": "1.2",
        "policy": "MLP",
        "action_horizon": 8,
        "features": ["reuse-feedback-obs", "chunk-steps"],
        "x": 1,
    }
    assert got.features == {"reuse-feedback-obs", "chunk-steps"}
    assert got.positive("action_horizon") == 8
    assert got.positive("action_dim") is None
    assert Metadata().features == frozenset()
    assert Metadata(values={"features": "all"}).features == frozenset()
    assert Metadata(values={"features": ["a", 1]}).features == {"a"}
    assert Metadata(values={"action_dim": 0}).positive("action_dim") is None
    with pytest.raises(MalformedMessageError):
        parse_metadata({"message_type": "metadata"})
    with pytest.raises(MalformedMessageError):
        parse_metadata({"message_type": "metadata", "data": 1})


def test_an_action_travels_time_major():
    action = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    got = parse_action(decode(encode(Action(env_ids=ids(5, 2), action=action).to_wire())))

    assert got.env_ids.tolist() == [5, 2]
    assert got.action.tolist() == action.tolist()
    parse_action(action_map(action=np.zeros((3, 2), np.int64)))


@pytest.mark.parametrize(
    "changes",
    [
        {"env_ids": None},
        {"action": None},
        {"action": np.zeros((2,))},
        {"action": np.zeros((3, 1, 4))},
        {"action": np.zeros((0, 2, 4))},
        {"action": np.array([["a", "b"]])},
        {"action": [[1, 2]]},
        {"env_ids": np.zeros(0, np.int64), "action": np.zeros((3, 0, 4))},
    ],
)
def test_an_action_that_breaks_the_page_is_malformed(changes):
    with pytest.raises(MalformedMessageError):
        parse_action(action_map(**changes))
    with pytest.raises(MalformedMessageError):
        parse_action({"message_type": "action"})


def test_a_feedback_travels():
    sent = Feedback(
        env_indices=ids(3),
        step_ids=ids(2),
        observation=make_observation(num_envs=1, states={"s": np.ones((1, 2))}, text="go"),
        rewards=np.array([2.5], np.float32),
        terminated=np.array([True]),
        truncated=np.array([False]),
        info={"episode": {"r": np.array([7.0])}},
        steps=ids(4),
    )
    assert "steps" not in replace(sent, steps=None).to_wire()
    frame = decode(encode(sent.to_wire()))
    assert messages.message_type(frame) == "feedback"
    got = parse_feedback(frame)

    assert [name for _, name, _ in got.observation.arrays()] == ["s", "text"]
    assert got.rewards.tolist() == [2.5]
    assert got.done.tolist() == [True]
    assert got.steps is not None
    assert got.steps.tolist() == [4]
    assert got.info["episode"]["r"].tolist() == [7.0]
    assert parse_feedback(feedback_map()).steps is None
    for kind in ("f2", "f4", "f8"):
        assert len(parse_feedback(feedback_map(rewards=np.ones(2, kind))).rewards) == 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"env_indices": None}, "lacks"),
        ({"step_ids": None}, "lacks"),
        ({"obs": None}, "lacks"),
        ({"rewards": None}, "lacks"),
        ({"terminated": None}, "lacks"),
        ({"truncated": None}, "lacks"),
        ({"info": None}, "lacks"),
        ({"info": [1]}, "expected a map"),
        ({"rewards": np.array([1, 2])}, "expected floating"),
        ({"rewards": np.ones((2, 1))}, "expected floating"),
        ({"rewards": np.ones(3)}, "expected floating"),
        ({"rewards": [1.0, 2.0]}, "a list"),
        ({"rewards": np.array([1.0, np.nan])}, "NaN"),
        ({"rewards": np.array([np.inf, 1.0])}, "NaN"),
        ({"terminated": np.array([0, 1], np.uint8)}, "expected |b1"),
        ({"truncated": np.array([True])}, "1 entries"),
        ({"steps": ids(1)}, "1 entries"),
        ({"steps": ids(1, 0)}, "below 1"),
        ({"steps": np.ones(2)}, "expected <i8"),
        ({"obs": obs_map(1)}, "expected 2"),
        ({"env_indices": ids(2, 2)}, "twice"),
        ({"info": {"note": "x"}}, "no array of length 2"),
        ({"info": {"a": np.zeros(3)}}, "no array of length 2"),
        ({"info": {"a": {"b": {"c": np.zeros(2)}}}}, "no array of length 2"),
        ({"info": {"a": np.float32(1)}}, "no array of length 2"),
    ],
)
def test_a_feedback_that_breaks_the_page_is_malformed(changes, complaint):
    with pytest.raises(MalformedMessageError) as caught:
        parse_feedback(feedback_map(**changes))
    assert complaint in str(caught.value)


def test_info_is_split_along_the_first_array_and_the_rest_is_broadcast():
    info = {"a": np.array([1, 2]), "b": {"c": np.array([[3], [4]]), "d": "x"}, "e": 5}

    assert [
        {"a": row["a"], "c": row["b"]["c"].tolist(), "d": row["b"]["d"], "e": row["e"]}
        for row in split_info(info, 2)
    ] == [{"a": 1, "c": [3], "d": "x", "e": 5}, {"a": 2, "c": [4], "d": "x", "e": 5}]
    assert split_info({}, 2) == [{}, {}]
    assert split_info({"note": "x"}, 1) == [{"note": "x"}]
    nested = {"other": {"t": "x"}, "a": {"n": 1, "b": np.array([1, 2])}}
    assert split_info(nested, 2)[1]["a"]["b"] == 2
    with pytest.raises(MalformedMessageError):
        split_info({"note": "x"}, 2)


def ended(info, m=2):
    terminated = np.zeros(m, np.bool_)
    terminated[0] = True
    return parse_feedback(feedback_map(m, terminated=terminated, info=info))


def test_episodes_are_read_on_done_rows_whose_mask_counts():
    episode = {
        "r": np.array([3.5, 9.0]),
        "l": np.array([7, 1]),
        "s": np.array([True, False]),
    }
    (only,) = read_episodes(ended({"episode": episode}))
    assert (only.env_index, only.episode_return, only.length_steps, only.success) == (
        0, 3.5, 7, True,
    )  # fmt: skip
    masked = {**episode, "mask": np.array([False, True])}
    assert read_episodes(ended({"episode": masked})) == []
    counted = {**episode, "mask": np.array([2, 0])}
    assert len(read_episodes(ended({"episode": counted}))) == 1
    assert read_episodes(ended({})) == []
    (scalar,) = read_episodes(ended({"episode": {"r": 2}}, m=1))
    assert (scalar.episode_return, scalar.length_steps, scalar.success) == (2.0, None, None)
    (listed,) = read_episodes(ended({"episode": {"r": [2.0]}}, m=1))
    assert listed.episode_return == 2.0


@pytest.mark.parametrize(
    "episode",
    [
        1,
        {"r": np.array([1.0, 2.0, 3.0])},
        {"r": "high"},
        {"r": np.array(["a"])},
        {"r": np.array([np.nan])},
        {"r": [[1], [1, 2]]},
        {"r": {"a": 1}},
    ],
)
def test_a_broken_episode_record_is_malformed(episode):
    with pytest.raises(MalformedMessageError):
        read_episodes(ended({"episode": episode}, m=1))


def test_observations_are_built_from_what_an_environment_gives():
    made = make_observation(num_envs=2)
    assert made.text.tolist() == ["", ""]
    assert [group for group, _, _ in made.arrays()] == ["text"]
    made = make_observation(num_envs=3, images={"c": np.zeros((3, 2, 2, 1), np.uint8)}, text="go")
    assert made.text.tolist() == ["go"] * 3
    assert [name for _, name, _ in made.arrays()] == ["c", "text"]
    assert len(made.rows(slice(1, 3))) == 2
    with pytest.raises(MalformedMessageError):
        make_observation(num_envs=2, states={"s": np.zeros((3, 1))})


def test_rows_that_are_not_finite_are_told_apart():
    states = {"a": np.array([[1.0, np.nan], [1.0, 2.0], [np.inf, 0.0]]), "b": np.zeros((3, 1))}
    seen = make_observation(num_envs=3, states=states)
    assert seen.finite().tolist() == [False, True, False]
    assert make_observation(num_envs=2).finite().tolist() == [True, True]


def test_messages_cannot_be_changed():
    message = parse_infer(infer_map())
    with pytest.raises(AttributeError):
        message.reuse = None  # type: ignore[misc]
