"""Metrics to TensorBoard event files under ``<run_dir>/tensorboard``; the x-axis is `env_step`."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlightning.utils.logger.backends import BackendOptions

__all__ = ["TensorBoardBackend", "open_backend"]


@final
class TensorBoardBackend:
    """Writes scalars; the file is flushed with every row, so that a kill loses nothing."""

    def __init__(self, options: BackendOptions) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(options.run_dir / "tensorboard"))

    def write(
        self, values: Mapping[str, float], *, env_step: int, epoch: int, wall_s: float
    ) -> None:
        """Record `values` at `env_step`."""
        for key, value in values.items():
            self._writer.add_scalar(key, value, global_step=env_step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


def open_backend(options: BackendOptions) -> TensorBoardBackend:
    """Open the event file."""
    return TensorBoardBackend(options)
