"""Metrics to SwanLab, offline unless asked; the x-axis is `env_step`."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlightning.utils.logger.backends import BackendOptions

__all__ = ["SwanLabBackend", "open_backend"]


@final
class SwanLabBackend:
    """One SwanLab experiment."""

    def __init__(self, options: BackendOptions) -> None:
        import swanlab

        where = {"project": options.project, "experiment_name": options.name}
        folder = str(options.run_dir / "swanlab")
        self._run = swanlab.init(**where, logdir=folder, mode=options.mode or "offline")

    def write(
        self, values: Mapping[str, float], *, env_step: int, epoch: int, wall_s: float
    ) -> None:
        """Record `values` at `env_step`."""
        self._run.log(dict(values), step=env_step)

    def close(self) -> None:
        """Finish the experiment."""
        self._run.finish()


def open_backend(options: BackendOptions) -> SwanLabBackend:
    """Start the experiment."""
    return SwanLabBackend(options)
