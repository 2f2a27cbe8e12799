"""A message filled into prepared bytes is the one that is encoded in full, and as well checked."""

import numpy as np
import pytest

from plugrl_protocol.codec import SERVER_LIMITS, encode
from plugrl_protocol.errors import MalformedMessageError
from plugrl_protocol.messages import (
    Action,
    Feedback,
    Infer,
    make_observation,
    parse_action,
    parse_feedback,
    parse_infer,
)
from plugrl_protocol.sending import Sender, outline

INFO = {"episode": {"r": np.ones(2)}, "n": 5}


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
        info=info or {},
        steps=None if steps is None else np.array(steps),
    )


def action(value=1.0, ids=(4, 7)):
    return Action(env_ids=np.array(ids), action=np.full((3, 2, 1), value))


def send(sender, message, parse):
    sender.check(message, parse)
    return sender.frame()


SENT = [(infer, parse_infer), (feedback, parse_feedback), (action, parse_action)]


@pytest.mark.parametrize(("make", "parse"), SENT)
def test_a_form_that_was_sent_before_is_filled_with_the_same_bytes(make, parse):
    sender = Sender(SERVER_LIMITS)
    for value in (1.0, 2.0, 7.0, 9.0):
        message = make(value, ids=(int(value), 100))
        assert send(sender, message, parse) == encode(message.to_wire())
    assert len(sender._forms) == 1


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
        (feedback, parse_feedback, {"rewards": (0.0, np.nan)}),
        (feedback, parse_feedback, {"steps": (0, 1)}),
        (feedback, parse_feedback, {"ids": (-1, 1)}),
    ],
)
def test_values_of_a_known_form_are_checked_before_they_are_sent(make, parse, bad):
    sender = Sender(SERVER_LIMITS)
    for _ in range(3):
        send(sender, make(), parse)
    with pytest.raises(MalformedMessageError):
        sender.check(make(**bad), parse)
    without = make(steps=None) if make is feedback else make()
    assert send(sender, without, parse) == encode(without.to_wire())


def test_steps_may_be_absent_from_a_known_form():
    sender = Sender(SERVER_LIMITS)
    for _ in range(3):
        message = feedback(steps=None)
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
        sender.check(infer(step_ids=(0.0, 1.0)), parse_infer)


def test_what_has_no_form_goes_the_long_way():
    assert outline(feedback(info=INFO)) is None, "info is free"
    sender = Sender(SERVER_LIMITS)
    for _ in range(3):
        assert send(sender, feedback(info=INFO), parse_feedback) == encode(
            feedback(info=INFO).to_wire()
        )
    assert not sender._forms
    assert sender.encode({"a": 1}) == encode({"a": 1})


def test_forms_do_not_pile_up():
    sender = Sender(SERVER_LIMITS)
    for number in range(1, 200):
        message = action(ids=tuple(range(2)))
        object.__setattr__(message, "action", np.zeros((number, 2, 1)))
        for _ in range(2):
            send(sender, message, parse_action)
    assert len(sender._forms) <= 64
    assert len(sender._seen) <= 64


def test_a_form_with_too_much_between_its_arrays_is_not_kept():
    sender = Sender(SERVER_LIMITS)
    states = {"x" * 100 + str(number): np.zeros((2, 1)) for number in range(200)}
    seen = make_observation(num_envs=2, states=states)
    message = Infer(env_indices=np.array([0, 1]), step_ids=np.array([0, 0]), observation=seen)
    for _ in range(3):
        assert send(sender, message, parse_infer) == encode(message.to_wire())
    assert not sender._forms


class Subclass(np.ndarray):
    """An array with a class of its own."""


def test_what_is_no_plain_array_goes_the_long_way():
    sender = Sender(SERVER_LIMITS)
    for _ in range(3):
        send(sender, infer(), parse_infer)
    for value in ([0, 1], None, np.float32(1), np.array([0, 1]).view(Subclass)):
        listed = infer()
        object.__setattr__(listed, "step_ids", value)
        try:
            expected = str(parse_infer(listed.to_wire()).step_ids)
        except MalformedMessageError as error:
            expected = str(error)
        try:
            found = str(sender.check(listed, parse_infer).step_ids)
        except MalformedMessageError as error:
            found = str(error)
        assert found == expected


def test_integer_states_are_converted_each_time():
    sender = Sender(SERVER_LIMITS)
    whole = infer()
    object.__setattr__(whole.observation, "states", {"z": np.ones((2, 3), np.int64)})
    for _ in range(3):
        checked = sender.check(whole, parse_infer)
        assert checked.observation.states["z"].dtype == np.float64
        assert sender.frame() == encode(checked.to_wire())
    assert not sender._forms


def test_two_forms_taken_in_turn_are_both_kept():
    sender = Sender(SERVER_LIMITS)
    for number in range(8):
        horizon = 3 + number % 2
        message = Action(env_ids=np.array([4]), action=np.full((horizon, 1, 2), number))
        assert send(sender, message, parse_action) == encode(message.to_wire())
    assert len(sender._forms) == 2


def reusing(reuse, rows):
    return Infer(
        env_indices=np.array([4, 7]), step_ids=np.array([0, 1]), reuse=np.array(reuse),
        observation=observation().rows(slice(0, rows)),
    )  # fmt: skip


def test_messages_that_leave_rows_out_have_a_form_while_the_rows_agree():
    sender = Sender(SERVER_LIMITS)
    for _ in range(3):
        for reuse in ([True, True], [True, False], [False, True]):
            message = reusing(reuse, 2 - sum(reuse))
            assert send(sender, message, parse_infer) == encode(message.to_wire())
            assert send(sender, infer(), parse_infer) == encode(infer().to_wire())
    assert len(sender._forms) == 3
    assert outline(reusing([True, False], 2)) is None
    with pytest.raises(MalformedMessageError):
        sender.check(reusing([True, False], 2), parse_infer)
