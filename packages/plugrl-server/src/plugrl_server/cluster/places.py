"""`Places`: where workers go on a cluster, and how they are started.

Everything that is the same for the server's own policies and for those of rlightning.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from typing import TYPE_CHECKING, Any, final

from plugrl_server.errors import MissingExtraError, UsageError
from rlightning.errors import ConfigError, PlacementError
from rlightning.runtime.base import Handle, Runtime, WorkerSpec
from rlightning.runtime.supervision import Supervised

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rlightning.runtime.placement_plan import Worker

__all__ = ["Places", "PlacesConfig", "open_places", "share_gpus"]

_log = logging.getLogger(__name__)

_INFER_TIMEOUT_S = 120.0
_UNITS = 10_000  # schedulers count shares of a GPU in ten-thousandths


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacesConfig:
    """How many workers there are, and what each may take."""

    address: str = "auto"
    """Of the cluster; see `rlightning.runtime.ray.RayRuntime`."""
    infer_workers: int = 1
    """Workers that act."""
    ddp_workers: int = 1
    """Workers that learn together."""
    infer_gpu: float | None = None
    """GPUs of one that acts, or a share of one; None: one where there are enough."""
    num_ddp_gpus: int | None = None
    """GPUs of those that learn, in all; None: one each where there are enough."""
    meeting: tuple[str, int] = ("", 0)
    """Where learners meet: host and port; what is empty is chosen."""
    max_restarts: int = 3
    """How often a worker that died is started again."""
    imports: Sequence[str] = ()
    """Modules that workers import first."""
    torch_threads: int | None = None
    """Threads of one torch operation in a worker."""
    seed: int | None = None
    """Seeds the workers' global generators, each in its own way."""


def share_gpus(config: PlacesConfig, gpus: int) -> tuple[float, float, str]:
    """Give the GPUs of one worker that acts and of one that learns.

    Args:
        config: what is asked for.
        gpus: what the cluster has.

    Returns:
        Both, and a sentence where less is given than was asked for; empty where not.

    Raises:
        UsageError: a worker would have more than one GPU, and not a whole number.
    """
    workers = config.infer_workers + config.ddp_workers
    ddp = None if config.num_ddp_gpus is None else config.num_ddp_gpus / max(1, config.ddp_workers)
    infer = config.infer_gpu
    asked = config.infer_workers * (infer or 0.0) + config.ddp_workers * (ddp or 0.0)
    if gpus == 0:
        note = (
            f"the cluster has no GPU: workers, which ask for {asked:g}, use CPUs" if asked else ""
        )
        return 0.0, 0.0, note
    share = 1.0 if workers <= gpus else math.floor(_UNITS / math.ceil(workers / gpus)) / _UNITS
    wanted = (share if infer is None else infer, share if ddp is None else ddp)
    for name, each in zip(("--infer-gpu", "--num-ddp-gpus"), wanted, strict=True):
        if each > 1 and not each.is_integer():
            raise UsageError(
                f"{name} gives a worker {each:g} GPUs; expected a share of one, or a whole number"
            )
    total = config.infer_workers * wanted[0] + config.ddp_workers * wanted[1]
    if total <= gpus + 1e-6:
        return *wanted, ""
    note = f"the cluster has {gpus} GPUs: workers, which ask for {total:g}, get {share:g} each"
    return share, share, note


@final
class Places:
    """Starts workers; made by `open_places`.

    Args:
        config: how many, and what each takes.
        runtime: starts workers.
        workers: where each goes.
    """

    def __init__(self, config: PlacesConfig, runtime: Runtime, workers: Sequence[Worker]) -> None:
        self.config = config
        self._runtime = runtime
        self._workers = {worker.name: worker for worker in workers}
        self._ends = contextlib.ExitStack()

    def actor(self, number: int, make: Callable[..., Any], args: tuple[Any, ...]) -> Supervised:
        """Start a worker that acts; it can be started again."""
        spec = self._spec("infer", f"eval-{number}", number, make, args, _INFER_TIMEOUT_S)
        return Supervised(self._runtime, spec, max_restarts=self.config.max_restarts)

    def learner(
        self, number: int, make: Callable[..., Any], args: tuple[Any, ...], *, timeout_s: float
    ) -> Handle:
        """Start a worker that learns."""
        spec = self._spec("learner", f"train-{number}", number, make, args, timeout_s)
        return self._runtime.spawn(spec)

    def at_end(self, close: Callable[[], Any]) -> None:
        """Have something closed before the workers are ended."""
        self._ends.callback(close)

    def close(self) -> None:
        """Close what `at_end` was given."""
        self._ends.close()

    def _spec(  # what a worker is
        self,
        kind: str,
        planned: str,
        number: int,
        make: Callable[..., Any],
        args: tuple[Any, ...],
        timeout_s: float,
    ) -> WorkerSpec:
        worker = self._workers[planned]
        options = {"num_cpus": worker.cpus, "num_gpus": worker.gpus}
        return WorkerSpec(
            name=f"{kind}-{number}", make=make, args=args, timeout_s=timeout_s, options=options
        )


@contextlib.contextmanager
def open_places(config: PlacesConfig) -> Iterator[Places]:
    """Join or start a cluster, plan the workers, and end them on leaving.

    Raises:
        MissingExtraError: Ray is not installed.
        UsageError: there is no cluster at the address, or it lacks what is asked for.
    """
    try:
        from rlightning.runtime.ray import RayRuntime, this_process
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise MissingExtraError(
            "plugrl-run-server-ray", missing="ray", command="pip install 'plugrl-server[ray]'"
        ) from error
    setup = this_process(
        imports=config.imports, seed=config.seed, threads=config.torch_threads or None
    )
    setup = dataclasses.replace(setup, loggers=(*setup.loggers, "plugrl_server"))
    try:
        runtime = RayRuntime(config.address, setup=setup)
    except ConfigError as error:
        raise UsageError(f"--ray-address: {error}") from error
    try:
        with contextlib.closing(Places(config, runtime, _planned(config, runtime))) as places:
            yield places
    finally:
        runtime.close()


def _planned(config: PlacesConfig, runtime: Any) -> Sequence[Worker]:
    from rlightning.config import ClusterConfig
    from rlightning.runtime.placement import plan

    nodes = runtime.nodes
    infer_gpus, ddp_gpus, note = share_gpus(config, sum(node.gpus for node in nodes))
    section = ClusterConfig(
        eval_worker_num=config.infer_workers,
        train_worker_num=max(1, config.ddp_workers),
        remote_train=config.ddp_workers > 0,
        eval_each_gpu_num=infer_gpus,
        train_each_gpu_num=ddp_gpus,
        remote_env=False,
        remote_storage=False,
    )
    try:
        placement = plan(section, [], nodes)
    except PlacementError as error:
        raise UsageError(str(error)) from error
    for line in filter(None, (note, *placement.notes)):
        _log.warning("%s", line)
    return placement.workers
