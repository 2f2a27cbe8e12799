"""`Cluster`: the workers of a run that the ``cluster:`` section sends elsewhere.

Opened around a run by `launch`; whoever builds the parts of a run asks it where they live. What is
not remote, and everything in a run without the section, is an ordinary object of this process. Ray
is loaded only where there is something to send.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from typing import TYPE_CHECKING, Any

import torch
import yaml

from rlightning.buffer.buffer_proxy import BufferProxy
from rlightning.env.env_proxy import EnvProxy
from rlightning.env.patient_worker import PatientHandle, PatientWorker
from rlightning.errors import ConfigError
from rlightning.policy.policy_proxy import PolicyProxy
from rlightning.runtime.base import WorkerSpec
from rlightning.runtime.placement import Plan, plan
from rlightning.runtime.supervision import Supervised
from rlightning.types import PolicyRole
from rlightning.utils.logger import get_logger
from rlightning.utils.registry import ENVS
from rlightning.weights import Offload

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable, Iterator

    from rlightning.config import BufferConfig, ClusterConfig, EnvConfig, MainConfig, PolicyConfig
    from rlightning.runtime.base import Handle, Runtime

__all__ = ["Cluster", "current_cluster", "open_cluster"]

_log = get_logger("cluster")
_current: contextvars.ContextVar[Cluster | None] = contextvars.ContextVar("cluster", default=None)


class Cluster:
    """Makes the remote parts of a run.

    Args:
        config: the ``cluster`` section.
        runtime: starts workers.
        placement: where each goes.
    """

    def __init__(self, config: ClusterConfig, runtime: Runtime, placement: Plan) -> None:
        self.config = config
        self.plan = placement
        self._runtime = runtime
        self._workers = {worker.name: worker for worker in placement.workers}
        self._patient: dict[int, Supervised] = {}

    def make_env(
        self, config: EnvConfig, preprocess_fn: Any, worker_index: int, purpose: str
    ) -> Any:
        """Return an environment worker; those of evaluation work while the others wait.

        Of environments that wait for others (`BaseEnv.waits_for_others`), evaluation is made by the
        worker that trains.
        """
        name = f"env-{worker_index}" if purpose == "train" else f"eval-env-{worker_index}"
        spawn: Any = functools.partial(
            self._supervised,
            name,
            planned=f"env-{worker_index}",
            extra=purpose != "train",
            timeout_s=self.config.env_timeout_s,
        )
        kind = ENVS.get(config.backend)
        if kind.waits_for_others:
            spawn = functools.partial(self._spawn_patient, spawn, worker_index, purpose)
        return EnvProxy(kind, config, worker_index, preprocess_fn, purpose, spawn)

    def _spawn_patient(
        self, spawn: Any, worker_index: int, purpose: str, _: Any, recipe: tuple[Any, ...]
    ) -> PatientHandle:
        """Return the handle of an environment that waits: in a new worker, or in training's."""
        known = self._patient.get(worker_index)
        if known is not None and purpose == "eval":
            return PatientHandle(known, recipe, owns=False)
        worker = self._patient[worker_index] = spawn(PatientWorker, recipe)
        return PatientHandle(worker, recipe, owns=True)

    def make_policy(
        self, kind: type[Any], config: PolicyConfig, role: PolicyRole, index: int
    ) -> Any:
        """Return a policy worker."""
        name = f"{role}-{index}"
        if role is PolicyRole.TRAIN:
            spawn: Any = functools.partial(self._spawn, name, timeout_s=self.config.train_timeout_s)
        else:
            spawn = functools.partial(
                self._supervised, name, planned=name, timeout_s=self.config.infer_timeout_s
            )
        return PolicyProxy(
            kind,
            config,
            role,
            spawn,
            timeout_s=self.config.train_timeout_s,
            make_offload=Offload if self.config.enable_offload else None,
        )

    def make_buffer(
        self,
        kind: type[Any],
        config: BufferConfig,
        seed: int | None,
        stages: dict[str, Any],
        index: int = 0,
    ) -> Any:
        """Return a storage worker."""
        spawn = functools.partial(
            self._spawn, f"buffer-{index}", timeout_s=self.config.infer_timeout_s
        )
        return BufferProxy(kind, config, seed, stages, spawn)

    def _spec(
        self,
        name: str,
        make: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        timeout_s: float,
        planned: str = "",
        extra: bool = False,
    ) -> WorkerSpec:
        worker = self._workers.get(planned or name)
        options: dict[str, Any] = {}
        if worker is not None:
            options = {
                "num_cpus": 0 if extra else worker.cpus,
                "num_gpus": worker.extra_gpus if extra else worker.gpus,
                "memory": 0 if extra else worker.memory_bytes,
                "node": worker.node,
                "bundle": worker.bundle,
            }
        return WorkerSpec(name=name, make=make, args=args, timeout_s=timeout_s, options=options)

    def _spawn(
        self, name: str, make: Callable[..., Any], args: tuple[Any, ...], *, timeout_s: float
    ) -> Handle:
        return self._runtime.spawn(self._spec(name, make, args, timeout_s=timeout_s))

    def _supervised(
        self,
        name: str,
        make: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        timeout_s: float,
        planned: str,
        extra: bool = False,
    ) -> Supervised:
        spec = self._spec(name, make, args, timeout_s=timeout_s, planned=planned, extra=extra)
        return Supervised(self._runtime, spec, max_restarts=self.config.max_restarts)


