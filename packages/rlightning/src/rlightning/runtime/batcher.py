"""Decide which waiting requests form the next batch. Pure: no clock, no thread, no I/O.

Requests come from *sessions* (connections, workers) that take turns: each waits for the answer of
its request before it sends the next. Whoever runs a model asks `decide` whenever something has
changed or the time that the last decision named has come. The rules:

* requests of different layouts never share a batch;
* a batch goes at once when every session that is expected to ask soon has asked, or when enough
  rows are there; a session alone is therefore answered at once;
* else it goes at its deadline, counted from its oldest request;
* a session is expected while it is no later than twice its usual pause, and only if its usual pause
  ends before the deadline: waiting for anybody else would not fill the batch. An idle, new, slow or
  stalled session delays nobody;
* a request that made the model fail is marked `alone` and forms a batch of its own.

Knows nothing about models, sockets or frames.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Mapping, Sequence

__all__ = ["BatchRule", "Decision", "Request", "Session", "decide", "note_answer", "note_request"]

_PATIENCE = 2.0
_SMOOTHING = 0.2

Key: TypeAlias = "Hashable"


@dataclass(slots=True, eq=False)
class Request:
    """Something that waits for an answer."""

    session: Key
    """Who asks."""
    rows: int
    """How many observations it holds."""
    layout: Key
    """Names, shapes and dtypes of its arrays: requests of one layout can be joined."""
    arrived_s: float
    """When it came."""
    alone: bool = False
    """Whether it must not share a batch."""
    payload: Any = None
    """For the caller."""


@dataclass(slots=True, eq=False)
class Session:
    """What is known of one that asks again and again."""

    layout: Key = None
    """Of its last request."""
    answered_s: float | None = None
    """When it was last answered; None while a request of it waits, or before the first."""
    pause_s: float | None = None
    """How long it usually takes from an answer to its next request; None until it is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchRule:
    """How long to wait for how much."""

    deadline_s: float
    """Longest wait of a request for others to join it."""
    target_rows: int | None = None
    """Rows with which a batch goes at once; None asks for every expected session."""


class Decision(NamedTuple):
    """What to do now.

    Attributes:
        batch: requests to run together, oldest first; empty if there is nothing to do yet.
        wake_s: when to ask again at the latest, if nothing changes before; None: no need.
    """

    batch: tuple[Request, ...]
    wake_s: float | None


def note_request(session: Session, request: Request, now_s: float) -> None:
    """Tell a session's record that it has asked."""
    session.layout = request.layout
    if session.answered_s is not None:
        pause_s = max(0.0, now_s - session.answered_s)
        known_s = session.pause_s
        session.pause_s = pause_s if known_s is None else known_s + _SMOOTHING * (pause_s - known_s)
        session.answered_s = None


def note_answer(session: Session, now_s: float) -> None:
    """Tell a session's record that it has been answered."""
    session.answered_s = now_s


def decide(
    requests: Sequence[Request], sessions: Mapping[Key, Session], rule: BatchRule, now_s: float
) -> Decision:
    """Choose the next batch.

    Args:
        requests: all that wait, oldest first.
        sessions: the record of every session, those that do not wait included.
        rule: how long to wait for how much.
        now_s: the time, on the clock of the requests.

    Returns:
        The first batch that is due; of several layouts, the one whose oldest request is older.
    """
    groups: dict[Key, list[Request]] = {}
    for request in requests:
        if request.alone:
            return Decision((request,), None)
        groups.setdefault(request.layout, []).append(request)
    wake_s: float | None = None
    for layout, group in groups.items():
        due_s = _due_s(group, layout, sessions.values(), rule, now_s)
        if due_s <= now_s:
            return Decision(tuple(group), None)
        wake_s = due_s if wake_s is None else min(wake_s, due_s)
    return Decision((), wake_s)


def _due_s(
    group: list[Request], layout: Key, sessions: Iterable[Session], rule: BatchRule, now_s: float
) -> float:
    """Give when a group goes if nobody joins it; at or before `now_s` means at once."""
    if rule.target_rows is not None and sum(r.rows for r in group) >= rule.target_rows:
        return now_s
    deadline_s = group[0].arrived_s + rule.deadline_s
    latest_s = now_s
    for session in sessions:
        if session.layout != layout or session.answered_s is None or session.pause_s is None:
            continue
        expected_s = session.answered_s + session.pause_s
        given_up_s = session.answered_s + _PATIENCE * session.pause_s
        if expected_s <= deadline_s and given_up_s > now_s:
            latest_s = max(latest_s, given_up_s)
    return min(deadline_s, latest_s)
