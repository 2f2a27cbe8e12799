"""Where metrics go besides the files: one class per service; its package is imported when opened.

A service is a few lines, so they share this file. Knows nothing about what is measured. The x-axis
is `env_step`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

from rlightning.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["BACKENDS", "Backend", "BackendOptions", "open_backend"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackendOptions:
    """What a backend is told about the run."""

    project: str
    """The group of runs this one belongs to."""
    name: str
    """The run's name in the group."""
    run_dir: Path
    """The run's directory; local files go below it."""
    mode: str | None = None
    """The backend's own word for online, offline or disabled; None is its local or offline mode."""


class Backend(Protocol):
    """Something that takes metrics. It may raise: the run warns once and goes on without it."""

    def write(
        self, values: Mapping[str, float], *, env_step: int, epoch: int, wall_s: float
    ) -> None:
        """Record `values` at a point of the three axes."""

    def close(self) -> None:
        """Write what is pending and let go of everything."""


class TensorBoardBackend:
    """Scalars in ``<run_dir>/tensorboard``, flushed with every row: a kill loses nothing."""

    def __init__(self, options: BackendOptions) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import FileWriter

        self._writer = FileWriter(str(options.run_dir / "tensorboard"))
        self._summary = Summary

    def write(
        self, values: Mapping[str, float], *, env_step: int, epoch: int, wall_s: float
    ) -> None:
        """Record `values` at `env_step`."""
        # One event for all: each is handed to a thread, which costs as much as a step of training.
        summary, scalar = self._summary, self._summary.Value
        row = summary(value=[scalar(tag=key, simple_value=value) for key, value in values.items()])
        self._writer.add_summary(row, global_step=env_step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class SwanLabBackend:
    """One SwanLab experiment, offline unless asked."""

    def __init__(self, options: BackendOptions) -> None:
        self._run = self._start(options)

    def _start(self, options: BackendOptions) -> Any:
        import swanlab

        where = {"project": options.project, "experiment_name": options.name}
        folder = str(options.run_dir / "swanlab")
        return swanlab.init(**where, logdir=folder, mode=options.mode or "offline")

    def write(
        self, values: Mapping[str, float], *, env_step: int, epoch: int, wall_s: float
    ) -> None:
        """Record `values` at `env_step`."""
        self._run.log(dict(values), step=env_step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class TrackioBackend(SwanLabBackend):
    """One run in Trackio's local store."""

    def _start(self, options: BackendOptions) -> Any:
        import trackio

        return trackio.init(project=options.project, name=options.name)

    def write(
        self, values: Mapping[str, float], *, env_step: int, epoch: int, wall_s: float
    ) -> None:
        """Record `values` and the other axes at `env_step`."""
        self._run.log({**values, "epoch": epoch, "wall_s": wall_s}, step=env_step)


class WandbBackend(SwanLabBackend):
    """One run of Weights & Biases, offline unless asked."""

    def _start(self, options: BackendOptions) -> Any:
        import wandb

        where = {"project": options.project, "name": options.name, "dir": str(options.run_dir)}
        run = wandb.init(**where, mode=options.mode or "offline")
        run.define_metric("env_step")
        run.define_metric("*", step_metric="env_step")
        return run

    def write(
        self, values: Mapping[str, float], *, env_step: int, epoch: int, wall_s: float
    ) -> None:
        """Record `values` with all three axes beside them."""
        self._run.log({**values, "env_step": env_step, "epoch": epoch, "wall_s": wall_s})


class MlflowBackend:
    """One MLflow run, wherever its tracking URI points."""

    def __init__(self, options: BackendOptions) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(options.project)
        self._run_id = mlflow.start_run(run_name=options.name).info.run_id

    def write(
        self, values: Mapping[str, float], *, env_step: int, epoch: int, wall_s: float
    ) -> None:
        """Record `values` at `env_step`."""
        self._mlflow.log_metrics(dict(values), step=env_step, run_id=self._run_id)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


BACKENDS: dict[str, Callable[[BackendOptions], Backend]] = {
    "tensorboard": TensorBoardBackend,
    "wandb": WandbBackend,
    "swanlab": SwanLabBackend,
    "trackio": TrackioBackend,
    "mlflow": MlflowBackend,
}


def open_backend(name: str, options: BackendOptions) -> Backend:
    """Open the backend called `name`.

    Raises:
        ConfigError: there is no such backend.
        ImportError: its package is not installed; the message names the extra.
        Exception: whatever the backend's package raises.
    """
    if name not in BACKENDS:
        hint = did_you_mean(name, BACKENDS)
        raise ConfigError(f"{name!r} is not a metrics backend.{hint} Known: {', '.join(BACKENDS)}.")
    try:
        return BACKENDS[name](options)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the metrics backend {name!r} needs the package {error.name!r}: "
            f"pip install 'rlightning[{name}]'"
        ) from error
