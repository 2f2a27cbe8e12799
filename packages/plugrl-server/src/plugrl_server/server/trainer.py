"""The composer: requests in, actions out, frames to the algorithm, learn steps in between.

Three threads meet here. The *event loop* hands over decoded messages and never waits. The *acting*
side takes them in order of arrival: it stores frames, decides with the batcher what runs next, and
runs it. The *learner* learns and writes checkpoints. Between acting and learning there is one rule:
in ``sync`` mode the acting side rests while the learner learns, in ``overlap`` mode it goes on with
the last version.

Acting has a thread of its own. While a policy's forward pass and the storing of frames stay under
`TrainerConfig.inline_limit_ms`, the event loop does that work itself, because handing it over would
take longer; one call that takes longer sends it back to its thread. Knows nothing about sockets.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from plugrl_protocol.errors import (
    CLOSE_INTERNAL_ERROR,
    MalformedMessageError,
    MisuseError,
    close_refused,
)
from plugrl_protocol.messages import Feedback, Infer, read_episodes
from plugrl_server.errors import ObservationError
from plugrl_server.server.client_envs import ClientEnvs
from plugrl_server.server.frame_store import Client, FrameStore, Report
from plugrl_server.server.inference import (
    Inference,
    describe_observation,
    layout_of_observation,
    same_but_for_dtypes,
)
from plugrl_server.server.inline_guard import InlineGuard
from plugrl_server.server.learner import Learner
from plugrl_server.server.runtime_metrics import ClientCounter, MetricReporter, RuntimeMetrics
from plugrl_server.server.trainer_config import Ending, TrainerConfig
from rlightning.errors import WorkerLostError
from rlightning.runtime.batcher import (
    BatchRule,
    Decision,
    Request,
    Session,
    decide,
    note_answer,
    note_request,
)

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from plugrl_protocol.endpoint import Connection
    from plugrl_protocol.errors import Close
    from plugrl_server.algorithm.base_algorithm import BaseAlgorithm, Checkpoint
    from plugrl_server.common.checkpoint_manager import CheckpointManager
    from plugrl_server.common.metrics import MetricDict

__all__ = ["Ending", "Trainer", "TrainerConfig"]

_log = logging.getLogger(__name__)

_MAX_INBOX = 65_536
_WORTH_WAITING_S = 0.0002
_REPORT_DELAY_S = 0.02
_AT_ONCE = BatchRule(deadline_s=0.0)


class _Left(NamedTuple):
    client: Client


class _Ask(NamedTuple):
    client: Client
    infer: Infer


class Trainer:
    """Joins one algorithm with any number of clients; the `Application` of an endpoint.

    Args:
        algorithm: constructed, with its optimizers.
        checkpoints: where they go; None saves nothing.
        reporter: where metrics go.
        config: how acting and learning take turns.
        on_ending: called once, from any thread, when the run has come to its end and is saved.
        clock: monotonic seconds.

    Attributes:
        metrics: what the server measures of itself.
        version: how often the policy has been learned.
        error: what ended the run, if it failed.
    """

    def __init__(
        self,
        algorithm: BaseAlgorithm,
        *,
        checkpoints: CheckpointManager | None,
        reporter: MetricReporter,
        config: TrainerConfig,
        on_ending: Callable[[Ending], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.algorithm = algorithm
        self.config = config
        self.metrics = RuntimeMetrics()
        self.version = 0
        self.error: BaseException | None = None
        self.checkpoints, self._reporter = checkpoints, reporter
        self._on_ending, self._clock = on_ending, clock
        self._chain_numbers = itertools.count()
        self._inference = Inference(algorithm)
        self._overlaps = config.learn_mode == "overlap"
        self._guard = InlineGuard(config.inline_limit_ms / 1e3)
        self._clients: dict[int, Client] = {}
        self._frames = FrameStore(algorithm, self.metrics, self._clients)
        self._inbox: deque[Request | Report | _Left] = deque()
        self._waiting: list[Request] = []
        self._turn_lock = threading.Lock()
        self._wake = threading.Event()
        self._inline_scheduled = self._store_scheduled = self._timer_runs = False
        self._last_asker: Client | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._learner = Learner(self._fail)
        self._thread = threading.Thread(target=self._act, name="plugrl-acting", daemon=True)
        self._learning_since_s: float | None = None
        self._learned = False
        self._control_due = False
        self._stop_requested = False
        self._ended = False

    # ---- life ----------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin; answers go to connections of `loop`."""
        self._loop = loop
        self._learner.start()
        self._thread.start()

    def request_stop(self) -> None:
        """Ask for the end, from any thread: after the learn step at hand, saved."""
        self._stop_requested = True
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for both threads after the end; False if one still runs after `timeout_s`."""
        self._ended = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return self._learner.stop(timeout_s) and not self._thread.is_alive()

    def learning_for_s(self) -> float:
        """How long the learn step at hand has taken; zero between learn steps."""
        since_s = self._learning_since_s
        return 0.0 if since_s is None else self._clock() - since_s

    @property
    def acts_on_loop(self) -> bool:
        """Whether requests are answered on the event loop and no other thread is at work."""
        return self._guard.allows and self._learning_since_s is None

    @property
    def holds_clients(self) -> bool:
        """Whether requests wait for a learn step."""
        return self._learning_since_s is not None and not self._overlaps

    # ---- the event loop's side -----------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        """See `Application.connected`."""
        taken = {client.counter.slot for client in self._clients.values()}
        slot = next(number for number in itertools.count() if number not in taken)
        counter = ClientCounter(slot, self._clock())
        envs = ClientEnvs(self._chain_numbers)
        self._clients[connection.serial] = Client(connection, envs, counter)
        self.metrics.total_connections += 1
        self.metrics.connections = len(self._clients)

    def infer(self, connection: Connection, request: Infer) -> None:
        """See `Application.infer`."""
        serial = connection.serial
        client = self._clients[serial]
        layout = client.layout = layout_of_observation(request.observation)
        ask, rows = _Ask(client, request), len(request.env_indices)
        asked = Request(serial, rows, layout, self._clock(), payload=ask)
        client.counter.requests += 1
        alone, self._last_asker = self._last_asker is client, client
        self._put(asked, at_once=alone or len(self._clients) == 1)

    def feedback(self, connection: Connection, report: Feedback) -> None:
        """See `Application.feedback`.

        Raises:
            MalformedMessageError: it observes something else than the requests of this client.
        """
        client = self._clients[connection.serial]
        layout = layout_of_observation(report.observation)
        if layout != client.layout and not same_but_for_dtypes(layout, client.layout):
            raise MalformedMessageError(
                f"the feedback observes {describe_observation(layout)}, the infer observed "
                f"{describe_observation(client.layout)}"
            )
        steps = report.steps
        client.counter.steps += len(report.env_indices) if steps is None else sum(steps.tolist())
        episodes = read_episodes(report) if report.info else []
        self._inbox.append(Report(client, report, episodes, layout))
        # Nobody waits for a report, and most are followed by a request at once. They are stored
        # when the timer says so, or when there are many: storing many together is cheap.
        if not self._timer_runs and self._loop is not None:
            self._timer_runs = True
            self._loop.call_later(_REPORT_DELAY_S, self._on_timer)

    def _on_timer(self) -> None:
        self._timer_runs = False
        if self._inbox:
            self._act_inline()
        if len(self._frames):
            self._store_inline()

    def disconnected(self, connection: Connection, close: Close) -> None:
        """See `Application.disconnected`."""
        del close
        client = self._clients.pop(connection.serial, None)
        self.metrics.connections = len(self._clients)
        if client is not None:
            self.metrics.reused_observations += connection.reused_rows
            self._put(_Left(client), at_once=False)

    def _put(self, item: Request | Report | _Left, *, at_once: bool) -> None:
        """Hand an item to the acting side, or act here and now if that is quick.

        Raises:
            RuntimeError: far more items wait than clients that take turns can cause.
        """
        if len(self._inbox) >= _MAX_INBOX:
            raise RuntimeError(f"{_MAX_INBOX} messages wait; the acting thread does not keep up")
        self._inbox.append(item)
        if at_once:
            self._act_inline()
        elif not self._may_inline():
            self._wake.set()
        elif not self._inline_scheduled and self._loop is not None:
            # After this round of the loop: what other clients sent meanwhile joins the batch.
            self._inline_scheduled = True
            self._loop.call_soon(self._act_inline)

    def _may_inline(self) -> bool:
        if self._control_due or not self._guard.allows:
            return False
        return self._learning_since_s is None or self._overlaps

    def _act_inline(self) -> None:
        self._inline_scheduled = False
        if not self._may_inline() or not self._turn_lock.acquire(blocking=False):
            self._wake.set()
            return
        try:
            self._turn(inline=True)
        except Exception as error:  # noqa: BLE001  # the border of acting: ends the run
            self._fail(error)
        finally:
            self._turn_lock.release()
        if self._control_due:
            self._wake.set()
        elif self._frames.is_due and not self._store_scheduled and self._loop is not None:
            self._store_scheduled = True
            self._loop.call_soon(self._store_inline)

    def _store_inline(self) -> None:
        """Store frames after the answers have left, on the event loop."""
        self._store_scheduled = False
        if not self._may_inline() or not self._turn_lock.acquire(blocking=False):
            self._wake.set()
            return
        try:
            self._store()
        except Exception as error:  # noqa: BLE001  # the border of acting: ends the run
            self._fail(error)
        finally:
            self._turn_lock.release()
        if self._control_due:
            self._wake.set()

    # ---- acting --------------------------------------------------------------------------------

    def _act(self) -> None:
        """Be the acting thread."""
        wake_s: float | None = None
        while not self._ended:
            timeout_s = None if wake_s is None else max(0.0, wake_s - self._clock())
            self._wake.wait(timeout_s)
            self._wake.clear()
            try:
                with self._turn_lock:
                    self._control()
                    wake_s = self._turn(inline=False)
            except Exception as error:  # noqa: BLE001  # the thread's border: ends the run
                self._fail(error)

    def _turn(self, *, inline: bool) -> float | None:
        """Take what has arrived, then run every batch that is due; give when to look again."""
        while not self._ended:
            while self._inbox and not (self.holds_clients or self._stop_requested):
                self._take(self._inbox.popleft())
                if self._control_due:
                    if inline:
                        return None
                    self._control()
            if self.holds_clients or self._ended or not self._waiting:
                break
            decision = self._decide(inline)
            if not decision.batch:
                self._store_unless(inline)
                return decision.wake_s
            if len(decision.batch) == len(self._waiting):
                self._waiting = []
            else:
                chosen = set(map(id, decision.batch))
                self._waiting = [r for r in self._waiting if id(r) not in chosen]
            self._run(decision.batch, inline=inline)
        self._store_unless(inline)
        return None

    def _store_unless(self, inline: bool) -> None:  # noqa: FBT001  # private
        """On the event loop, answers leave before frames are stored."""
        if not inline and not self.holds_clients:
            self._store()
            if self._control_due:
                self._control()

    def _decide(self, inline: bool) -> Decision:  # noqa: FBT001  # private
        waiting, target = self._waiting, self.config.mini_infer_batch_size
        if len(waiting) == 1 and inline and target is None:
            return Decision((waiting[0],), None)
        # Waiting longer for others than a forward pass takes does not pay.
        longest_s = min(self.config.batch_deadline_ms / 1e3, self._guard.infer_s)
        if target is not None:
            longest_s = self.config.batch_deadline_ms / 1e3
        elif inline or longest_s < _WORTH_WAITING_S or len(self._clients) == 1:
            longest_s = 0.0
        if longest_s > 0.0:
            rule = BatchRule(deadline_s=longest_s, target_rows=target)
            return decide(waiting, self._sessions(), rule, self._clock())
        return decide(waiting, {}, _AT_ONCE, self._clock())

    def _sessions(self) -> dict[Any, Session]:
        return {serial: client.session for serial, client in list(self._clients.items())}

    def _take(self, item: Request | Report | _Left) -> None:
        if isinstance(item, Request):
            note_request(item.payload.client.session, item, item.arrived_s)
            self._waiting.append(item)
        elif isinstance(item, Report):
            if self._frames.take(item):
                self._store()
        else:
            self._store()
            client = item.client
            self._waiting = [r for r in self._waiting if r.payload.client is not client]
            for chain in client.envs.chains:
                self.algorithm.forget_chain(chain)

    def _run(self, batch: tuple[Request, ...], *, inline: bool) -> None:
        """Infer once, and answer; whoever makes it fail is found by asking one by one."""
        started_s = self._clock()
        asks: list[_Ask] = [request.payload for request in batch]
        layout: Any = batch[0].layout
        if self.algorithm.follows_chains:
            chains = [ask.client.envs.chains_of(ask.infer.env_indices) for ask in asks]
            self.algorithm.expect_chains(list(itertools.chain.from_iterable(chains)))
        try:
            inferred = self._inference.run([ask.infer for ask in asks], layout)
        except WorkerLostError:  # nobody's request is to blame
            raise
        except Exception as error:  # noqa: BLE001  # the border to users' policies
            self._guard.note_infer(self._clock() - started_s)
            self._blame(batch, error)
            return
        now_s, metrics = self._clock(), self.metrics
        answers = [
            (ask.client.connection, action)
            for ask, action in zip(asks, inferred.actions, strict=True)
        ]
        # Clients need not wait for what follows; it is done before their feedback is looked at.
        if inline:
            self._send(answers)
        elif self._loop is not None:
            self._loop.call_soon_threadsafe(self._send, answers)
        self._guard.note_infer(now_s - started_s)
        metrics.infer_s.add(now_s - started_s)
        metrics.batch_rows.add(sum([request.rows for request in batch]))
        for request, (client, infer), step in zip(batch, asks, inferred.steps(), strict=True):
            metrics.queue_s.add(started_s - request.arrived_s)
            client.envs.acted(infer.env_indices, step)
            note_answer(client.session, now_s)

    @staticmethod
    def _send(answers: list[tuple[Connection, Any]]) -> None:
        """Answer, on the event loop."""
        for connection, action in answers:
            try:
                connection.answer(action)
            except MisuseError:
                _log.exception("%r: an action that cannot be sent", connection)
                connection.close(CLOSE_INTERNAL_ERROR)

    def _blame(self, batch: tuple[Request, ...], error: Exception) -> None:
        if len(batch) > 1:
            for request in reversed(batch):
                request.alone = True
                self._waiting.insert(0, request)
            return
        self.metrics.refused_requests += 1
        reason = self._inference.blame(error, batch[0].layout)  # type: ignore[arg-type]  # ours
        connection = batch[0].payload.client.connection
        if isinstance(error, ObservationError):  # says it all
            _log.error("%r: refused, %s", connection, error)
        else:
            _log.error("%r: refused, %s", connection, reason, exc_info=error)
        connection.close_soon(close_refused(reason))

    # ---- storing -------------------------------------------------------------------------------

    def _store(self) -> None:
        """Give the algorithm what it may learn from."""
        if len(self._frames) == 0:
            return
        started_s = self._clock()
        is_busy = self._learning_since_s is not None
        logged = self._frames.store(self.version, learner_is_busy=is_busy)
        self._control_due = self._is_control_due()
        elapsed_s = self._clock() - started_s
        self.metrics.feedback_s.add(elapsed_s)
        self._guard.note_feedback(elapsed_s)
        if logged:
            self._log_metrics(logged, now=False)

    # ---- learning, saving, ending --------------------------------------------------------------

    def _is_control_due(self) -> bool:
        algorithm = self.algorithm
        idle = self._learning_since_s is None
        if idle and algorithm.should_learn():
            return True
        return algorithm.should_stop() or (idle and algorithm.should_save())

    def _control(self) -> None:
        """Finish a learn step, begin one, save, or end; in the acting thread only."""
        self._store()
        if self._learned:
            self._finish_learning()
        self._control_due = False
        if self._ended or self._learning_since_s is not None:
            return
        algorithm = self.algorithm
        if self._stop_requested:
            self._end(Ending.INTERRUPTED)
        elif algorithm.should_stop():
            self._end(Ending.FINISHED)
        elif algorithm.should_learn():
            self._begin_learning()
        elif algorithm.should_save():
            self._save()

    def _begin_learning(self) -> None:
        self.algorithm.pre_learn()
        self._learning_since_s = self._clock()
        self._learner.submit(self._learn)

    def _learn(self) -> None:
        """In the learner's thread."""
        started_s = self._clock()
        step, metrics = self.algorithm.learn()
        metrics = {**metrics, "learn": {"duration_s": self._clock() - started_s}}
        self._log_metrics(metrics, now=self.algorithm.on_policy, step=step)
        self._learned = True
        self._wake.set()

    def _finish_learning(self) -> None:
        self._learned = False
        self.algorithm.post_learn()
        self.version += 1
        self.algorithm.current_version = self.version
        self._learning_since_s = None
        if self.algorithm.should_save():
            self._save()

    def _log_metrics(self, metrics: MetricDict, *, now: bool, step: int | None = None) -> None:
        self._reporter.add(
            self.algorithm.global_step if step is None else step,
            metrics,
            runtime=self.metrics,
            clients=[client.counter for client in list(self._clients.values())],
            now=now,
        )

    def checkpoint(self) -> Checkpoint:
        """Give all that a resumed run needs; between learn steps only."""
        from rlightning.utils.seeding import get_rng_state

        checkpoint = self.algorithm.create_checkpoint()
        chain = next(self._chain_numbers)
        own = {"version": self.version, "chain": chain}
        checkpoint.meta = {**checkpoint.meta, "trainer": own, "rng": get_rng_state()}
        return checkpoint

    def restore(self, checkpoint: Checkpoint) -> None:
        """Continue from what `checkpoint` gave; before `start`."""
        from rlightning.utils.seeding import set_rng_state

        self.algorithm.load_checkpoint(checkpoint)
        own = checkpoint.meta.get("trainer", {"version": 0, "chain": 0})
        self.version = self.algorithm.current_version = int(own["version"])
        self._chain_numbers = itertools.count(int(own["chain"]) + 1)
        if "rng" in checkpoint.meta:
            set_rng_state(checkpoint.meta["rng"])

    def _save(self, *, is_last: bool = False) -> threading.Event:
        """Take the state now and let the learner's thread write it; the event says it is done.

        A full disk ends the run with the last save only: for an earlier one there is a next.
        """
        done = threading.Event()
        if self.checkpoints is None:
            # `should_save` turns false when a checkpoint is created.
            self.algorithm.create_checkpoint()
            done.set()
            return done
        checkpoint, manager = self.checkpoint(), self.checkpoints

        def write() -> None:
            try:
                _log.info("saved %s", manager.save_checkpoint(checkpoint))
            except OSError as error:
                if is_last:
                    raise
                _log.error("step %d is not saved: %s; the run goes on", checkpoint.step, error)
            done.set()

        self._learner.submit(write)
        return done

    def _settle(self, ending: Ending) -> None:
        """Account for reports that have arrived: stored, unless the run needs no more."""
        while self._inbox:
            item = self._inbox.popleft()
            if not isinstance(item, Report):
                continue
            if ending is Ending.FINISHED:
                self.metrics.discarded_frames += len(item.feedback.env_indices)
            elif self._frames.take(item):
                self._store()
        self._store()

    def _end(self, ending: Ending) -> None:
        self._settle(ending)
        self._log_metrics({"train": {"global_step": self.algorithm.global_step}}, now=True)
        saved = self._save(is_last=True)
        while not saved.wait(0.1) and self.error is None:
            pass
        self._ended = True
        self._on_ending(ending if self.error is None else Ending.FAILED)

    def _fail(self, error: BaseException) -> None:
        """End the run, from any thread; what there is is saved once the learner is at rest."""
        if self.error is not None:
            return
        _log.critical("the run failed", exc_info=error)
        self.error = error
        self._ended = True
        self._wake.set()
        self._learner.submit(self._end_failed)

    def _end_failed(self) -> None:
        """Save next to the earlier checkpoints, none of which goes; in the learner's thread."""
        try:
            with self._turn_lock:
                step, manager = self.algorithm.global_step, self.checkpoints
                if manager is not None and not manager.has_step(step):
                    where = manager.save_checkpoint(self.checkpoint(), prune=False)
                    _log.warning("saved %s as the failure left it", where)
        except Exception:  # noqa: BLE001  # the run has failed already
            _log.exception("the run's last state cannot be saved; earlier checkpoints remain")
        finally:
            self._on_ending(Ending.FAILED)
