"""The client's half of a connection: turns, reuse and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from plugrl_protocol.client_session import TRANSITIONS, ClientSession, ClientState
from plugrl_protocol.codec import decode, encode
from plugrl_protocol.errors import (
    CodecError,
    MalformedMessageError,
    MisuseError,
    OutOfTurnError,
)
from plugrl_protocol.messages import (
    Action,
    Feedback,
    Infer,
    Metadata,
    Observation,
    make_metadata,
    make_observation,
)


def ids(*values):
    return np.array(values, dtype=np.int64)


def observe(*values, text="go"):
    states = {"s": np.array(values, np.float32).reshape(-1, 1)}
    images = {"c": np.array(values, np.uint8).reshape(-1, 1, 1, 1)}
    return make_observation(num_envs=len(values), states=states, images=images, text=text)


def ask(envs, observation=None):
    return Infer(
        env_indices=ids(*envs),
        step_ids=ids(*[0] * len(envs)),
        observation=observation or observe(*envs),
    )


def report(envs, observation=None, *, done=(), info=None):
    m = len(envs)
    return Feedback(
        env_indices=ids(*envs),
        step_ids=ids(*[0] * m),
        observation=observation or observe(*envs),
        rewards=np.ones(m, np.float32),
        terminated=np.array([env in done for env in envs]),
        truncated=np.zeros(m, np.bool_),
        info=info or {},
        steps=ids(*[1] * m),
    )


def answer(envs, horizon=2):
    return encode(Action(env_ids=ids(*envs), action=np.zeros((horizon, len(envs), 1))).to_wire())


def opened(**metadata):
    session = ClientSession()
    session.receive(encode(make_metadata(**metadata).to_wire()))
    return session


def acted(session, envs, observation=None):
    frame = session.infer(ask(envs, observation))
    session.receive(answer(envs))
    return decode(frame)


def test_the_table_is_the_page():
    assert {(s.name, m): t.name for (s, m), t in TRANSITIONS.items()} == {
        ("AWAIT_METADATA", "metadata"): "READY",
        ("READY", "infer"): "AWAIT_ACTION",
        ("AWAIT_ACTION", "action"): "ACTING",
        ("ACTING", "feedback"): "READY",
    }


def test_a_connection_goes_round():
    session = ClientSession()
    assert session.state is ClientState.AWAIT_METADATA
    metadata = session.receive(encode(make_metadata(action_horizon=2).to_wire()))
    assert isinstance(metadata, Metadata)
    assert session.metadata.positive("action_horizon") == 2

    for _ in range(2):
        sent = decode(session.infer(ask([0, 1])))
        assert sent["message_type"] == "infer"
        assert session.state is ClientState.AWAIT_ACTION
        action = session.receive(answer([0, 1]))
        assert isinstance(action, Action)
        assert action.action.shape == (2, 2, 1)
        assert session.holding == {0, 1}
        sent = decode(session.feedback(report([1, 0])))
        assert sent["message_type"] == "feedback"
        assert sent["steps"].tolist() == [1, 1]
        assert session.holding == frozenset()
        assert session.state is ClientState.READY


def test_envs_whose_chunks_end_at_other_times_alternate():
    session = opened()
    acted(session, [0, 1, 2])
    session.feedback(report([1]))
    assert session.holding == {0, 2}
    with pytest.raises(MisuseError, match=r"\[0\] hold an action"):
        session.infer(ask([0, 1]))
    acted(session, [1])
    session.feedback(report([0, 1, 2]))
    acted(session, [2])


@pytest.mark.parametrize("kind", ["metadata", "infer", "feedback", "action", "nonsense"])
def test_a_message_out_of_turn_is_refused(kind):
    session = opened()
    frames = {
        "metadata": encode(make_metadata().to_wire()),
        "action": answer([0]),
        "infer": encode(ask([0]).to_wire()),
        "feedback": encode(report([0]).to_wire()),
        "nonsense": encode({"message_type": "nonsense"}),
    }
    with pytest.raises(OutOfTurnError, match="may send an infer"):
        session.receive(frames[kind])


def test_an_action_before_the_metadata_is_refused():
    with pytest.raises(OutOfTurnError):
        ClientSession().receive(answer([0]))


def test_an_action_for_other_envs_is_refused():
    for envs in ([1, 0], [0], [0, 2]):
        session = opened()
        session.infer(ask([0, 1]))
        with pytest.raises(OutOfTurnError, match="asked for"):
            session.receive(answer(envs))


@pytest.mark.parametrize("frame", ["text", b"\xc1", b"\x01", encode({"a": 1}), b""])
def test_what_is_no_message_is_malformed(frame):
    with pytest.raises(MalformedMessageError):
        ClientSession().receive(frame)


def test_metadata_of_two_megabytes_passes():
    session = ClientSession()
    wide = {str(i): "x" * 20 for i in range(80_000)}
    frame = encode(make_metadata(extra={"blob": "x" * 2**21, "wide": wide}).to_wire())

    assert isinstance(session.receive(frame), Metadata)


def test_sending_out_of_turn_is_a_mistake_of_the_caller():
    with pytest.raises(MisuseError, match="cannot send 'infer'"):
        ClientSession().infer(ask([0]))
    session = opened()
    with pytest.raises(MisuseError, match="cannot send 'feedback'"):
        session.feedback(report([0]))
    session.infer(ask([0]))
    with pytest.raises(MisuseError, match="waiting for an action"):
        session.infer(ask([0]))


def test_feedback_for_an_idle_env_is_a_mistake_of_the_caller():
    session = opened()
    acted(session, [0])
    with pytest.raises(MisuseError, match=r"\[3\] hold no action"):
        session.feedback(report([0, 3]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_ids": ids(3, 5)}, "step_ids is 5 for env 1; its infer said 4"),
        ({"steps": ids(2, 3)}, "steps is 3 for env 1; its chunk has 2"),
    ],
)
def test_feedback_of_another_chunk_is_a_mistake_of_the_caller(changes, message):
    session = opened(features=["chunk-steps"])
    session.infer(replace(ask([0, 1]), step_ids=ids(3, 4)))
    session.receive(answer([0, 1]))
    truth = replace(report([0, 1]), step_ids=ids(3, 4))
    with pytest.raises(MisuseError, match=message):
        session.feedback(replace(truth, **changes))
    assert session.holding == {0, 1}

    session.feedback(truth)


def test_a_refused_message_changes_nothing():
    session = opened()
    with pytest.raises(MalformedMessageError):
        session.infer(ask([0, 0], observe(1, 2)))
    with pytest.raises(MisuseError, match="reuse=None"):
        session.infer(
            Infer(
                env_indices=ids(0),
                step_ids=ids(0),
                observation=observe(),
                reuse=np.array([True]),
            )
        )
    acted(session, [0])
    with pytest.raises(CodecError):
        session.feedback(report([0], info={"bad": object()}))
    session.feedback(report([0]))


def test_integer_states_are_sent_as_floats():
    counts = Observation(images={}, states={"s": np.array([[3]])}, text=np.array(["go"]))
    session = opened()
    sent = acted(session, [0], counts)
    assert sent["data"]["states"]["s"].dtype == np.float64
    sent = decode(session.feedback(report([0], counts)))
    assert sent["data"]["obs"]["states"]["s"].tolist() == [[3.0]]


def test_actions_of_a_known_form_are_still_checked():
    session = opened()
    for _ in range(3):
        acted(session, [0, 1])
        session.feedback(report([0, 1]))
    session.infer(ask([0, 1]))
    with pytest.raises(MalformedMessageError, match="twice"):
        session.receive(answer([1, 1]))
    with pytest.raises(OutOfTurnError, match="asked for"):
        session.receive(answer([1, 0]))
    session.receive(answer([0, 1]))
    with pytest.raises(OutOfTurnError, match="while the client is acting"):
        session.receive(answer([0, 1]))


def test_an_action_of_many_values_is_read_the_long_way():
    session = opened()
    session.infer(ask([0]))
    wire = decode(answer([0]))
    assert isinstance(session.receive(encode({**wire, "more": list(range(300))})), Action)


def test_steps_are_left_out_where_the_server_does_not_read_them():
    session = opened(features=())
    acted(session, [0])
    assert "steps" not in decode(session.feedback(report([0])))
    assert not session.sends_steps


def test_rows_that_the_server_has_are_left_out():
    session = opened()
    acted(session, [0, 1, 2], observe(1, 2, 3))
    session.feedback(report([0, 1, 2], observe(4, 5, 6), done=[1]))
    sent = decode(session.infer(ask([0, 1, 2], observe(4, 5, 7))))

    assert sent["reuse"].tolist() == [True, False, False]
    assert sent["data"]["states"]["s"].tolist() == [[5], [7]]
    assert sent["data"]["images"]["c"].ravel().tolist() == [5, 7]
    assert sent["data"]["text"].tolist() == ["go", "go"]


def test_all_rows_reused_leave_an_empty_batch_with_its_shapes():
    session = opened()
    acted(session, [0, 1])
    session.feedback(report([0, 1], observe(4, 5)))
    sent = decode(session.infer(ask([1, 0], observe(5, 4))))

    assert sent["reuse"].tolist() == [True, True]
    assert sent["data"]["images"]["c"].shape == (0, 1, 1, 1)


def test_nothing_is_left_out_without_the_feature_or_against_the_callers_wish():
    for session in (opened(features=("chunk-steps",)), ClientSession(reuse=False)):
        if session.state is ClientState.AWAIT_METADATA:
            session.receive(encode(make_metadata().to_wire()))
        acted(session, [0])
        session.feedback(report([0], observe(4)))
        assert "reuse" not in decode(session.infer(ask([0], observe(4))))
        assert not session.reuses


def test_the_rows_are_compared_as_bytes():
    nan, zero = float("nan"), -0.0

    def state(value, **more):
        return make_observation(num_envs=1, states={"s": np.array([[value]], "f4"), **more})

    image = {"c": np.zeros((1, 1, 1, 1), np.uint8)}
    cases = [
        (state(nan), state(nan), True),
        (state(0.0), state(zero), False),
        (state(1.0), state(1.0, t=np.zeros((1, 1))), False),
        (state(1.0), make_observation(num_envs=1, states={"s": np.ones((1, 1), "f8")}), False),
        (state(1.0), make_observation(num_envs=1, states={"s": np.ones((1, 2), "f4")}), False),
        (state(1.0), make_observation(num_envs=1, states={"s": np.ones((1, 1), "f4")}), True),
        (make_observation(num_envs=1, images=image), state(1.0), False),
        (make_observation(num_envs=1, text="a"), make_observation(num_envs=1, text="b"), False),
        (
            make_observation(num_envs=1, states={"s": np.zeros((1, 0))}),
            make_observation(num_envs=1, states={"s": np.zeros((1, 0))}),
            True,
        ),
    ]
    for seen, now, expected in cases:
        session = opened()
        acted(session, [0], seen)
        session.feedback(report([0], seen))
        assert ("reuse" in decode(session.infer(ask([0], now)))) is expected


def test_what_was_reported_is_kept_apart_from_the_callers_arrays():
    session = opened()
    acted(session, [0])
    array = np.array([[4.0]], np.float32)
    seen = make_observation(num_envs=1, states={"s": array})
    session.feedback(report([0], seen))
    array[0, 0] = 9.0

    assert "reuse" not in decode(session.infer(ask([0], seen)))


def test_observations_seen_only_before_the_last_action_are_not_reused():
    session = opened()
    acted(session, [0, 1])
    session.feedback(report([0, 1], observe(4, 5)))
    acted(session, [0], observe(7))
    session.feedback(report([0], observe(8)))
    sent = decode(session.infer(ask([0, 1], observe(4, 5))))

    assert sent["reuse"].tolist() == [False, True]


def test_observation_text_of_any_width_compares():
    wide = Observation(text=np.array(["go"], "<U20"))
    session = opened()
    acted(session, [0], wide)
    session.feedback(report([0], wide))
    assert "reuse" in decode(session.infer(ask([0], make_observation(num_envs=1, text="go"))))
