"""The stage on which a client is judged: a scripted server, and the client's process.

A scenario reads from top to bottom in one thread: start the client, accept its connection, talk,
close, accept the next. The WebSocket server hands connections over through a queue.
"""

from __future__ import annotations

import contextlib
import queue
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

from websockets.sync.server import Server, ServerConnection, serve

from plugrl_protocol.conformance.clauses import Report, ViolationError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from typing_extensions import Self
    from websockets.http11 import Request, Response

_EXIT_S = 10.0
_QUIET_S = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """The client under test and how to judge it."""

    command: str | None = None
    """With ``{url}`` or ``{host}`` and ``{port}``; None waits for clients started by hand."""
    host: str = "127.0.0.1"
    port: int = 0
    api_key: str | None = None
    features: tuple[str, ...] = ()
    probe: bool = False
    """It runs ``probe-v1``, so that what it did with every action can be read."""
    timeout_s: float = 20.0
    horizon: int = 4
    action_dim: int = 3


class Stage:
    """One scenario's server and client process. A context manager."""

    def __init__(self, options: ClientOptions, report: Report, scenario: str) -> None:
        self.options = options
        self.report = report
        self.scenario = scenario
        self._arrivals: queue.Queue[tuple[ServerConnection, threading.Event]] = queue.Queue()
        self._releases: list[threading.Event] = []
        self._server: Server | None = None
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._output: IO[bytes] | None = None
        self._port = options.port

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for release in self._releases:
            release.set()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
        if self._process is not None:
            self._process.wait()
        if self._output is not None:
            self._output.close()
        self.shut()

    # -------------------------------------------------------------------------------- the server

    def open(self) -> None:
        """Listen, on the same port as before if there was one."""
        self._server = serve(
            self._handle,
            self.options.host,
            self._port,
            compression=None,
            max_size=None,
            process_request=self._look,
            ping_interval=None,
            close_timeout=1.0,
        )
        self._port = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def shut(self) -> None:
        """Stop listening."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._server = None

    def _handle(self, connection: ServerConnection) -> None:
        release = threading.Event()
        self._releases.append(release)
        self._arrivals.put((connection, release))
        release.wait()

    def _look(self, connection: ServerConnection, request: Request) -> Response | None:
        offered = request.headers.get("Sec-WebSocket-Extensions", "")
        self._judge("no-deflate", "deflate" not in offered, f"the client offers {offered!r}")
        if self.options.api_key is None:
            return None
        given = request.headers.get_all("Authorization")
        fits = given == [f"Api-Key {self.options.api_key}"]
        self._judge("api-key", fits, f"the client's Authorization headers are {given}")
        return None if fits else connection.respond(401, "wrong or missing API key\n")

    def _judge(self, clause: str, holds: bool, found: str) -> None:  # noqa: FBT001  # the verdict
        if holds:
            self.report.passed(clause)
        else:
            self.report.failed(clause, found)

    @contextlib.contextmanager
    def accept(self, clause: str) -> Iterator[ServerConnection]:
        """Expect a connection; a client that does not come breaks the clause."""
        deadline = time.monotonic() + self.options.timeout_s
        while True:
            try:
                connection, release = self._arrivals.get(timeout=0.1)
                break
            except queue.Empty:
                code = None if self._process is None else self._process.poll()
                if code is not None:
                    raise ViolationError(
                        clause, f"the client left with {code}{self._said()}"
                    ) from None
                if time.monotonic() > deadline:
                    waited = self.options.timeout_s
                    raise ViolationError(clause, f"no connection within {waited:g} s") from None
        try:
            yield connection
        finally:
            with contextlib.suppress(OSError):
                connection.close()
            release.set()

    def count_attempts(self, seconds: float) -> int:
        """Be absent: hang up on every attempt to connect, and count them."""
        self.shut()
        attempts = 0
        deadline = time.monotonic() + seconds
        with socket.create_server((self.options.host, self._port)) as listener:
            while (left := deadline - time.monotonic()) > 0:
                listener.settimeout(left)
                with contextlib.suppress(TimeoutError, socket.timeout):
                    listener.accept()[0].close()
                    attempts += 1
        return attempts

    # -------------------------------------------------------------------------------- the client

    def start_client(self) -> None:
        """Start the client under test, or ask for it."""
        options = self.options
        url = f"ws://{options.host}:{self._port}"
        if options.command is None:
            sys.stderr.write(f"scenario {self.scenario}: start your client at {url}\n")
            return
        fill = {"{url}": url, "{host}": options.host, "{port}": str(self._port)}
        words = []
        for word in shlex.split(options.command):
            for mark, value in fill.items():
                word = word.replace(mark, value)  # filled mark by mark
            words.append(word)
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  # closed on leaving the stage
        self._process = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=self._output, stderr=subprocess.STDOUT
        )

    def exits(self, clause: str, *, with_success: bool, away: str | None = None) -> None:
        """Expect the client's process to end, with code 0 or with another.

        Args:
            clause: about the exit.
            with_success: whether code 0 is right.
            away: the clause that a new connection would break.
        """
        process = self._process
        deadline = time.monotonic() + (_QUIET_S if process is None else _EXIT_S)
        while process is None or process.poll() is None:
            with contextlib.suppress(queue.Empty):
                self._arrivals.get(timeout=0.05)
                if away is not None:
                    raise ViolationError(away, "the client connected again")
            if time.monotonic() > deadline:
                break
        if away is not None:
            self.report.passed(away)
        if process is None:
            self.report.skipped(clause, "exit codes are judged with --client only")
            return
        code = process.poll()
        if code is None:
            raise ViolationError(clause, f"still running after {_EXIT_S:g} s")
        if (code == 0) is not with_success:
            expected = "0" if with_success else "another than 0"
            raise ViolationError(clause, f"exit code {code}, expected {expected}{self._said()}")
        self.report.passed(clause)

    def _said(self) -> str:
        """Quote the client's last line."""
        if self._output is None:
            return ""
        self._output.seek(0)
        lines = self._output.read().decode("utf-8", "replace").strip().splitlines()
        return f"; it said: {lines[-1][:200]}" if lines else ""
