"""Where metrics go besides the files: the table of backends, each loaded when asked for.

Knows nothing about what is measured.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Protocol

from rlightning.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["BACKENDS", "Backend", "BackendOptions", "open_backend"]

BACKENDS = {
    "tensorboard": "rlightning.utils.logger.tensorboard_backend",
    "wandb": "rlightning.utils.logger.wandb_backend",
    "swanlab": "rlightning.utils.logger.swanlab_backend",
    "trackio": "rlightning.utils.logger.trackio_backend",
    "mlflow": "rlightning.utils.logger.mlflow_backend",
}
"""Backend name to the module whose ``open_backend(options)`` opens it."""


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
    module = importlib.import_module(BACKENDS[name])
    try:
        backend: Backend = module.open_backend(options)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"the metrics backend {name!r} needs the package {error.name!r}: "
            f"pip install 'rlightning[{name}]'"
        ) from error
    return backend
