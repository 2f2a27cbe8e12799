"""Metrics to MLflow, wherever its tracking URI points; the x-axis is `env_step`."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlightning.utils.logger.backends import BackendOptions

__all__ = ["MlflowBackend", "open_backend"]


@final
class MlflowBackend:
    """One MLflow run."""

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


def open_backend(options: BackendOptions) -> MlflowBackend:
    """Start the run."""
    return MlflowBackend(options)
