"""Metrics to Trackio's local store; the x-axis is `env_step`."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlightning.utils.logger.backends import BackendOptions

__all__ = ["TrackioBackend", "open_backend"]


@final
class TrackioBackend:
    """One Trackio run."""

    def __init__(self, options: BackendOptions) -> None:
        import trackio

        self._run = trackio.init(project=options.project, name=options.name)

    def write(
        self, values: Mapping[str, float], *, env_step: int, epoch: int, wall_s: float
    ) -> None:
        """Record `values` at `env_step`."""
        self._run.log({**values, "epoch": epoch, "wall_s": wall_s}, step=env_step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def open_backend(options: BackendOptions) -> TrackioBackend:
    """Start the run."""
    return TrackioBackend(options)
