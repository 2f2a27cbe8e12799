"""The shortcut gives what the long way gives, and refuses the same values."""

import numpy as np
import pytest

from plugrl_protocol.codec import decode, encode
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
from plugrl_protocol.shortcuts import arrays_of, shorten

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
