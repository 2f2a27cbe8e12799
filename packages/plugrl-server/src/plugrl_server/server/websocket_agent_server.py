"""The socket in front of a trainer: listens, closes, and ends with the run or a signal.

Knows nothing about policies, batches or learning.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import signal
import ssl
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from plugrl_protocol.endpoint import Endpoint, EndpointConfig
from plugrl_protocol.errors import (
    CLOSE_INTERNAL_ERROR,
    CLOSE_SHUTDOWN,
    CLOSE_STOP,
    MisuseError,
)
from plugrl_protocol.links import ServerOptions
from plugrl_protocol.server_session import SessionConfig
from plugrl_server.common.metrics import MetricSink, NoOpMetricSink
from plugrl_server.errors import CannotListenError, UsageError
from plugrl_server.server.busy_poll import make_event_loop
from plugrl_server.server.display import Display
from plugrl_server.server.metadata import build_server_metadata
from plugrl_server.server.runtime_metrics import MetricReporter
from plugrl_server.server.trainer import Ending, Trainer, TrainerConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from plugrl_protocol.links.base import Library
    from plugrl_server.algorithm.base_algorithm import BaseAlgorithm
    from plugrl_server.common.checkpoint_manager import CheckpointManager

__all__ = [
    "FEEDBACK_WAIT_TIMEOUT",
    "SHUTDOWN_SAVE_TIMEOUT",
    "SocketConfig",
    "WebSocketAgentServer",
]

_log = logging.getLogger(__name__)

FEEDBACK_WAIT_TIMEOUT: Final = 60.0
SHUTDOWN_SAVE_TIMEOUT: Final = 30.0
_WATCH_S = 0.25
_LONG_LEARN_STEP_S = 0.2
_JOIN_TIMEOUT_S = 5.0
_SWITCH_INTERVAL_S = 0.0005
_CLOSES: Final = {
    Ending.FINISHED: CLOSE_STOP,
    Ending.INTERRUPTED: CLOSE_SHUTDOWN,
    Ending.FAILED: CLOSE_INTERNAL_ERROR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SocketConfig:
    """Who may connect, and how."""

    api_key: str | None = None
    """What clients must show; None lets everybody in."""
    certificate: str | None = None
    """A certificate chain in PEM; with `private_key` the server speaks ``wss``."""
    private_key: str | None = None
    """The certificate's key in PEM; None if it is in the same file."""
    max_message_mb: float = 256.0
    """Largest message taken, in MiB."""
    library: Library = "websockets"
    """What carries the frames; ``picows`` needs ``plugrl-protocol[fast]``."""
    busy_poll_us: float = 200.0
    """How long to look for a quick client's next message before sleeping, in microseconds, at most;
    0 sleeps at once."""

    def ssl_context(self) -> ssl.SSLContext | None:
        """Load the certificate; raises `UsageError` where it cannot be used."""
        if self.certificate is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.private_key)
        except OSError as error:  # that of ssl is one
            files = f"--certificate {self.certificate}"
            if self.private_key is not None:
                files += f" with --private-key {self.private_key}"
            raise UsageError(f"{files} cannot be used: {error}") from error
        return context


@dataclass(slots=True)
class _State:
    """What lives while the server runs."""

    loop: asyncio.AbstractEventLoop
    over: asyncio.Event = field(default_factory=asyncio.Event)
    ending: Ending | None = None