def current_cluster() -> Cluster | None:
    """Return the cluster that `open_cluster` has opened around the caller; None in a local run."""
    return _current.get()


@contextlib.contextmanager
def open_cluster(config: MainConfig) -> Iterator[Cluster | None]:
    """Join or start the cluster that `config` asks for, plan its workers, and end them on leaving.

    `launch` does so around the user's function; a script without `launch` does it itself, around
    the builders and the engine's ``run``. Without a ``cluster:`` section, or where nothing is
    remote, this does nothing and yields None.

    Raises:
        ConfigError: Ray is not installed, or there is no cluster at the address.
        PlacementError: the cluster lacks what the run asks for.
    """
    section = config.cluster
    if section is None or not section.asks_for_workers:
        with _as_current(None):  # also inside another run's cluster
            yield None
        return
    runtime = _start_runtime(config, section)
    try:
        placement = plan(section, config.env, runtime.nodes)
        table, *_ = placement.describe().partition("\nnote: ")
        _log.info("%s", table)
        for line in placement.notes:
            _log.warning("%s", line)
        if config.run is not None:
            _write_plan(placement, config.run.run_dir)
        runtime.reserve(placement.bundles)
        cluster = Cluster(section, runtime, placement)
        with _as_current(cluster):
            yield cluster
    finally:
        runtime.close()


@contextlib.contextmanager
def _as_current(cluster: Cluster | None) -> Iterator[None]:
    token = _current.set(cluster)
    try:
        yield
    finally:
        _current.reset(token)


def _start_runtime(config: MainConfig, section: ClusterConfig) -> Any:
    try:
        from rlightning.runtime.ray import RayRuntime, this_process
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "`cluster:` asks for a distributed run, which needs Ray: pip install 'rlightning[ray]'"
            "; or add ~cluster to the command"
        ) from error
    threads = config.train.torch_threads or torch.get_num_threads()
    return RayRuntime(
        section.ray_address,
        setup=this_process(imports=config.imports, seed=config.train.seed, threads=threads),
        start_timeout_s=section.start_timeout_s,
    )


def _write_plan(placement: Plan, run_dir: pathlib.Path) -> None:
    text = yaml.safe_dump(placement.to_dict(), sort_keys=False)
    (run_dir / "placement.yaml").write_text(text, encoding="utf-8")
