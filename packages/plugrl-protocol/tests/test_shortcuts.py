"""The shortcut gives what the long way gives, and refuses the same values."""

import numpy as np
import pytest

from plugrl_protocol.codec import SERVER_LIMITS, decode, encode
from plugrl_protocol.errors import MalformedMessageError
from plugrl_protocol.messages import (
    Action,
    Feedback,
    Infer,
    make_metadata,
    make_observation,
    parse_action,
    parse_feedback,
    parse_infer,
)
from plugrl_protocol.shortcuts import Sender, arrays_of, form_of, shorten

INFO = {"episode": {"r": np.ones(2)}, "notes": ["a", np.zeros(3), 1], "n": 5, "raw": b"x"}


def observation(value=1.0):
    return make_observation(
        num_envs=2,
        images={"b": np.full((2, 2, 2, 1), int(value), np.uint8)},
        states={"z": np.full((2, 3), value), "a": np.full((2, 1), -value, np.float32)},
        text=["one", "two"],
    )


def infer(value=1.0, ids=(4, 7), step_ids=(0, 1)):
    return Infer(
        env_indices=np.array(ids), step_ids=np.array(step_ids), observation=observation(value)
    )


def feedback(value=1.0, ids=(4, 7), step_ids=(0, 1), rewards=(1.0, 2.0), steps=(1, 2), info=None):
    return Feedback(
        env_indices=np.array(ids),
        step_ids=np.array(step_ids),
        observation=observation(value),
        rewards=np.array(rewards),
        terminated=np.array([True, value > 1]),
        truncated=np.array([False, False]),
        info=INFO if info is None else info,
        steps=None if steps is None else np.array(steps),
    )


def action(value=1.0, ids=(4, 7)):
    return Action(env_ids=np.array(ids), action=np.full((3, 2, 1), value))


def shortcut(message, parse):
    tree = decode(encode(message.to_wire()))
    return shorten(parse(tree), arrays_of(tree))


CASES = [(infer, parse_infer), (feedback, parse_feedback), (action, parse_action)]


@pytest.mark.parametrize(("make", "parse"), CASES)
def test_the_short_way_and_the_long_way_agree(make, parse):
    build = shortcut(make(1.0), parse)
    tree = decode(encode(make(9.0).to_wire()))
    short, long = build(arrays_of(tree)), parse(tree)

    assert encode(short.to_wire()) == encode(long.to_wire())
    assert type(short) is type(long)


@pytest.mark.parametrize(
    ("make", "parse", "bad"),
    [
        (infer, parse_infer, {"ids": (3, 3)}),
        (infer, parse_infer, {"ids": (3, -1)}),
        (infer, parse_infer, {"step_ids": (0, -1)}),
        (feedback, parse_feedback, {"ids": (3, 3)}),
        (feedback, parse_feedback, {"step_ids": (0, -1)}),
        (feedback, parse_feedback, {"rewards": (0.0, np.nan)}),
        (feedback, parse_feedback, {"rewards": (np.inf, -np.inf)}),
        (feedback, parse_feedback, {"steps": (0, 1)}),
        (action, parse_action, {"ids": (5, 5)}),
    ],
)
def test_the_short_way_refuses_the_same_values(make, parse, bad):
    build = shortcut(make(), parse)
    tree = decode(encode(make(**bad).to_wire()))
    with pytest.raises(MalformedMessageError):
        parse(tree)
    with pytest.raises(MalformedMessageError):
        build(arrays_of(tree))


def test_huge_rewards_that_overflow_only_in_sum_are_taken():
    build = shortcut(feedback(), parse_feedback)
    tree = decode(encode(feedback(rewards=(1.7e308, 1.7e308)).to_wire()))
    assert build(arrays_of(tree)).rewards.tolist() == [1.7e308, 1.7e308]


def test_info_is_built_anew_each_time():
    build = shortcut(feedback(), parse_feedback)
    arrays = arrays_of(decode(encode(feedback().to_wire())))
    one, other = build(arrays), build(arrays)
    one.info["notes"].append("mine")
    assert other.info["notes"][0] == "a"
    assert len(other.info["notes"]) == 3
    assert shortcut(feedback(steps=None), parse_feedback)(arrays[:-1]).steps is None


def test_there_is_no_shortcut_where_parsing_converts_or_values_decide():
    wire = infer().to_wire()
    wire["data"]["text"] = ["one", "two"]
    tree = decode(encode(wire))
    assert shorten(parse_infer(tree), arrays_of(tree)) is None

    wire = infer().to_wire()
    wire["data"] = observation().rows(slice(0, 1)).to_wire()
    wire["reuse"] = np.array([True, False])
    tree = decode(encode(wire))
    assert shorten(parse_infer(tree), arrays_of(tree)) is None

    assert shorten(make_metadata(), []) is None


# ---------------------------------------------------------------------------------------- sending


def send(sender, message, parse):
    _, frame = sender.prepare(message, parse)
    return frame()


