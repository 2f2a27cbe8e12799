"""`RemoteHub`: the clients that dial in at one address, and the tables that their rows sit in.

The hub's own thread moves messages, so that pings are answered while a policy acts or learns. The
environments of this process that listen at one address share its hub: training and evaluation take
turns with the same clients. Knows nothing about the bytes of a message.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from plugrl_envs.errors import InvalidActionError
from rlightning.env.remote_rows import Ask, Outcome, RowTable, Seat
from rlightning.errors import ConfigError, EnvWorkerError, NoClientError, StopRequested
from rlightning.runtime.batcher import (
    BatchRule,
    Request,
    Session,
    decide,
    note_answer,
    note_request,
)
from rlightning.runtime.stop_signal import stop_is_requested
from rlightning.utils.bounds import LARGEST, are_usable
from rlightning.utils.logger import get_logger
from rlightning.utils.observation_form import ObservationForm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from plugrl_protocol import Close, Connection, Endpoint, Feedback, Infer

__all__ = ["Patience", "RemoteHub"]

_log = get_logger("env.remote")
_START_DEADLINE_S = 30.0
_POLL_S = 0.5
_SWITCH_INTERVAL_S = 0.0005
_GRACE_S = 1.0
_FIRST_WORD_S, _WORD_S = 10.0, 60.0

Array: TypeAlias = "np.ndarray[Any, Any]"


class Patience(Protocol):
    """How long to wait for what, in seconds; the keys of the environment's section."""

    start_timeout_s: float
    row_timeout_s: float | None
    feedback_timeout_s: float
    batch_deadline_s: float | None


