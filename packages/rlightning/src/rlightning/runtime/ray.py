"""`RayRuntime`: workers that are Ray actors. The only module that imports Ray.

An actor is where a worker lives and how it starts and ends; its calls go through Ray too, except
where caller and worker share a machine and a call consists of numbers, strings and arrays: then
they are frames over a socket, which take a tenth of the time.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import os
import pathlib
import re
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, final

import ray
from ray import cloudpickle
from ray.exceptions import (
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    WorkerCrashedError,
)
from ray.util import get_node_ip_address
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from rlightning.errors import ConfigError, WorkerLostError
from rlightning.runtime.base import Failed, Future, Handle, Runtime, WorkerSpec
from rlightning.runtime.channel import Channel, ChannelClosedError, connect, packed
from rlightning.runtime.channel_future import ChannelFuture
from rlightning.runtime.frames import UnframeableError
from rlightning.runtime.host import Failure, Host, WorkerSetup
from rlightning.runtime.placement_plan import Bundle, Node
from rlightning.utils.logger import get_logger, get_metrics_logger
from rlightning.utils.seeding import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["RayRuntime"]

_log = get_logger("runtime.ray")
_DEATHS = (
    RayActorError,
    OutOfMemoryError,
    NodeDiedError,
    WorkerCrashedError,
    LocalRayletDiedError,
    ObjectLostError,
)
"""What Ray raises where a worker is gone, or its answer with its node."""
_CONNECT_S = 30.0
_REASON_S = 10.0
"""Longest wait for Ray to notice and explain a death that we have seen."""


@final
class RayRuntime(Runtime):
    """Workers on a Ray cluster.

    Args:
        address: ``auto`` joins the cluster that this machine was made part of and otherwise starts
            one here, ``local`` always starts one; anything else is the address of one. A process
            that has joined one already stays there.
        setup: what every worker's process takes over.
        num_cpus: how many CPUs a cluster that is started here offers; by default what there are.
        start_timeout_s: longest wait for one worker to start.

    Raises:
        ConfigError: there is no cluster at the address.
    """

    def __init__(
        self,
        address: str = "auto",
        *,
        setup: WorkerSetup,
        num_cpus: int | None = None,
        start_timeout_s: float = 300.0,
    ) -> None:
        self._setup = setup
        self._start_timeout_s = start_timeout_s
        self._handles: list[_RayHandle] = []
        self._bundles: list[PlacementGroup] = []
        self._spawned = 0
        self._owns_cluster = _join(address, num_cpus)
        self.node_id: str = ray.get_runtime_context().get_node_id()

    @property
    def nodes(self) -> list[Node]:
        """The nodes of the cluster, by their addresses; by their ids where several share one."""
        return [
            Node(
                name=name,
                cpus=float(node["Resources"].get("CPU", 0)),
                gpus=int(node["Resources"].get("GPU", 0)),
                memory_bytes=int(node["Resources"].get("memory", 0)),
            )
            for name, node in _nodes_by_name().items()
        ]

    def reserve(self, bundles: Sequence[Bundle]) -> None:
        """Reserve the GPUs that workers of a plan share, see `spawn`.

        Raises:
            ConfigError: the cluster does not have them free.
        """
        ids = {name: node["NodeID"] for name, node in _nodes_by_name().items()}
        for bundle in bundles:
            wanted = {"GPU": float(bundle.gpus), "CPU": bundle.cpus, "memory": bundle.memory_bytes}
            group = placement_group(
                [{name: amount for name, amount in wanted.items() if amount}],
                strategy="STRICT_PACK",
                _soft_target_node_id=ids[bundle.node],
            )
            self._bundles.append(group)
        for bundle, group in zip(bundles, self._bundles, strict=True):
            if not group.wait(timeout_seconds=self._start_timeout_s):
                raise ConfigError(
                    f"{bundle.gpus} GPUs and {bundle.cpus:g} CPUs on {bundle.node} did not become "
                    f"free within {self._start_timeout_s:g} s (cluster.start_timeout_s); does "
                    "another run use them?"
                )

    def spawn(self, spec: WorkerSpec) -> Handle:
        """Start a worker.

        `WorkerSpec.options` may hold ``num_cpus`` (default 1), ``num_gpus`` (0), ``memory``
        (bytes), ``node`` (its name) and ``bundle`` (an index into what was reserved).
        """
        bundle = spec.options.get("bundle")
        actor = _start_actor(spec, None if bundle is None else self._bundles[bundle])
        content: bytes = cloudpickle.dumps((spec.make, spec.args))  # type: ignore[no-untyped-call]  # Ray's
        self._spawned += 1
        setup = self._setup
        if setup.seed is not None:
            own = derive_seed(setup.seed, "worker", spec.name, self._spawned)
            setup = dataclasses.replace(setup, seed=own)
        started = actor.start.remote(setup, _environment(), content)
        handle = _RayHandle(
            spec, actor, started, here=self.node_id, start_timeout_s=self._start_timeout_s
        )
        self._handles = [known for known in self._handles if not known.stopped]
        self._handles.append(handle)
        return handle

    def close(self) -> None:
        """End all workers, and the cluster where it was started here."""
        for handle in self._handles:
            handle.stop()
        self._handles.clear()
        if ray.is_initialized():
            for group in self._bundles:
                remove_placement_group(group)
        self._bundles.clear()
        if self._owns_cluster:
            ray.shutdown()
            self._owns_cluster = False


def _join(address: str, num_cpus: int | None) -> bool:
    """Join or start a cluster; return whether it was started here."""
    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"logging_level": logging.WARNING}
    wanted = known_cluster() if address == "auto" else address
    if wanted is not None and wanted != "local":
        try:
            ray.init(address=wanted, **quiet)
        except (ConnectionError, ValueError, RuntimeError) as error:
            if address != "auto":
                raise ConfigError(f"cluster.ray_address: {address!r}: {error}") from error
            _log.warning("there was a Ray cluster at %s, which does not answer", wanted)
        else:
            _log.info("joined the Ray cluster at %s", ray.get_runtime_context().gcs_address)
            return False
    ray.init(address="local", num_cpus=num_cpus, include_dashboard=False, **quiet)
    _log.info("started a local Ray cluster")
    return True


def known_cluster() -> str | None:
    """Return the address of the cluster that this machine was made part of; None where of none.

    ``RAY_ADDRESS``, or what the last ``ray start`` on this machine noted. Not Ray's own ``auto``,
    which also joins clusters that another run has started for itself and will end.
    """
    root = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    note = pathlib.Path(root, "ray", "ray_current_cluster")
    noted = note.read_text(encoding="utf-8").strip() if note.is_file() else ""
    return os.environ.get("RAY_ADDRESS") or noted or None


def _nodes_by_name() -> dict[str, dict[str, Any]]:
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]  # Ray's
    names = [str(node["NodeManagerAddress"]) for node in nodes]
    if len(set(names)) != len(names):
        names = [str(node["NodeID"]) for node in nodes]
    return dict(zip(names, nodes, strict=True))


def _start_actor(spec: WorkerSpec, bundle: PlacementGroup | None) -> Any:
    options = spec.options
    wanted: dict[str, Any] = {
        "num_cpus": options.get("num_cpus", 1),
        "num_gpus": options.get("num_gpus", 0),
        "max_restarts": 0,  # who asked for the worker starts it again: its state must be restored
        "max_concurrency": 1,  # in order, in one thread
    }
    if options.get("memory"):
        wanted["memory"] = options["memory"]
    if bundle is not None:
        wanted["scheduling_strategy"] = PlacementGroupSchedulingStrategy(bundle)
    elif options.get("node") is not None:
        node = _nodes_by_name().get(options["node"])
        if node is None:
            _log.warning("%s has left the cluster; %s goes elsewhere", options["node"], spec.name)
        else:
            wanted["scheduling_strategy"] = NodeAffinitySchedulingStrategy(
                node["NodeID"], soft=False
            )
    return ray.remote(_Actor).options(**wanted).remote(spec.name)


def _environment() -> dict[str, str]:
    names = ("OMP_NUM_THREADS", "MUJOCO_GL", "PYOPENGL_PLATFORM", "SDL_VIDEODRIVER")
    return {name: os.environ[name] for name in names if name in os.environ}


class _Actor:
    """The Ray actor: `Host` does the work."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._host: Host | None = None

    def __repr__(self) -> str:
        return self._name  # what Ray puts before each line that the worker prints

    def start(
        self, setup: WorkerSetup, environment: dict[str, str], content: bytes
    ) -> tuple[Any, Any]:
        os.environ.update(environment)
        self._host = Host(setup, _is_portable)
        try:
            make, args = cloudpickle.loads(content)
            self._host.adopt(make(*args))
        except Exception as error:  # noqa: BLE001  # a process's border: raised again by the caller
            return self._host.failure(error), None
        where = ray.get_runtime_context().get_node_id()
        address: str = get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray's
        return (where, address, self._host.listen(), os.getpid()), None

    def call(self, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return self._running.call(method, args, kwargs)

    def serve(self) -> None:
        self._running.serve()

    def fetch(self, number: int) -> Any:
        return self._running.fetch(number), None

    @property
    def _running(self) -> Host:
        if self._host is None:
            raise RuntimeError(f"{self._name} has not been started")
        return self._host


def _is_portable(error: BaseException) -> bool:
    try:
        cloudpickle.loads(cloudpickle.dumps(error))  # type: ignore[no-untyped-call]  # Ray's
    except Exception:  # noqa: BLE001  # whatever a user's error does there
        return False
    return True


@final
class _RayHandle(Handle):
    def __init__(
        self, spec: WorkerSpec, actor: Any, started: Any, *, here: str, start_timeout_s: float
    ) -> None:
        self.name = spec.name
        self.node = spec.options.get("node")
        self.stopped = False
        self.timeout_s = spec.timeout_s
        self._actor = actor
        self._starting = _RayFuture(self, started, start_timeout_s)
        self._here = here
        self._path: str | None = None
        self._channel: Channel | None = None
        self._serving: Any = None
        self._unanswered: collections.deque[ChannelFuture] = collections.deque()
        self._lost: WorkerLostError | None = None
        self._lock = threading.RLock()

    # ---- calls ---------------------------------------------------------------------------------

    @property
    def is_near(self) -> bool:  # type: ignore[override]  # known once it has started
        """Whether calls that fit a frame go over a socket."""
        return self._path is not None and self._lost is None

    def call(
        self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any
    ) -> Future:
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        with self._lock:
            try:
                self._wait_until_started()
                return self._begin(method, args, kwargs, limit_s)
            except WorkerLostError as error:
                return Failed(error)

    def _begin(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], limit_s: float
    ) -> Future:
        if self._path is not None:
            try:
                pieces = packed([method, list(args), kwargs])
            except UnframeableError:
                pass
            else:
                return self._send(pieces, method, limit_s)
        self._leave()
        return _RayFuture(self, self._actor.call.remote(method, args, kwargs), limit_s, method)

    def _wait_until_started(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self.pid == -1:
            where, self.address, path, self.pid = self._starting.result()
            _log.info("worker %s is process %d on %s", self.name, self.pid, self.address)
            if where == self._here:
                self._path = path

    def _send(self, pieces: list[Any], method: str, limit_s: float) -> Future:
        future = ChannelFuture(self, method, limit_s)
        try:
            if self._serving is None:
                self._serving = self._actor.serve.remote()
            if self._channel is None:
                self._channel = connect(str(self._path), _CONNECT_S, sealed=True)
            self._channel.send(pieces, limit_s)
        except ChannelClosedError:
            raise self.lose() from None
        except TimeoutError:
            raise self.expire(method, limit_s) from None
        self._unanswered.append(future)
        return future

    def _leave(self) -> None:
        """Take the worker from the socket, so that it answers calls by Ray."""
        while self._unanswered:
            self.receive()
        if self._serving is not None and self._channel is not None:
            self._channel.send(packed(None), self.timeout_s)
            self._serving = None

    def receive(self) -> None:
        """Take the oldest answer that is missing from the socket, or a part of it.

        Raises:
            WorkerLostError: it will never come.
        """
        future = self._unanswered[0]
        if self._channel is None:
            raise self.lose()
        try:
            framed, content, logs = self._channel.receive(future.left_s)
            if framed is None:  # something before the answer
                part, count = content
                frames = [self._channel.receive(future.left_s) for _ in range(count)]
                future.parts.append(frames or part)
        except ChannelClosedError:
            raise self.lose() from None
        except TimeoutError:
            raise self.expire(future.method, future.limit_s) from None
        self.relay(logs)
        if framed is None:
            return
        self._unanswered.popleft()
        if framed:
            future.outcome = content
        else:
            self._leave()
            fetched = _RayFuture(self, self._actor.fetch.remote(content), self.timeout_s)
            future.outcome = fetched.outcome()
        future.answered = True

    def wait_until(
        self, ready: Callable[[], bool], future: ChannelFuture, timeout_s: float | None
    ) -> bool:
        """Take answers until `ready()`, with that of `future` at the latest; see `Line`."""
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            while not ready():
                if self._lost is not None:
                    raise self._lost
                if deadline_s is not None and self._channel is not None:
                    waits_s = min(max(0.0, deadline_s - time.monotonic()), future.left_s)
                    if not self._channel.poll(waits_s) and not self._unanswered[0].is_late:
                        return False
                self.receive()
        return True

    # ---- the end -------------------------------------------------------------------------------

    def lose(self, error: Exception | None = None) -> WorkerLostError:
        """Return, from now on, the error that says why the worker is gone."""
        if self._lost is None:
            self._lost = WorkerLostError(self.name, reason=self._reason(error))
            self.stop()
        return self._lost

    def expire(self, method: str, limit_s: float) -> WorkerLostError:
        """End a worker that missed a deadline; return the error that says so."""
        if self._lost is None:
            reason = f"it did not answer {method or 'its start'} within {limit_s:g} s"
            self._lost = WorkerLostError(self.name, reason=reason)
            self.stop()
        return self._lost

    def _reason(self, error: Exception | None) -> str:
        if error is None:
            waiting = self._serving if self._serving is not None else self._actor.fetch.remote(-1)
            try:
                ray.get(waiting, timeout=_REASON_S)
            except RayError as found:
                error = found
        return _why(error, self.pid)

    def stop(self) -> None:
        """End the worker's process."""
        if self.stopped:
            return
        self.stopped = True
        if self._lost is None:
            self._lost = WorkerLostError(self.name, reason="it was stopped")
        if self._channel is not None:
            self._channel.close()
        if ray.is_initialized():
            ray.kill(self._actor)

    def relay(self, logs: Sequence[Any] | None) -> None:
        """Log here what the worker logged."""
        for name, level, content, step in logs or ():
            if isinstance(content, dict):
                _log_metrics(content, step)
            else:
                logging.getLogger(name).log(level, "[%s] %s", self.name, content)


def _log_metrics(values: dict[str, Any], step: int | None) -> None:
    for name, value in values.items():
        prefix, _, key = name.rpartition("/")
        get_metrics_logger().log({key: value}, step=step, prefix=prefix or None)


def _why(error: Exception | None, pid: int) -> str:
    """Return in a few words why Ray says an actor died; `pid` was its process."""
    text = str(error) if error is not None else ""
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        return _out_of_memory(text, pid)  # Ray's own monitor says so; a kernel says nothing
    if re.search(r"node.{0,80}(died|dead|removed|terminated)", text, re.IGNORECASE):
        return "its node left the cluster"
    if error is None:
        return "its connection broke"
    if "SIGKILL" in text or "connection error code 2" in text:
        return (
            "its process was killed from outside, as by kill -9, or by the kernel where memory "
            "ran out"
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _out_of_memory(text: str, pid: int) -> str:
    node = re.search(r"was ([\d.]+ ?\w+) used / ([\d.]+ ?\w+) limit", text)
    own = re.search(rf"pid={pid}, actual memory used=([\d.]+ ?\w+)", text)
    on_node = f" ({node[1]} of {node[2]} used)" if node else ""
    of_worker = f"; it held {own[1]} itself" if own else ""
    return (
        f"it was killed because its node ran out of memory{on_node}{of_worker}. Start fewer or "
        "smaller workers, or add memory"
    )


@final
class _RayFuture(Future):
    def __init__(self, handle: _RayHandle, ref: Any, limit_s: float, method: str = "") -> None:
        self._handle = handle
        self._ref = ref
        self._method = method
        self._limit_s = limit_s
        self._expires_s = time.monotonic() + limit_s
        self._outcome: Any = None
        self._error: WorkerLostError | None = None

    def poll(self, timeout_s: float = 0.0) -> bool:
        if self._ref is None:
            return True
        left_s = self._expires_s - time.monotonic()
        ready, _ = ray.wait([self._ref], timeout=max(0.0, min(timeout_s, left_s)))
        return bool(ready) or left_s <= 0.0

    def outcome(self) -> Any:
        """Return the result, or the `Failure` that came instead."""
        if self._error is not None:
            raise self._error
        if self._ref is not None:
            try:
                left_s = max(0.0, self._expires_s - time.monotonic())
                self._outcome, logs = ray.get(self._ref, timeout=left_s)
            except GetTimeoutError:
                self._error = self._handle.expire(self._method, self._limit_s)
                raise self._error from None
            except _DEATHS as error:
                self._error = self._handle.lose(error)
                raise self._error from None
            self._ref = None
            self._handle.relay(logs)
        return self._outcome

    def result(self) -> Any:
        outcome = self.outcome()
        if isinstance(outcome, Failure):
            outcome.raise_(self._handle.name)
        return outcome


def this_process(*, imports: Sequence[str], seed: int | None, threads: int | None) -> WorkerSetup:
    """Return a setup that makes workers' processes like this one."""
    return WorkerSetup(
        sys_path=tuple(sys.path),
        imports=tuple(imports),
        log_level=get_logger().getEffectiveLevel(),
        torch_threads=threads,
        seed=seed,
    )
