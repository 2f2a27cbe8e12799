"""The display is lines without a terminal and a table on one, never both."""

import io
import sys

from rlightning.utils import progress
from rlightning.utils.progress import ProgressDisplay, get_console


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def test_lines_come_at_most_every_interval_and_always_for_the_last_epoch():
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay(9, stream=stream, min_interval_s=3.0, clock=clock) as display:
        for epoch in range(1, 10):
            display.update(epoch, {"return": 20.0 * epoch, "env_step": 1000 * epoch})
            clock.now_s += 1.0
    shown = [line.split()[1] for line in stream.getvalue().splitlines()]
    assert shown == ["1/9", "4/9", "7/9", "9/9"]
    assert stream.getvalue().splitlines()[-1] == "epoch 9/9  return 180  env_step 9,000"


def test_a_disabled_display_writes_nothing():
    stream = io.StringIO()
    with ProgressDisplay(1, enabled=False, stream=stream) as display:
        display.update(1, {"return": 1.0})
    assert stream.getvalue() == ""


def test_a_number_that_does_not_exist_yet_is_not_shown():
    stream = io.StringIO()
    with ProgressDisplay(1, stream=stream) as display:
        display.update(1, {"loss": 0.5, "return": None})
    assert stream.getvalue() == "epoch 1/1  loss 0.5\n"


def test_an_update_after_the_end_is_ignored():
    stream = io.StringIO()
    with ProgressDisplay(1, stream=stream) as display:
        pass
    display.update(1, {})
    assert stream.getvalue() == ""


def test_a_line_has_what_is_new_since_the_line_before():
    clock, stream = Clock(), io.StringIO()
    with ProgressDisplay(4, stream=stream, min_interval_s=2.0, clock=clock) as display:
        for epoch, new in enumerate([{"loss"}, {"loss", "eval"}, {"loss"}, {"loss"}], start=1):
            display.update(epoch, {"loss": 0.5, "eval": 9.0}, new=new)
            clock.now_s += 1.0
    assert stream.getvalue().splitlines() == [
        "epoch 1/4  loss 0.5",
        "epoch 3/4  loss 0.5  eval 9",
        "epoch 4/4  loss 0.5",
    ]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_the_table_and_no_plain_line(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    get_console.cache_clear()
    try:
        with ProgressDisplay(2) as display:
            display.update(1, {"rollout/episode_return": 12.0})
            display.update(2, {"rollout/episode_return": 34.5})
    finally:
        get_console.cache_clear()
    assert "34.5" in terminal.getvalue()
    assert "2/2" in terminal.getvalue()
    assert "epoch 2/2  " not in terminal.getvalue()


def test_numbers_are_short_and_counts_are_whole():
    assert progress._number(0.000123456) == "0.0001235"
    assert progress._number(2_000_000) == "2,000,000"
