"""Two workers that take turns: the same work as call by call, and nothing lost where they stop."""

import math
import os
import signal
import time

import pytest

pytest.importorskip("ray")

from rlightning.errors import WorkerLostError
from rlightning.runtime.base import WorkerSpec
from rlightning.runtime.host import WorkerSetup
from rlightning.runtime.ray import RayRuntime
from rlightning.runtime.turns import Turns

pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]


class Side:
    """Adds up what it is told; does something else at one of its calls, if asked to."""

    def __init__(self):
        self.prepare()

    def prepare(self, at=0, what=""):
        self.sum, self.calls, self.at, self.what = 0, 0, at, what

    def state(self):
        return [self.sum, self.calls]

    def ask(self, answer):
        return self.take(answer)

    def answer(self, questions, factor):
        return [factor * self.take(question) for question in questions]

    def take(self, number):
        self.calls += 1
        if self.calls == self.at:
            if self.what == "raise":
                raise ValueError("no more")
            if self.what == "odd":  # too odd for a frame
                self.sum += number
                return Odd(self.sum)
            if self.what == "hang":
                time.sleep(1000)
            if self.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.2)  # "wait"
        self.sum += number
        return self.sum


class Odd(int):
    """An integer that only looks like one."""

    def __mul__(self, other):
        return Odd(int(self) * other)

    __rmul__ = __mul__


ROUNDS = 40


def pair(runtime):
    specs = [WorkerSpec(name=f"{side}-0", make=Side, timeout_s=2.0) for side in ("asker", "answer")]
    handles = [runtime.spawn(spec) for spec in specs]
    for handle in handles:
        handle.call("state").result()
    return handles


@pytest.fixture(scope="module")
def runtime(ray_cluster):
    runtime = RayRuntime("local", setup=WorkerSetup())
    yield runtime
    runtime.close()


@pytest.fixture(scope="module")
def workers(runtime):
    return pair(runtime)


def one_by_one():
    """Return all answers and outcomes, from the same work without workers."""
    asker, answerer = Side(), Side()
    rounds, question = [], 1
    for _ in range(ROUNDS):
        (answer,) = answerer.answer([question], 2)
        question = asker.ask(answer)
        rounds.append((answer, question))
    return rounds


def begin(workers, rounds=ROUNDS):
    asker, answerer = workers
    return Turns.begin(
        asker,
        answerer,
        ask="ask",
        answer="answer",
        question=1,
        further=[2],
        rounds=rounds,
    )


def play(workers, turns):
    """Return the answers and outcomes up to the last, and how many calls were made from here."""
    asker, answerer = workers
    rounds, question, own = [], 1, 0
    for _ in range(ROUNDS):
        answer = turns.take_answer()
        if answer is None:
            (answer,) = answerer.call("answer", [question], 2).result()
            own += 1
        question = turns.take_outcome()
        if question is None:
            question = asker.call("ask", answer).result()
            own += 1
        rounds.append((answer, question))
    turns.close()
    return rounds, own


def prepare(workers, side, **trouble):
    for handle, name in zip(workers, ("asker", "answerer"), strict=True):
        handle.call("prepare", **(trouble if name == side else {})).result()


def states(workers):
    return [handle.call("state").result() for handle in workers]


def test_turns_are_the_same_work_as_one_call_after_another(workers):
    prepare(workers, None)
    rounds, own = play(workers, begin(workers))
    assert rounds == one_by_one()
    assert own == 0
    assert states(workers)[0] == [rounds[-1][1], ROUNDS]


@pytest.mark.parametrize("side", ["asker", "answerer"])
@pytest.mark.parametrize("at", [1, 17, ROUNDS])
def test_what_fits_no_frame_is_handed_on_by_the_caller(workers, side, at):
    prepare(workers, side, at=at, what="odd")
    turns = begin(workers)
    rounds, own = play(workers, turns)
    assert rounds == one_by_one()
    assert [calls for _, calls in states(workers)] == [ROUNDS, ROUNDS]
    assert turns.stumbled is (at < ROUNDS or side == "answerer")
    assert own == 2 * (ROUNDS - at) + (side == "answerer")


@pytest.mark.parametrize("side", ["asker", "answerer"])
def test_what_one_of_them_raises_is_raised_in_its_place(workers, side):
    prepare(workers, side, at=17, what="raise")
    turns = begin(workers)
    done = [(turns.take_answer(), turns.take_outcome()) for _ in range(16)]
    assert done == one_by_one()[:16]
    if side == "asker":
        assert turns.take_answer() == one_by_one()[16][0]
        assert turns.has_outcome
    with pytest.raises(ValueError, match="no more") as caught:
        turns.take_outcome() if side == "asker" else turns.take_answer()
    assert sum("in worker" in note for note in caught.value.__notes__) == 1
    turns.close()
    assert not turns.stumbled
    assert states(workers)[0][1] == (17 if side == "asker" else 16)


@pytest.mark.parametrize("slow", ["asker", "answerer"])
def test_a_caller_that_stops_takes_what_was_done_and_goes_on_from_there(workers, slow):
    prepare(workers, slow, at=9, what="wait")
    turns = begin(workers)
    done = [(turns.take_answer(), turns.take_outcome()) for _ in range(3)]
    while not turns.all_taken():
        answer, outcome = turns.take_answer(), turns.take_outcome()
        if outcome is None:  # the answer was on its way
            outcome = workers[0].call("ask", answer).result()
        done.append((answer, outcome))
    turns.close()
    assert len(done) < ROUNDS
    assert done == one_by_one()[: len(done)]
    assert [calls for _, calls in states(workers)] == [len(done), len(done)]


@pytest.mark.parametrize("called", [0, 1])
def test_a_call_meanwhile_ends_the_turns(workers, called):
    prepare(workers, "asker", at=9, what="wait")
    turns = begin(workers)
    assert workers[called].call("state", timeout_s=math.inf).result()[1] < ROUNDS
    rounds, own = play(workers, turns)
    assert rounds == one_by_one()
    assert own > 0
    assert [calls for _, calls in states(workers)] == [ROUNDS, ROUNDS]


@pytest.mark.parametrize("side", ["asker", "answerer"])
@pytest.mark.parametrize("what", ["die", pytest.param("hang", marks=pytest.mark.slow)])
def test_one_that_dies_or_hangs_leaves_the_other_where_it_was(runtime, side, what):
    workers = pair(runtime)
    prepare(workers, side, at=17, what=what)
    turns = begin(workers)
    done = []
    begin_s = time.monotonic()
    while (answer := turns.take_answer()) is not None:
        outcome = turns.take_outcome()
        if outcome is None:
            break
        done.append((answer, outcome))
    turns.close()
    assert time.monotonic() - begin_s < 60
    assert done == one_by_one()[: len(done)]
    lost, alive = workers if side == "asker" else workers[::-1]
    with pytest.raises(WorkerLostError, match="did not answer" if what == "hang" else "kill -9"):
        lost.call("state").result()
    assert alive.call("state").result()[1] == (17 if side == "asker" else 16)
    if side == "answerer":
        assert len(done) == 16, "the asker is alive and has told everything"
    for handle in workers:
        handle.stop()
