"""Metrics to Weights & Biases, offline unless asked; the x-axis is `env_step`."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlightning.utils.logger.backends import BackendOptions

__all__ = ["WandbBackend", "open_backend"]


@final
class WandbBackend:
    """One wandb run."""

    def __init__(self, options: BackendOptions) -> None:
        import wandb

        where = {"project": options.project, "name": options.name, "dir": str(options.run_dir)}
        self._run = wandb.init(**where, mode=options.mode or "offline")
        self._run.define_metric("env_step")
        self._run.define_metric("*", step_metric="env_step")

    def write(
        self, values: Mapping[str, float], *, env_step: int, epoch: int, wall_s: float
    ) -> None:
        """Record `values` with all three axes beside them."""
        self._run.log({**values, "env_step": env_step, "epoch": epoch, "wall_s": wall_s})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def open_backend(options: BackendOptions) -> WandbBackend:
    """Start the run."""
    return WandbBackend(options)
