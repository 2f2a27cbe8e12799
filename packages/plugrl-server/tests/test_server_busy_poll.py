"""A loop asks again while that pays, and sleeps otherwise; by a clock that only waits move."""

import asyncio
import os
import selectors
import socket
import types

import pytest

from plugrl_server.server import busy_poll
from plugrl_server.server.busy_poll import BusySelector, make_event_loop

LIMIT_S = 0.0002
LOOK_S = 0.00005
"""A look that finds nothing."""


@pytest.fixture
def waits(monkeypatch):
    """Return a function that makes a selector whose messages come at given times.

    It yields the selector and the list of the timeouts it was asked with; None in between stands
    for an offer of the processor.
    """

    def make(*arrivals, may_ask=lambda: True):
        now_s, asked, due = [0.0], [], list(arrivals)

        def select(_, timeout=None):
            asked.append(timeout)
            if due and (timeout is None or due[0] <= now_s[0] + timeout):
                now_s[0] = max(now_s[0], due.pop(0))
                return ["a message"]
            now_s[0] += LOOK_S if timeout == 0 else timeout
            return []

        monkeypatch.setattr(selectors.DefaultSelector, "select", select)
        clock = types.SimpleNamespace(perf_counter=lambda: now_s[0])
        monkeypatch.setattr(busy_poll, "time", clock)
        monkeypatch.setattr(os, "sched_yield", lambda: asked.append("offered"))
        return BusySelector(LIMIT_S, may_ask), asked

    return make


def test_a_loop_that_knows_nothing_yet_sleeps(waits):
    selector, asked = waits(1.0)
    assert selector.select(None) == ["a message"]
    assert asked == [None]


def test_after_a_short_wait_it_asks_until_something_comes_and_offers_the_processor(waits):
    selector, asked = waits(0.0001, 0.00017)
    selector.select(None)
    del asked[:]
    assert selector.select(None) == ["a message"]
    assert asked == [0, "offered", 0, "offered", 0]


def test_where_nothing_comes_in_time_it_sleeps_and_does_not_ask_the_next_time(waits):
    selector, asked = waits(0.0001, 5.0, 10.0)
    selector.select(None)
    del asked[:]
    assert selector.select(None) == ["a message"]
    assert asked == [0, "offered"] * 4 + [None]
    del asked[:]
    assert selector.select(None) == ["a message"]
    assert asked == [None]


def test_it_asks_again_once_a_wait_was_short(waits):
    selector, asked = waits(0.0001, 5.0, 10.0, 10.0001, 10.00015)
    for _ in range(4):
        selector.select(None)
    del asked[:]
    selector.select(None)
    assert asked == [0, "offered", 0]


def test_a_timer_is_waited_for_no_longer_than_it_runs(waits):
    selector, asked = waits(0.0001)
    selector.select(None)
    del asked[:]
    assert selector.select(0.00008) == []
    assert asked == [0, "offered", 0, "offered", 0.0]
    selector, asked = waits(0.0001)
    selector.select(None)
    assert selector.select(1.0) == []
    assert asked[-1] == pytest.approx(1.0 - 4 * LOOK_S)


def test_it_does_not_ask_while_another_thread_works(waits):
    selector, asked = waits(0.0001, 0.0002, may_ask=lambda: False)
    selector.select(None)
    selector.select(None)
    assert asked == [None, None]


def test_a_loop_with_work_at_hand_looks_once(waits):
    selector, asked = waits(0.0001, 5.0)
    selector.select(None)
    del asked[:]
    assert selector.select(0) == []
    assert asked == [0]


def test_a_wait_that_ends_without_a_message_has_not_paid(waits):
    selector, asked = waits(5.0)
    assert selector.select(0.0001) == []
    del asked[:]
    selector.select(None)
    assert asked == [None]


@pytest.mark.parametrize(("limit_s", "processors"), [(0.0, 2), (LIMIT_S, 1)], ids=["off", "one"])
def test_a_plain_loop_is_made_where_asking_cannot_pay(monkeypatch, limit_s, processors):
    monkeypatch.setattr(busy_poll, "_processors", lambda: processors)
    loop = make_event_loop(limit_s, lambda: True)
    try:
        assert not isinstance(loop._selector, BusySelector)
    finally:
        loop.close()


def test_messages_go_back_and_forth_through_such_a_loop(monkeypatch):
    monkeypatch.setattr(busy_poll, "_processors", lambda: 2)
    ours, theirs = socket.socketpair()

    async def exchange():
        reader, writer = await asyncio.open_connection(sock=ours)
        for number in range(100):
            theirs.send(bytes([number]))
            assert await reader.read(1) == bytes([number])
            await asyncio.sleep(0.0001 * (number % 3))
        writer.close()
        await writer.wait_closed()

    with (
        theirs,
        asyncio.Runner(loop_factory=lambda: make_event_loop(LIMIT_S, lambda: True)) as runner,
    ):
        assert isinstance(runner.get_loop()._selector, BusySelector)
        runner.run(asyncio.wait_for(exchange(), 30))
