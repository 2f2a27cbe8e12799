"""The shortcut gives what the long way gives, and refuses the same values."""

import random
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from plugrl_protocol.codec import SERVER_LIMITS, decode, encode
from plugrl_protocol.errors import (
    CodecError,
    MalformedMessageError,
    OutOfTurnError,
    ProtocolError,
)
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
from plugrl_protocol.shortcuts import Reader, arrays_of, make_action, shorten

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
    wire = message.to_wire()
    tree = decode(encode(wire))
    found = shorten(wire["message_type"], parse(tree), arrays_of(tree))
    assert found.kind == wire["message_type"]
    return found.build


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


def reusing(reuse, sent):
    wire = infer().to_wire()
    wire["data"] = observation().rows(slice(0, sent)).to_wire()
    wire["reuse"] = np.array(reuse)
    return wire


def test_there_is_no_shortcut_where_parsing_converts():
    wire = infer().to_wire()
    wire["data"]["text"] = ["one", "two"]
    tree = decode(encode(wire))
    arrays = arrays_of(tree)
    assert shorten("infer", parse_infer(tree), arrays).build(arrays) is None

    assert shorten("metadata", make_metadata(), []).build([]) is None


def test_reuse_has_a_shortcut_while_it_names_the_same_rows():
    tree = decode(encode(reusing([True, False], 1)))
    build = shorten("infer", parse_infer(tree), arrays_of(tree)).build
    assert encode(build(arrays_of(tree)).to_wire()) == encode(reusing([True, False], 1))

    for rows in ([False, True], [False, False], [True, True]):
        assert build(arrays_of(decode(encode(reusing(rows, 1))))) is None


def test_a_made_action_is_frozen_like_any_other():
    made = make_action(np.array([1]), np.zeros((2, 1, 3)))
    assert type(made) is Action
    assert made.to_wire()["data"]["env_ids"] is made.env_ids
    with pytest.raises(FrozenInstanceError):
        made.action = None


# ---------------------------------------------------------------------------------------- reading

PARSERS = {"infer": parse_infer, "feedback": parse_feedback, "action": parse_action}


def read_both(frames, kinds=tuple(PARSERS)):
    """Read frames in a row, and each alone by a reader that knows no form; give both outcomes."""

    def check_turn(kind):
        if kind not in kinds:
            raise OutOfTurnError(kind)

    def outcome(reader, frame):
        try:
            return encode(reader.read(frame).to_wire())
        except (CodecError, ProtocolError) as error:
            return type(error), str(error)

    experienced = Reader(SERVER_LIMITS, PARSERS, check_turn)
    return (
        [outcome(experienced, frame) for frame in frames],
        [outcome(Reader(SERVER_LIMITS, PARSERS, check_turn), frame) for frame in frames],
    )


@pytest.mark.parametrize(("make", "parse"), CASES)
def test_a_reader_gives_the_same_however_much_it_has_seen(make, parse):
    frames = [encode(make(value).to_wire()) for value in (1.0, 2.0, 3.0, 3.0, 4.0)]
    experienced, fresh = read_both(frames)
    assert experienced == fresh == frames


@pytest.mark.parametrize(("make", "parse"), CASES)
def test_a_message_out_of_turn_is_refused_before_its_values_are_looked_at(make, parse):
    good, bad = (encode(make(ids=ids).to_wire()) for ids in ((4, 7), (4, 4)))
    kinds = ["infer", "feedback", "action"]
    experienced, fresh = read_both([good, good, good, bad], kinds)
    assert experienced == fresh
    assert experienced[-1][0] is MalformedMessageError
    kinds.clear()
    experienced, fresh = read_both([good, bad], kinds)
    assert experienced == fresh
    assert experienced[-1][0] is OutOfTurnError


def test_a_reader_takes_the_long_way_for_other_rows_and_for_converted_text():
    frames = [encode(reusing(rows, 1)) for rows in ([True, False],) * 3 + ([False, True],) * 2]
    frames.append(encode(reusing([True, True], 1)))
    listed = infer().to_wire()
    listed["data"]["text"] = ["one", "two"]
    frames += [encode(listed)] * 4
    experienced, fresh = read_both(frames)
    assert experienced == fresh
    assert [type(outcome) is tuple for outcome in fresh] == [False] * 5 + [True] + [False] * 4


def mutations(frame, rng):
    """Yield frames that differ from one in few bytes, never in length."""
    for _ in range(700):
        spoiled = bytearray(frame)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(spoiled))
            spoiled[at] = rng.choice([0, 1, 2, 0x7F, 0x80, 0xC0, 0xFF, spoiled[at] ^ 1])
        yield bytes(spoiled)


@pytest.mark.parametrize(("make", "parse"), CASES)
def test_mutated_frames_have_the_same_outcome_the_short_way(make, parse):
    """The proof that a template widens nothing: same message, or same error in the same words."""
    rng = random.Random(make.__name__)
    good = [encode(make(value).to_wire()) for value in (1.0, 2.0, 3.0)]
    frames = []
    for number, frame in enumerate(mutations(good[0], rng)):
        frames += [good[number % 3], frame]
    experienced, fresh = read_both(frames)
    assert experienced == fresh
    taken = [outcome for outcome in fresh[1::2] if type(outcome) is bytes]
    assert 20 < len(taken) < 680
