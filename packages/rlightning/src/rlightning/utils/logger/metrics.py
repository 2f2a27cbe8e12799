"""`MetricsLogger`: every number of a run, on three axes, to two files and one backend.

The axes are the project's own, never a backend's counter: `env_step` (environment steps so far),
`epoch` and `wall_s` (seconds since the run began, on a monotonic clock, earlier parts of a resumed
run included). Knows nothing about who measures.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, final

from rlightning.errors import ConfigError
from rlightning.utils.logger.backends import open_backend
from rlightning.utils.logger.files import AXES, MetricsFiles
from rlightning.utils.logger.scalars import clean_payload

if TYPE_CHECKING:
    import logging
    from collections.abc import Callable, Mapping

    from rlightning.utils.logger.backends import Backend, BackendOptions

__all__ = ["MetricsLogger"]

DEFAULT_PREFIX = "rlightning"


@final
class MetricsLogger:
    """Records metrics; safe to call from several threads.

    A backend that cannot be opened or that raises is warned about once and dropped; the files and
    the run go on. A metric that is NaN or infinite is not recorded and is warned about once.

    Args:
        logger: where warnings go.
        options: the run the metrics belong to; None records nothing (before `setup_logger`, and
            in processes without a run directory).
        backend: a name in `BACKENDS`; None writes the files only.
        clock: monotonic seconds; tests pass their own.
    """

    def __init__(
        self,
        logger: logging.Logger,
        options: BackendOptions | None = None,
        *,
        backend: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self._files = MetricsFiles(options.run_dir) if options else None
        self._clock = clock
        self._start_s = clock()
        self._env_step = 0
        self._epoch = 0
        self.latest: dict[str, float] = {}
        """The newest value of every metric."""
        self._backend = self._open(backend, options) if backend and options else None

    def _open(self, name: str, options: BackendOptions) -> Backend | None:
        try:
            return open_backend(name, options)
        except ConfigError:
            raise
        except Exception as error:  # noqa: BLE001  # border to other people's code and networks
            self._warn_once(name, "metrics backend %s is off, the run goes on: %s", name, error)
            return None

    def advance(self, *, env_step: int | None = None, epoch: int | None = None) -> None:
        """Move the axes; metrics logged without a step are recorded here."""
        with self._lock:
            self._env_step = self._env_step if env_step is None else env_step
            self._epoch = self._epoch if epoch is None else epoch

    def resume(self, *, env_step: int, epoch: int) -> None:
        """Continue an earlier run of the same directory from a checkpoint at `env_step`.

        Rows after `env_step` are removed from the files: the run will produce them again. Call it
        before anything is logged.
        """
        self.advance(env_step=env_step, epoch=epoch)
        with self._lock:
            if self._files is not None:
                self._start_s = self._clock() - self._files.resume(env_step)

    def log(
        self,
        payload: Mapping[str, Any] | None,
        *,
        step: int | None = None,
        prefix: str | None = None,
    ) -> dict[str, float]:
        """Record numbers.

        Args:
            payload: numbers by name (see `clean_payload`); None records nothing.
            step: environment steps so far; by default what `advance` was told.
            prefix: put before the names, and the stream in which steps increase.

        Returns:
            What was recorded, by full name.

        Raises:
            TypeError: a value is not a number.
        """
        stream = DEFAULT_PREFIX if prefix is None else prefix
        values, not_finite = clean_payload(payload, stream)
        with self._lock:
            env_step = self._env_step if step is None else int(step)
            for key in not_finite:
                self._warn_once(key, "%s is not finite at env step %d; left out", key, env_step)
            if values:
                self._write(stream, env_step, values)
        return values

    def _write(self, stream: str, env_step: int, values: dict[str, float]) -> None:
        self.latest |= values
        if self._files is None:
            return
        wall_s = round(self._clock() - self._start_s, 3)
        point = dict(zip(AXES, (stream, env_step, self._epoch, wall_s), strict=True))
        row = self._files.write({**point, **values})
        if row["env_step"] > env_step:
            self._warn_once(
                stream,
                "%s: env step %d came after %d; recorded there",
                stream,
                env_step,
                row["env_step"],
            )
        if self._backend is not None:
            axes = {"env_step": row["env_step"], "epoch": row["epoch"], "wall_s": row["wall_s"]}
            self._guard(lambda backend: backend.write(values, **axes))

    def _guard(self, action: Callable[[Backend], None]) -> None:
        if self._backend is None:
            return
        try:
            action(self._backend)
        except Exception as error:  # noqa: BLE001  # border to other people's code and networks
            name = type(self._backend).__name__
            self._backend = None
            self._warn_once(name, "%s failed and is off, the run goes on: %s", name, error)

    def _warn_once(self, what: str, message: str, *args: object) -> None:
        if what not in self._warned:
            self._warned.add(what)
            self._logger.warning(message, *args)

    def close(self) -> None:
        """Complete the files and close the backend; nothing is recorded after that."""
        with self._lock:
            if self._files is not None:
                self._files.close()
                self._files = None
            self._guard(lambda backend: backend.close())
            self._backend = None
