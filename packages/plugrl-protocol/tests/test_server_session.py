"""The server's half of a connection: turns, records, reuse, the feedback clock, bounds."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from plugrl_protocol.client_session import ClientSession, ClientState
from plugrl_protocol.codec import decode, encode
from plugrl_protocol.errors import (
    CLOSE_FEEDBACK_TIMEOUT,
    CLOSE_RESYNC,
    MalformedMessageError,
    MisuseError,
    OutOfTurnError,
    ProtocolError,
)
from plugrl_protocol.messages import (
    Action,
    Feedback,
    Infer,
    make_metadata,
    make_observation,
)
from plugrl_protocol.server_session import TRANSITIONS, ServerSession, ServerState, SessionConfig


def ids(*values):
    return np.array(values, dtype=np.int64)


def observe(*values, key="s", text="go"):
    states = {key: np.array(values, np.float32).reshape(-1, 1)}
    images = {"c": np.array(values, np.uint8).reshape(-1, 1, 1, 1)}
    return make_observation(num_envs=len(values), states=states, images=images, text=text)


def ask(envs, observation=None, *, reuse=None):
    request = Infer(
        env_indices=ids(*envs),
        step_ids=ids(*[5] * len(envs)),
        observation=observe(*envs) if observation is None else observation,
        reuse=None if reuse is None else np.array(reuse),
    )
    return encode(request.to_wire())


def report(envs, observation=None, *, terminated=(), truncated=(), steps=None, step_ids=None):
    m = len(envs)
    message = Feedback(
        env_indices=ids(*envs),
        step_ids=ids(*(step_ids or [5] * m)),
        observation=observe(*envs) if observation is None else observation,
        rewards=np.ones(m, np.float32),
        terminated=np.array([env in terminated for env in envs]),
        truncated=np.array([env in truncated for env in envs]),
        steps=None if steps is None else ids(*steps),
    )
    return encode(message.to_wire())


def opened(**config):
    session = ServerSession(config=SessionConfig(**config))
    session.open()
    return session


def answered(session, envs, observation=None, *, now=0.0, horizon=2, **kwargs):
    request = session.receive(ask(envs, observation, **kwargs))
    session.answer(np.zeros((horizon, len(envs), 1)), now)
    return request


def test_the_table_is_the_page():
    assert {(s.name, m): t.name for (s, m), t in TRANSITIONS.items()} == {
        ("OPENING", "metadata"): "AWAIT_INFER",
        ("AWAIT_INFER", "infer"): "INFERRING",
        ("INFERRING", "action"): "AWAIT_FEEDBACK",
        ("AWAIT_FEEDBACK", "feedback"): "AWAIT_INFER",
    }


def test_the_server_speaks_first_and_once():
    session = ServerSession(metadata=make_metadata(policy="P"))
    message = decode(session.open())

    assert message["message_type"] == "metadata"
    assert message["data"]["policy"] == "P"
    assert message["data"]["features"] == ["reuse-feedback-obs", "chunk-steps"]
    with pytest.raises(MisuseError):
        session.open()
    quiet = ServerSession(config=SessionConfig(features=()))
    assert decode(quiet.open())["data"]["features"] == []


def test_a_connection_goes_round_and_keeps_one_record_per_env():
    session = opened()
    request = session.receive(ask([3, 1]))
    assert isinstance(request, Infer)
    assert session.state is ServerState.INFERRING
    action = np.arange(6, dtype=np.float32).reshape(3, 2, 1)
    sent = decode(session.answer(action, 0.0))
    assert sent["data"]["env_ids"].tolist() == [3, 1]
    assert sent["data"]["action"].tolist() == action.tolist()
    record = session.records[3]
    assert (record.holds_action, record.step_id, record.horizon_steps) == (True, 5, 3)
    record.owner = "mine"

    got = session.receive(report([3], terminated=[3], steps=[2]))
    assert isinstance(got, Feedback)
    assert (record.holds_action, record.terminated, record.truncated) == (False, True, False)
    assert session.records[1].holds_action
    assert session.state is ServerState.AWAIT_INFER
    answered(session, [3])
    assert session.records[3].owner == "mine"


def test_feedback_is_routed_by_env_index_however_late():
    session = opened()
    answered(session, [0, 1])
    session.receive(report([1]))
    answered(session, [1])
    got = session.receive(report([1, 0], truncated=[0]))

    assert got.env_indices.tolist() == [1, 0]
    assert session.records[0].truncated


@pytest.mark.parametrize("envs", [[5], [0, 5], [1]])
def test_feedback_for_an_env_that_holds_no_action_is_refused(envs):
    session = opened()
    answered(session, [0, 1])
    session.receive(report([1]))
    answered(session, [1])
    session.receive(report([0, 1]))
    answered(session, [0])
    with pytest.raises(OutOfTurnError, match="holds no action") as caught:
        session.receive(report(envs))
    assert caught.value.close == CLOSE_RESYNC


@pytest.mark.parametrize("step_ids", [[5, 4], [6, 5], [5, 2**40]])
def test_feedback_of_another_chunk_is_refused(step_ids):
    session = opened()
    answered(session, [0, 1])

    with pytest.raises(MalformedMessageError, match=r"step_ids is \d+ for env [01].* said 5"):
        session.receive(report([0, 1], step_ids=step_ids))


def test_a_client_need_not_count_chunks():
    session = opened()
    answered(session, [0, 1])

    session.receive(report([0, 1], step_ids=[5, 0]))


def test_an_infer_for_an_env_that_owes_its_feedback_is_refused():
    session = opened()
    answered(session, [0, 1])
    session.receive(report([1]))
    with pytest.raises(OutOfTurnError, match="env 0"):
        session.receive(ask([0, 1]))


@pytest.mark.parametrize(
    ("prepare", "frame"),
    [
        (lambda s: None, report([0])),
        (lambda s: None, encode(make_metadata().to_wire())),
        (lambda s: None, encode({"message_type": "nonsense"})),
        (lambda s: s.receive(ask([0])), ask([0])),
        (lambda s: s.receive(ask([0])), report([0])),
        (
            lambda s: s.receive(ask([0])),
            encode(Action(env_ids=ids(0), action=np.zeros((1, 1))).to_wire()),
        ),
        (lambda s: answered(s, [0]), ask([1])),
    ],
)
def test_a_message_out_of_turn_is_refused(prepare, frame):
    session = opened()
    prepare(session)
    with pytest.raises(OutOfTurnError):
        session.receive(frame)


@pytest.mark.parametrize("frame", ["text", b"\xc1", b"\x01", encode({"a": 1}), b"", b"\x91" * 99])
def test_what_is_no_message_is_malformed(frame):
    with pytest.raises(MalformedMessageError) as caught:
        opened().receive(frame)
    assert caught.value.close == CLOSE_RESYNC


def test_a_message_of_many_values_is_read_the_long_way_each_time():
    many = list(range(250))
    session = opened()
    for _ in range(2):
        wire = decode(ask(many))
        wire["data"]["text"] = [f"task {i}" for i in many]
        request = session.receive(encode(wire))
        assert request.observation.text[-1] == "task 249"
        session.answer(np.zeros((1, 250)), 0.0)
        session.receive(report(many))


def test_values_of_a_known_form_are_still_checked():
    session = opened()
    for _ in range(3):
        answered(session, [0, 1])
        session.receive(report([0, 1]))
    with pytest.raises(MalformedMessageError, match="twice"):
        session.receive(ask([1, 1]))
    answered(session, [1, 0])
    with pytest.raises(OutOfTurnError):
        session.receive(ask([0, 1]))
    with pytest.raises(OutOfTurnError, match="env 2"):
        session.receive(report([2, 0]))


def test_an_answer_must_fit_its_infer():
    session = opened()
    with pytest.raises(MisuseError, match="waiting for an infer"):
        session.answer(np.zeros((1, 1)), 0.0)
    session.receive(ask([0, 1]))
    for wrong in (np.zeros(2), np.zeros((2, 3)), np.zeros((0, 2)), np.array([[object()] * 2])):
        with pytest.raises(MisuseError, match="cannot be sent"):
            session.answer(wrong, 0.0)
    with pytest.raises(MisuseError, match="cannot be sent"):
        session.answer(np.zeros((1, 2), np.longdouble), 0.0)
    session.answer(np.zeros((1, 2)), 0.0)


def test_a_reused_row_is_that_of_the_last_feedback():
    session = opened()
    answered(session, [0, 1, 2])
    session.receive(report([0, 1, 2], observe(10, 11, 12)))
    got = answered(session, [2, 0, 1], observe(99), reuse=[True, False, True])

    assert got.observation.states["s"].ravel().tolist() == [12, 99, 11]
    assert got.observation.images["c"].ravel().tolist() == [12, 99, 11]
    assert got.observation.text.tolist() == ["go"] * 3
    assert got.reuse.tolist() == [True, False, True]
    assert session.reused_rows == 2


def test_rows_come_from_several_feedbacks():
    session = opened()
    answered(session, [0, 1])
    session.receive(report([0], observe(10)))
    answered(session, [2])
    session.receive(report([1, 2], observe(11, 12, text="a longer text")))
    got = answered(session, [0, 1, 2], observe(), reuse=[True, True, True])

    assert got.observation.states["s"].ravel().tolist() == [10, 11, 12]
    assert got.observation.text.tolist() == ["go", "a longer text", "a longer text"]


def test_a_whole_reused_feedback_is_not_copied():
    session = opened()
    answered(session, [0, 1])
    feedback = session.receive(report([0, 1], observe(10, 11)))
    got = answered(session, [0, 1], observe(), reuse=[True, True])
    assert got.observation is feedback.observation
    session.receive(report([0, 1], observe(20, 21)))
    got = answered(session, [1], observe(), reuse=[True])
    assert got.observation.states["s"].tolist() == [[21]]


def test_reused_rows_come_in_the_order_of_the_request():
    session = opened()
    answered(session, [3, 8])
    session.receive(report([3, 8], observe(30, 80)))
    got = answered(session, [8, 3], observe(), reuse=[True, True])
    assert got.observation.states["s"][:, 0].tolist() == [80.0, 30.0]
    assert got.observation.text.tolist() == ["go", "go"]


def test_an_infer_may_reuse_nothing():
    session = opened()
    got = answered(session, [0], observe(7), reuse=[False])
    assert got.observation.states["s"].tolist() == [[7]]


@pytest.mark.parametrize("case", ["never", "terminated", "truncated", "spent", "other connection"])
def test_reuse_without_a_row_to_reuse_is_refused(case):
    session = opened()
    if case != "never":
        answered(session, [0, 1])
        done = {case: [0]} if case in ("terminated", "truncated") else {}
        session.receive(report([0, 1], **done))
    if case == "spent":
        answered(session, [0], observe(), reuse=[True])
        session.receive(report([0], terminated=[0]))
    if case == "other connection":
        session = opened()
    with pytest.raises(MalformedMessageError, match="env 0 reuses"):
        session.receive(ask([1, 0], observe(1), reuse=[False, True]))


def test_reuse_without_the_feature_is_refused():
    session = opened(features=("chunk-steps",))
    answered(session, [0])
    session.receive(report([0]))
    with pytest.raises(MalformedMessageError, match="not offered"):
        session.receive(ask([0], observe(), reuse=[True]))


def test_fresh_rows_must_look_like_reused_ones():
    for other in (
        observe(1, key="other"),
        make_observation(num_envs=1, states={"s": np.zeros((1, 2), "f4")}),
    ):
        session = opened()
        answered(session, [0, 1])
        session.receive(report([0, 1]))
        with pytest.raises(MalformedMessageError, match="differ"):
            session.receive(ask([0, 1], other, reuse=[True, False]))


def test_names_may_come_in_any_order():
    def make(order, value):
        states = {name: np.full((1, 1), value, "f4") for name in order}
        return make_observation(num_envs=1, states=states)

    session = opened()
    answered(session, [0, 1], make_observation(num_envs=2))
    session.receive(report([0], make("ab", 1)))
    got = answered(session, [0, 2], make("ba", 2), reuse=[True, False])
    assert got.observation.states["b"].ravel().tolist() == [1, 2]


def test_steps_are_bounded_by_the_chunk():
    session = opened()
    answered(session, [0], horizon=3)
    with pytest.raises(MalformedMessageError, match="4 steps of env 0, whose chunk had 3"):
        session.receive(report([0], steps=[4]))
    session = opened(features=())
    answered(session, [0], horizon=3)
    assert session.receive(report([0], steps=[4])).steps is None, "not offered, not read"


def test_the_feedback_clock_runs_from_the_action():
    session = opened(feedback_timeout_s=60.0)
    assert session.deadline_s is None
    assert session.expired(1e9) is None
    answered(session, [0], now=100.0)
    assert session.deadline_s == 160.0
    assert session.expired(159.9) is None
    assert session.expired(160.0) == CLOSE_FEEDBACK_TIMEOUT
    session.receive(report([0]))
    assert session.expired(1e9) is None


def test_the_feedback_clock_stands_while_learning():
    session = opened(feedback_timeout_s=60.0)
    answered(session, [0], now=100.0)
    session.suspend(110.0)
    session.suspend(120.0)
    assert session.expired(1e9) is None
    session.resume(1000.0)
    assert session.deadline_s == 1050.0
    session.resume(2000.0)
    assert session.deadline_s == 1050.0
    session.receive(report([0]))
    session.suspend(1100.0)
    answered(session, [0], now=1200.0)
    assert session.deadline_s is None
    session.resume(1300.0)
    assert session.deadline_s == 1360.0
    session.receive(report([0]))
    session.suspend(1400.0)
    session.resume(1500.0)
    assert session.deadline_s is None


def test_envs_and_remembered_frames_are_bounded():
    session = opened(max_envs=2)
    answered(session, [0, 1])
    session.receive(report([0, 1]))
    with pytest.raises(MalformedMessageError, match="more than 2 envs"):
        session.receive(ask([0, 7]))

    image = np.zeros((1, 512, 512, 3), np.uint8)
    session = opened(max_remembered_mb=1.0)
    for env in range(2):
        seen = make_observation(num_envs=1, images={"c": image})
        answered(session, [env], seen)
        if env:
            with pytest.raises(MalformedMessageError, match="over 1 MiB"):
                session.receive(report([env], seen))
        else:
            session.receive(report([env], seen))


def test_memory_of_a_long_connection_is_flat():
    session = opened(max_remembered_mb=1.0)
    seen = make_observation(num_envs=1, images={"c": np.zeros((1, 256, 512, 3), np.uint8)})
    for step in range(20):
        answered(session, [0, 1], seen.rows(np.zeros(2, int)))
        session.receive(report([0, 1], seen.rows(np.zeros(2, int)), terminated=[step % 2]))
    answered(session, [0, 1], seen.rows(np.zeros(2, int)))
    assert session._remembered_bytes == 0
    assert len(session.records) == 2


class BothEnds(RuleBasedStateMachine):
    """A client and a server session joined by their frames agree whatever the order of events."""

    def __init__(self):
        super().__init__()
        self.client, self.server = ClientSession(), ServerSession()
        self.client.receive(self.server.open())
        self.rng = np.random.default_rng(0)
        self.last = {}
        self.now = 0.0

    def observation(self, envs, fresh):
        values = [self.last.get(env, 0) if not f else int(self.rng.integers(200)) for env, f in
                  zip(envs, fresh, strict=True)]  # fmt: skip
        return observe(*values)

    @precondition(lambda self: self.client.state is ClientState.READY)
    @rule(data=st.data())
    def exchange(self, data):
        free = sorted(set(range(5)) - self.client.holding)
        envs = data.draw(st.permutations(free)) if free else []
        envs = envs[: data.draw(st.integers(1, 5))]
        if not envs:
            return
        seen = self.observation(envs, [data.draw(st.booleans()) for _ in envs])
        request = Infer(env_indices=ids(*envs), step_ids=ids(*[0] * len(envs)), observation=seen)
        got = self.server.receive(self.client.infer(request))
        assert got.observation.states["s"].tolist() == seen.states["s"].tolist()
        assert got.observation.images["c"].tolist() == seen.images["c"].tolist()
        action = self.rng.normal(size=(3, len(envs), 2))
        self.now += 1
        reply = self.client.receive(self.server.answer(action, self.now))
        assert reply.action.tolist() == action.tolist()

    @precondition(lambda self: self.client.state is ClientState.ACTING)
    @rule(data=st.data())
    def report(self, data):
        holding = sorted(self.client.holding)
        envs = data.draw(st.permutations(holding))[: data.draw(st.integers(1, 5))]
        seen = self.observation(envs, [True] * len(envs))
        done = np.array([data.draw(st.booleans()) for _ in envs])
        message = Feedback(
            env_indices=ids(*envs),
            step_ids=ids(*[0] * len(envs)),
            observation=seen,
            rewards=np.zeros(len(envs), np.float32),
            terminated=done,
            truncated=np.zeros(len(envs), np.bool_),
            steps=ids(*[1] * len(envs)),
        )
        got = self.server.receive(self.client.feedback(message))
        self.last.update(zip(envs, seen.states["s"].ravel().tolist(), strict=True))
        assert got.terminated.tolist() == done.tolist()
        held = {index for index, record in self.server.records.items() if record.holds_action}
        assert held == self.client.holding


BothEnds.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestBothEnds = BothEnds.TestCase


def test_every_error_of_a_session_is_a_violation():
    assert issubclass(OutOfTurnError, ProtocolError)
    assert issubclass(MalformedMessageError, ProtocolError)