class WebSocketAgentServer:
    """Serves an algorithm until its run is finished or somebody stops it.

    Args:
        algorithm: constructed, with its optimizers.
        checkpoint_manager: where checkpoints go; None saves nothing.
        metric_sink: where metrics go; None drops them.
        mini_infer_batch_size: environments with which a batch goes at once.
        show_metric_table: whether a person sees numbers.
        show_progress_bar: whether a person sees a bar.
        host: address to listen on.
        port: 0 takes any free one; see the attribute.
        metadata: further keys of what clients hear first; they win over what is known.
        feedback_wait_timeout: longest wait for a feedback in seconds, learn steps not counted.
        trainer_config: how acting and learning take turns; `mini_infer_batch_size` wins.
        socket_config: who may connect, and how.
        on_listening: called with the server once it listens.

    Attributes:
        trainer: joins the algorithm with the clients.
        port: where it listens, once it does.
    """

    def __init__(  # noqa: PLR0913  # the documented signature
        self,
        algorithm: BaseAlgorithm,
        checkpoint_manager: CheckpointManager | None = None,
        metric_sink: MetricSink | None = None,
        mini_infer_batch_size: int | None = None,
        show_metric_table: bool = True,  # noqa: FBT001, FBT002
        show_progress_bar: bool = True,  # noqa: FBT001, FBT002
        host: str = "127.0.0.1",
        port: int = 8000,
        metadata: dict[str, Any] | None = None,
        feedback_wait_timeout: float = FEEDBACK_WAIT_TIMEOUT,
        *,
        trainer_config: TrainerConfig | None = None,
        socket_config: SocketConfig | None = None,
        on_listening: Callable[[WebSocketAgentServer], None] = lambda server: None,
    ) -> None:
        total = algorithm.get_total_training_steps()
        self._display = Display(total, table=show_metric_table, progress=show_progress_bar)
        self._sink = metric_sink or NoOpMetricSink()
        config = trainer_config or TrainerConfig()
        if mini_infer_batch_size is not None:
            config = dataclasses.replace(config, mini_infer_batch_size=mini_infer_batch_size)
        reporter = MetricReporter(self._sink, show=self._display.show, clock=time.monotonic)
        self.trainer = Trainer(
            algorithm,
            checkpoints=checkpoint_manager,
            reporter=reporter,
            config=config,
            on_ending=self._on_ending,
        )
        self.host, self.port = host, port
        self._socket = socket_config or SocketConfig()
        self._feedback_timeout_s = feedback_wait_timeout
        self._metadata = build_server_metadata(algorithm, metadata)
        self._on_listening = on_listening
        self._state: _State | None = None
        self._signals = 0

    # ---- life ----------------------------------------------------------------------------------

    def serve_forever(self) -> Ending:
        """Run until the end, in this thread; give how the run ended."""
        with asyncio.Runner(loop_factory=self._make_event_loop) as runner:
            return runner.run(self.run())

    def _make_event_loop(self) -> asyncio.AbstractEventLoop:
        trainer = self.trainer
        return make_event_loop(self._socket.busy_poll_us / 1e6, lambda: trainer.acts_on_loop)

    async def run(self) -> Ending:
        """Run until the end.

        Raises:
            CannotListenError: the port is taken, or the host is none of this machine.
            UsageError: the certificate cannot be used.
            BaseException: what made learning or acting fail.
        """
        state = self._state = _State(asyncio.get_running_loop())
        # Acting must not wait 5 ms for a learner between two instructions.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        # What exists now stays: the collector need not walk it again during a round trip.
        gc.collect()
        gc.freeze()
        try:
            ending = await self._serve(state)
        finally:
            self._display.close()
            self._sink.close()
        _log.info("stopped: %s", ending.value)
        if self.trainer.error is not None:
            raise self.trainer.error
        return ending

    async def _serve(self, state: _State) -> Ending:
        endpoint = self._make_endpoint()
        try:
            await endpoint.start()
        except (OSError, MisuseError) as error:
            raise CannotListenError(self.host, self.port, error) from error
        self.port = endpoint.port
        self.trainer.start(state.loop)
        with self._signal_handlers(state.loop):
            _log.info("Agent Server is listening on %s:%d", self.host, self.port)
            self._on_listening(self)
            watch = state.loop.create_task(self._watch(endpoint))
            await state.over.wait()
            watch.cancel()
        ending = state.ending or Ending.FAILED
        await endpoint.stop(_CLOSES[ending])
        await state.loop.run_in_executor(None, self.trainer.join, _JOIN_TIMEOUT_S)
        return ending

    def request_stop(self) -> None:
        """Ask for the end, from any thread: saved, and clients told to come back."""
        self.trainer.request_stop()
        if self._state is not None:
            loop = self._state.loop
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has ended already
                loop.call_soon_threadsafe(loop.call_later, SHUTDOWN_SAVE_TIMEOUT, self._give_up)

    def _make_endpoint(self) -> Endpoint:
        socket = self._socket
        config = EndpointConfig(
            listen=ServerOptions(
                host=self.host,
                port=self.port,
                api_key=socket.api_key,
                ssl_context=socket.ssl_context(),
                max_message_mb=socket.max_message_mb,
            ),
            session=SessionConfig(feedback_timeout_s=self._feedback_timeout_s),
            library=socket.library,
        )
        return Endpoint(self.trainer, metadata=self._metadata, config=config)

    # ---- while it runs -------------------------------------------------------------------------

    async def _watch(self, endpoint: Endpoint) -> None:
        """Stop the clients' feedback clocks while a learn step makes them wait."""
        suspended = False
        while True:
            await asyncio.sleep(_WATCH_S)
            waits = self.trainer.holds_clients
            waits = waits and self.trainer.learning_for_s() > _LONG_LEARN_STEP_S
            if waits and not suspended:
                endpoint.suspend_feedback_clock()
            elif suspended and not waits:
                endpoint.resume_feedback_clock()
            suspended = waits

    def _on_ending(self, ending: Ending) -> None:
        """Called from any thread."""
        state = self._state
        if state is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the end is known already
                state.loop.call_soon_threadsafe(self._finish, ending)

    def _finish(self, ending: Ending) -> None:
        state = self._state
        if state is not None and state.ending is None:
            state.ending = ending
            state.over.set()

    def _give_up(self) -> None:
        if self._state is not None and self._state.ending is None:
            _log.error("not saved: the learn step did not end in %.0f s", SHUTDOWN_SAVE_TIMEOUT)
            self._finish(Ending.INTERRUPTED)

    @contextlib.contextmanager
    def _signal_handlers(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Listen for SIGINT and SIGTERM where this thread may."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        try:
            for number in numbers:
                loop.add_signal_handler(number, self._on_signal, number)
        except (NotImplementedError, RuntimeError, ValueError):  # not the main thread
            yield
            return
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + number)
        name = signal.Signals(number).name
        _log.warning("%s: saving and stopping; a second one stops at once", name)
        self.request_stop()
