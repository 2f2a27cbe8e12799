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


def open_backend(options: BackendOptions) -> TensorBoardBackend:
    """Open the event file."""
    return TensorBoardBackend(options)