def plain_feedback(value=1.0, **more):
    return feedback(value, info={}, **more)


SENT = [(infer, parse_infer), (plain_feedback, parse_feedback), (action, parse_action)]


@pytest.mark.parametrize(("make", "parse"), SENT)
def test_a_form_that_was_sent_before_is_filled_with_the_same_bytes(make, parse):
    sender = Sender(SERVER_LIMITS)
    for value in (1.0, 2.0, 7.0, 9.0):
        message = make(value, ids=(int(value), 100))
        assert send(sender, message, parse) == encode(message.to_wire())
    assert form_of(make())[0] in sender._known


def test_arrays_of_every_size_and_layout_are_filled_in():
    sender = Sender(SERVER_LIMITS)
    for turn in range(4):
        image = np.arange(2 * 60 * 60 * 3, dtype=np.uint8).reshape(2, 60, 60, 3) + turn
        turned = image.transpose(0, 2, 1, 3) if turn % 2 else image
        seen = make_observation(num_envs=2, images={"c": turned})
        message = Infer(env_indices=np.array([0, 1]), step_ids=np.array([0, 0]), observation=seen)
        assert send(sender, message, parse_infer) == encode(message.to_wire())


@pytest.mark.parametrize(
    ("make", "parse", "bad"),
    [
        (infer, parse_infer, {"ids": (3, 3)}),
        (infer, parse_infer, {"step_ids": (0, -1)}),
        (plain_feedback, parse_feedback, {"rewards": (0.0, np.nan)}),
        (plain_feedback, parse_feedback, {"steps": (0, 1)}),
        (plain_feedback, parse_feedback, {"ids": (-1, 1)}),
    ],
)
def test_values_of_a_known_form_are_checked_before_they_are_sent(make, parse, bad):
    sender = Sender(SERVER_LIMITS)
    for _ in range(3):
        send(sender, make(), parse)
    with pytest.raises(MalformedMessageError):
        sender.prepare(make(**bad), parse)
    without = make(steps=None) if make is plain_feedback else make()
    assert send(sender, without, parse) == encode(without.to_wire())


def test_steps_may_be_absent_from_a_known_form():
    sender = Sender(SERVER_LIMITS)
    for _ in range(3):
        message = plain_feedback(steps=None)
        assert send(sender, message, parse_feedback) == encode(message.to_wire())


def test_other_names_dtypes_and_shapes_are_other_forms():
    sender = Sender(SERVER_LIMITS)
    for _ in range(3):
        send(sender, infer(), parse_infer)
    for states in (
        {"y": np.ones((2, 3)), "a": np.ones((2, 1), np.float32)},
        {"z": np.ones((2, 3), np.float32), "a": np.ones((2, 1), np.float32)},
        {"z": np.ones((2, 4)), "a": np.ones((2, 1), np.float32)},
        {"a": np.ones((2, 1), np.float32), "z": np.ones((2, 3))},
    ):
        seen = make_observation(num_envs=2, states=states, text=["one", "two"])
        message = Infer(env_indices=np.array([0, 1]), step_ids=np.array([0, 0]), observation=seen)
        assert send(sender, message, parse_infer) == encode(message.to_wire())
    with pytest.raises(MalformedMessageError):
        sender.prepare(infer(step_ids=(0.0, 1.0)), parse_infer)


def test_what_has_no_form_goes_the_long_way():
    assert form_of(feedback()) is None, "info is free"
    listed = infer()
    object.__setattr__(listed, "step_ids", [0, 1])
    assert form_of(listed) is None
    none = observation().rows(slice(0, 0))
    reusing = Infer(
        env_indices=np.array([0]), step_ids=np.array([0]), observation=none, reuse=np.array([True])
    )
    assert form_of(reusing) is None
    sender = Sender(SERVER_LIMITS)
    for message, parse in ((feedback(), parse_feedback), (reusing, parse_infer)):
        for _ in range(3):
            assert send(sender, message, parse) == encode(message.to_wire())
    assert not sender._known
    assert sender.encode({"a": 1}) == encode({"a": 1})


def test_forms_do_not_pile_up():
    sender = Sender(SERVER_LIMITS)
    for number in range(1, 200):
        message = action(ids=tuple(range(2)))
        object.__setattr__(message, "action", np.zeros((number, 2, 1)))
        for _ in range(2):
            send(sender, message, parse_action)
    assert len(sender._known) <= 64
    assert len(sender._seen) <= 64


def test_a_form_with_too_much_between_its_arrays_is_not_kept():
    sender = Sender(SERVER_LIMITS)
    states = {"x" * 100 + str(number): np.zeros((2, 1)) for number in range(200)}
    seen = make_observation(num_envs=2, states=states)
    message = Infer(env_indices=np.array([0, 1]), step_ids=np.array([0, 0]), observation=seen)
    for _ in range(3):
        assert send(sender, message, parse_infer) == encode(message.to_wire())
    assert not sender._known