class _Client:
    """One connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.ask: Ask | None = None
        self.seat: Seat | None = None
        self.session = Session()
        self.heard_s = time.monotonic()
        self.is_refused = False


class RemoteHub:
    """Clients at one address; the `Application` of an endpoint.

    Args:
        make_endpoint: makes the endpoint of this application; called in the hub's thread.
        closes: close frames by name: ``stop``, ``interrupted``, ``failed``, ``overdue``.
        address: for messages.

    Attributes:
        command: how a client is started, for messages.
        form: what every client must show; that of the first one where nothing is configured.
        port: where it listens.
    """

    def __init__(
        self,
        make_endpoint: Callable[[RemoteHub], Endpoint],
        *,
        closes: Mapping[str, Close],
        form: ObservationForm | None,
        address: str,
    ) -> None:
        self.form, self.port, self.address = form, 0, address
        self.command = ""
        self.users = 0
        self._closes = closes
        self._make_endpoint = make_endpoint
        self._changed = threading.Condition()
        self._clients: dict[int, _Client] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._close = closes["stop"]
        self._started = threading.Event()
        self._next_word_s = 0.0
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="remote-envs", daemon=True)

    # ---- life ----------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to listen.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        # Two threads take turns within every step: neither must wait 5 ms for the other.
        sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_INTERVAL_S))
        self._thread.start()
        if not self._started.wait(_START_DEADLINE_S):
            raise EnvWorkerError(f"nothing listens at {self.address} after {_START_DEADLINE_S} s")
        if self._error is not None:
            self._thread.join()
            raise ConfigError(
                f"cannot listen at {self.address}: {self._error}. Choose another env port; 0 takes "
                "a free one"
            ) from self._error

    def stop(self, *, failed: bool) -> None:
        """Tell every client how the run ended, and stop listening.

        One that was asked to stop may go on later: its clients wait for it.
        """
        why = "failed" if failed else "interrupted" if stop_is_requested() else "stop"
        self._close = self._closes[why]
        if self._loop is not None and self._over is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has ended by itself
                self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_START_DEADLINE_S)

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except OSError as error:
            self._error = error
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        endpoint = self._make_endpoint(self)
        await endpoint.start()
        self.port = endpoint.port
        self._started.set()
        await self._over.wait()
        await endpoint.stop(self._close)

    # ---- the endpoint's side, in the hub's thread ------------------------------------------------

    def connected(self, connection: Connection) -> None:
        """See `Application.connected`."""
        with self._changed:
            self._clients[connection.serial] = _Client(connection)

    def infer(self, connection: Connection, request: Infer) -> None:
        """See `Application.infer`."""
        maps = request.observation.to_wire()
        with self._changed:
            client = self._clients[connection.serial]
            if not self._accept(client, maps):
                return
            assert self.form is not None  # `_accept` has seen to it
            client.ask = Ask(
                indices=request.env_indices.tolist(),
                step_ids=request.step_ids.tolist(),
                observation=self.form.read(maps),
                text=request.observation.text,
            )
            client.heard_s = time.monotonic()
            note_request(client.session, _as_request(connection.serial, client), client.heard_s)
            self._settle(client)
            self._changed.notify_all()

    def feedback(self, connection: Connection, report: Feedback) -> None:
        """See `Application.feedback`."""
        maps = report.observation.to_wire()
        with self._changed:
            client = self._clients[connection.serial]
            if not self._accept(client, maps) or client.seat is None or self.form is None:
                return
            if not are_usable(report.rewards).all():
                self._refuse(client, f"a reward beyond {LARGEST:g}, nothing learns from that")
                return
            client.heard_s = time.monotonic()
            count = len(report.env_indices)
            executed = report.info.get("executed_action")
            if executed is not None:
                try:
                    executed = client.seat.table.read_executed(executed, count)
                except InvalidActionError as error:
                    self._refuse(client, f"executed_action: {error}")
                    return
            told: Any = report.info.get("episode") or {}
            client.seat.table.reported(
                client.seat,
                Outcome(
                    indices=report.env_indices.tolist(),
                    rewards=np.asarray(report.rewards),
                    terminated=report.terminated,
                    truncated=report.truncated,
                    steps=np.ones(count, np.int64) if report.steps is None else report.steps,
                    observation=self.form.read(maps),
                    episode={
                        key: np.broadcast_to(told[key], (count,))
                        for key in ("r", "l", "s", "mask")
                        if key in told
                    },
                    executed=executed,
                ),
            )

    def disconnected(self, connection: Connection, close: Close) -> None:
        """See `Application.disconnected`."""
        with self._changed:
            client = self._clients.pop(connection.serial, None)
            if client is not None and client.seat is not None:
                _log.warning("%r left its rows: %s", connection, close)
                client.seat.table.leave(client.seat)
            self._changed.notify_all()

    def _accept(self, client: _Client, maps: Mapping[str, Any]) -> bool:
        """Whether an observation is what the policy was built for; refuse the client if not."""
        if client.is_refused:
            return False
        if self.form is None:
            self.form = ObservationForm.of(maps)
        reason = None
        if not self.form.fits(maps):
            reason = f"observation {ObservationForm.of(maps)}, policy has {self.form}"
        elif not all(are_usable(value).all() for value in maps["states"].values()):
            reason = f"a state that is NaN or beyond {LARGEST:g}, policy needs numbers"
        if reason is not None:
            self._refuse(client, reason)
        return reason is None

    def _refuse(self, client: _Client, reason: str) -> None:
        client.is_refused = True
        _log.error("%r: refused, %s", client.connection, reason)
        client.connection.refuse(reason)

    def _settle(self, client: _Client) -> None:
        """Show an ask in the rows where its client sits, if all of its environments have one."""
        seat, ask = client.seat, client.ask
        if seat is None or ask is None:
            return
        if not seat.table.sit(client, seat, ask):
            total = seat.table.rows
            self._refuse(client, f"{len(ask.indices)} more environments, trainer has {total} rows")
            return
        seat.table.asked(seat, ask)

    # ---- the environments' side ------------------------------------------------------------------

    def await_form(self, patience: Patience) -> ObservationForm:
        """Return what clients show, waiting for the first one.

        Raises:
            NoClientError: none comes in time.
        """
        started_s = time.monotonic()
        with self._changed:
            while self.form is None:
                if stop_is_requested():
                    raise StopRequested("the run was asked to stop while it waited for clients")
                now_s = time.monotonic()
                if now_s - started_s > patience.start_timeout_s:
                    raise NoClientError(
                        f"no client has come to {self.address} in {patience.start_timeout_s:g} s; "
                        f"start one ({self.command}), or raise start_timeout_s"
                    )
                self._say_who_is_missing("the first client", started_s, now_s)
                self._changed.wait(_POLL_S)
            return self.form

    def exchange(self, table: RowTable, action: Array | None, patience: Patience) -> Any:
        """Send actions to the rows that were taken, wait for what follows, and take it.

        Args:
            table: of the environment that steps.
            action: ``[H, N, *A]``; None for a reset, which sends nothing.
            patience: how long to wait.

        Raises:
            NoClientError: a row has no client for too long.
        """
        with self._changed:
            if action is not None:
                self._answer(table, action)
            elif table.purpose == "eval":
                table.restart()
            self._wait(table, patience)
            for client in self._seated(table):
                if client.ask is not None:
                    client.ask.was_taken = True
            return table.take(is_reset=action is None)

    def _seated(self, table: RowTable) -> list[_Client]:
        clients = self._clients.values()
        return [c for c in clients if c.seat is not None and c.seat.table is table]

    def _answer(self, table: RowTable, action: Array) -> None:
        now_s = time.monotonic()
        for client in self._seated(table):
            seat, ask = client.seat, client.ask
            if seat is None or ask is None or not ask.was_taken:
                continue
            rows = table.acted(seat, ask)
            client.ask = None
            client.heard_s = now_s
            note_answer(client.session, now_s)
            client.connection.answer_soon(np.ascontiguousarray(action[:, rows]))

    def _claim(self, table: RowTable) -> None:
        """Seat clients that sit nowhere, or that another purpose has finished with for now."""
        for client in self._clients.values():
            ask, seat = client.ask, client.seat
            if ask is None or client.is_refused or (seat is not None and seat.table is table):
                continue
            if seat is not None and seat.table.purpose == table.purpose:
                continue
            wanted = Seat(table)
            if not table.sit(client, wanted, ask, () if seat is None else list(seat.rows)):
                continue  # it waits until rows are free
            if seat is not None:
                seat.table.leave(seat)
            client.seat, ask.was_taken = wanted, False
            table.asked(wanted, ask)

    def _wait(self, table: RowTable, patience: Patience) -> None:
        """Return when the rows that can be expected are ready.

        Raises:
            StopRequested: somebody asked the run to stop, and the rows are not ready soon after.
        """
        started_s = time.monotonic()
        while True:
            self._claim(table)
            now_s = time.monotonic()
            if now_s - started_s > _GRACE_S and stop_is_requested():
                raise StopRequested("the run was asked to stop while it waited for clients")
            self._check_patience(table, patience, now_s)
            if self._is_due(table, patience, now_s):
                table.has_started = True
                return
            if self._error is not None or not self._thread.is_alive():
                raise EnvWorkerError(f"nothing listens at {self.address} any more: {self._error}")
            self._changed.wait(self._sleep_s(table, patience, now_s))

    def _is_due(self, table: RowTable, patience: Patience, now_s: float) -> bool:
        if not table.has_started and table.free:
            return False
        clients = self._seated(table)
        asking = [client for client in clients if client.ask is not None]
        if len(asking) == len(clients):
            return bool(asking)
        if patience.batch_deadline_s is None or not asking or not table.has_started:
            return False
        return bool(self._decide(table, patience.batch_deadline_s, now_s).batch)

    def _decide(self, table: RowTable, deadline_s: float, now_s: float) -> Any:
        mine = {client.connection.serial: client for client in self._seated(table)}
        requests = [_as_request(n, client) for n, client in mine.items() if client.ask is not None]
        requests.sort(key=lambda request: request.arrived_s)
        sessions: dict[Any, Session] = {serial: client.session for serial, client in mine.items()}
        return decide(requests, sessions, BatchRule(deadline_s=deadline_s), now_s)

    def _sleep_s(self, table: RowTable, patience: Patience, now_s: float) -> float:
        if patience.batch_deadline_s is None:
            return _POLL_S
        wake_s = self._decide(table, patience.batch_deadline_s, now_s).wake_s
        return _POLL_S if wake_s is None else min(_POLL_S, max(0.0, wake_s - now_s))

    def _check_patience(self, table: RowTable, patience: Patience, now_s: float) -> None:
        """Give up on clients that say nothing, and on rows that nobody takes."""
        for client in self._seated(table):
            if client.ask is None and now_s - client.heard_s > patience.feedback_timeout_s:
                client.heard_s = now_s
                client.connection.close_soon(self._closes["overdue"])
        free = table.free
        if not free:
            table.vacant_since_s = None
            return
        if table.vacant_since_s is None:
            table.vacant_since_s = now_s
        missing = f"clients in {len(free)} of {table.rows} rows"
        self._say_who_is_missing(missing, table.vacant_since_s, now_s)
        key = "row_timeout_s" if table.has_started else "start_timeout_s"
        limit_s: float | None = getattr(patience, key)
        if limit_s is not None and now_s - table.vacant_since_s > limit_s:
            raise NoClientError(
                f"{len(free)} of {table.rows} rows at {self.address} have had no client for "
                f"{limit_s:g} s (rows {', '.join(map(str, free[:8]))}); start more clients "
                f"({self.command}), lower num_envs, or raise {key}"
                + (". --resume goes on where the run stopped" if table.has_started else "")
            )

    def _say_who_is_missing(self, who: str, since_s: float, now_s: float) -> None:
        """Tell a person that waits: once it has lasted, then now and then."""
        waited_s = now_s - since_s
        if waited_s >= _FIRST_WORD_S and now_s >= self._next_word_s:
            self._next_word_s = now_s + _WORD_S
            text = "waiting at %s for %s, %.0f s so far; one is started with: %s"
            _log.info(text, self.address, who, waited_s, self.command)

    def release(self, table: RowTable) -> None:
        """Let the clients of a table go to others."""
        with self._changed:
            for client in self._seated(table):
                if client.seat is not None:
                    table.leave(client.seat)
                client.seat = None


def _as_request(serial: int, client: _Client) -> Request:
    rows = 0 if client.ask is None else len(client.ask.indices)
    return Request(session=serial, rows=rows, layout=None, arrived_s=client.heard_s)
