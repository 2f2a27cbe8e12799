"""The batcher's rules, one by one; time is a number."""

import itertools

import pytest

from rlightning.runtime.batcher import (
    BatchRule,
    Decision,
    Request,
    Session,
    decide,
    note_answer,
    note_request,
)

RULE = BatchRule(deadline_s=0.010)


def ask(session, at=0.0, rows=1, layout="a", alone=False):
    return Request(session=session, rows=rows, layout=layout, arrived_s=at, alone=alone)


def answered(at, pause=0.005, layout="a"):
    return Session(layout=layout, answered_s=at, pause_s=pause)


def waiting(layout="a"):
    return Session(layout=layout, answered_s=None, pause_s=0.005)


def test_nothing_waits_so_nothing_is_done():
    assert decide([], {}, RULE, 5.0) == Decision((), None)


def test_a_session_alone_is_answered_at_once():
    request = ask(1)
    assert decide([request], {1: waiting()}, RULE, 0.0).batch == (request,)


def test_all_that_are_expected_have_asked():
    requests = [ask(1), ask(2)]
    assert decide(requests, {1: waiting(), 2: waiting()}, RULE, 0.0).batch == tuple(requests)


def test_a_session_that_usually_asks_before_the_deadline_is_waited_for_until_then():
    request = ask(1, at=1.0)
    sessions = {1: waiting(), 2: answered(0.999, pause=0.008)}
    assert decide([request], sessions, RULE, 1.0) == Decision((), pytest.approx(1.010))
    assert decide([request], sessions, RULE, 1.0101).batch == (request,)


def test_it_is_given_up_after_twice_its_usual_pause():
    request = ask(1, at=1.0)
    sessions = {1: waiting(), 2: answered(0.999, pause=0.002)}
    assert decide([request], sessions, RULE, 1.0) == Decision((), pytest.approx(1.003))
    assert decide([request], sessions, RULE, 1.0031).batch == (request,)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Session(layout="a"), id="new: never asked"),
        pytest.param(Session(layout="a", answered_s=0.999), id="its pause is not known yet"),
        pytest.param(answered(0.999, pause=0.5), id="slower than the deadline"),
        pytest.param(answered(-60.0), id="stalled for a minute"),
        pytest.param(answered(0.999, layout="b"), id="of another layout"),
    ],
)
def test_nobody_waits_for_a_session_that_would_not_come_in_time(other):
    request = ask(1, at=1.0)
    assert decide([request], {1: waiting(), 2: other}, RULE, 1.0).batch == (request,)


def test_enough_rows_go_at_once():
    rule = BatchRule(deadline_s=0.010, target_rows=4)
    sessions = {1: waiting(), 2: waiting(), 3: answered(0.0)}
    requests = [ask(1, rows=3)]
    assert decide(requests, sessions, rule, 0.0).batch == ()
    requests.append(ask(2, rows=1))
    assert decide(requests, sessions, rule, 0.0).batch == tuple(requests)


def test_layouts_do_not_mix_and_the_older_due_group_goes_first():
    one, two, three = ask(1, layout="a"), ask(2, layout="b"), ask(3, layout="a")
    sessions = {1: waiting("a"), 2: waiting("b"), 3: waiting("a")}
    assert decide([one, two, three], sessions, RULE, 0.0).batch == (one, three)
    assert decide([two], sessions, RULE, 0.0).batch == (two,)


def test_a_group_that_waits_does_not_hold_up_another():
    one, two = ask(1, layout="a"), ask(2, layout="b")
    sessions = {1: waiting("a"), 2: waiting("b"), 3: answered(0.0, layout="a")}
    assert decide([one, two], sessions, RULE, 0.0).batch == (two,)


def test_the_earliest_of_several_waits_is_named():
    one, two = ask(1, at=0.002, layout="a"), ask(2, at=0.0, layout="b")
    sessions = {3: answered(0.0, layout="a"), 4: answered(0.0, pause=0.003, layout="b")}
    assert decide([two, one], sessions, RULE, 0.002) == Decision((), pytest.approx(0.006))
    assert decide([one, two], sessions, RULE, 0.002) == Decision((), pytest.approx(0.006))


def test_a_marked_request_goes_alone_and_first():
    one, two = ask(1), ask(2, alone=True)
    assert decide([one, two], {1: waiting(), 2: waiting()}, RULE, 0.0) == Decision((two,), None)


def test_a_pause_is_measured_from_answer_to_request_and_smoothed():
    session = Session()
    note_request(session, ask(1), 1.0)
    assert session.pause_s is None
    note_answer(session, 2.0)
    note_request(session, ask(1), 2.5)
    assert session.pause_s == pytest.approx(0.5)
    assert session.answered_s is None
    note_answer(session, 3.0)
    note_request(session, ask(1, layout="b"), 4.0)
    assert session.pause_s == pytest.approx(0.6)
    assert session.layout == "b"


def test_every_request_is_answered_within_the_deadline_whatever_the_sessions_do():
    """All combinations of two other sessions: no wait goes beyond the deadline."""
    pauses, ages = (None, 0.0, 0.001, 0.009, 0.1), (None, 0.0, 0.001, 0.02, 60.0)
    request = ask(0, at=100.0)
    for choice in itertools.product(pauses, ages, pauses, ages):
        sessions = {0: waiting()}
        for key, (pause, age) in enumerate((choice[:2], choice[2:]), start=1):
            at = None if age is None else 100.0 - age
            sessions[key] = Session(layout="a", answered_s=at, pause_s=pause)
        decision = decide([request], sessions, RULE, 100.0)
        assert decision.batch or 100.0 < decision.wake_s <= 100.0 + RULE.deadline_s
        assert decide([request], sessions, RULE, 100.0 + RULE.deadline_s).batch == (request,)
