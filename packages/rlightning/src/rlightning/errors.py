"""Every error the framework raises on purpose, and the one helper that words suggestions.

Knows nothing about torch, environments or configuration. The tree::

    RLightningError
    ├── ConfigError (ValueError)          a configuration value or key is wrong
    ├── UnknownNameError (KeyError)       a name is not in a registry or a batch
    ├── DuplicateNameError (KeyError)     a name is registered twice
    ├── ContractError (ValueError)        user code broke a documented contract (shape, dtype, type)
    ├── NonFiniteError (ValueError)       NaN or infinity where learning would be poisoned
    ├── EnvWorkerError (RuntimeError)     an environment raised, hung or died
    │   └── NoClientError                 environments that should dial in stay away
    ├── WorkerLostError (RuntimeError)    a worker of a cluster died, or missed its deadline
    ├── PlacementError (ValueError)       a cluster lacks what a run asks for
    ├── CheckpointError (RuntimeError)    a checkpoint is missing, damaged or somebody else's
    ├── RunDirectoryError (RuntimeError)  a run directory exists, or is not one
    └── StopRequested                     a person or the system asked the run to stop
"""

from __future__ import annotations

import copyreg
import difflib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "USER_ERRORS",
    "CheckpointError",
    "ConfigError",
    "ContractError",
    "DuplicateNameError",
    "EnvWorkerError",
    "NoClientError",
    "NonFiniteError",
    "PlacementError",
    "RLightningError",
    "RunDirectoryError",
    "StopRequested",
    "UnknownNameError",
    "WorkerLostError",
    "did_you_mean",
]


class RLightningError(Exception):
    """Root of all errors of this distribution; passes between processes with all its data."""

    def __reduce__(self) -> tuple[Any, ...]:
        # The inherited way calls the class with `args` alone, which lacks keyword-only parameters.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]  # missing in typeshed


class ConfigError(RLightningError, ValueError):
    """A configuration value or key is wrong."""


class UnknownNameError(RLightningError, KeyError):
    """A name was looked up where it does not exist.

    Attributes:
        name: the name asked for.
        kind: where it was looked for, for example ``"policy registry"``.
        known: the names that exist.
    """

    def __init__(self, name: str, *, kind: str, known: Iterable[str], hint: str = "") -> None:
        super().__init__(name)
        self.name = name
        self.kind = kind
        self.known = sorted(known)
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.name!r} is not in the {self.kind}."
        text += did_you_mean(self.name, self.known)
        text += f" Known: {', '.join(self.known) or 'none'}."
        return f"{text} {self.hint}".rstrip()


class DuplicateNameError(RLightningError, KeyError):
    """A name was registered twice by two different objects."""

    def __str__(self) -> str:
        return str(self.args[0])


class ContractError(RLightningError, ValueError):
    """User code broke a documented contract: a wrong type, shape or dtype."""


class NonFiniteError(RLightningError, ValueError):
    """NaN or infinity appeared where it would poison learning.

    Attributes:
        tensor: what is not finite, for example ``"reward"`` or ``"gradient of actor.0.weight"``.
        source: where it came from: an environment worker and its row, or the policy.
        step: the environment step or update it appeared at, if known.
        value: the offending array or tensor, where it is at hand.
        dump: the file the tensor and its batch were saved to, if any.
    """

    def __init__(
        self, tensor: str, *, source: str, step: int | None = None, where: str = ""
    ) -> None:
        super().__init__(tensor)
        self.tensor = tensor
        self.source = source
        self.step = step
        self.where = where
        self.value: Any = None
        self.dump: str | None = None

    def __str__(self) -> str:
        text = f"{self.tensor} of {self.source} is not finite"
        if self.step is not None:
            text += f" at step {self.step}"
        if self.where:
            text += f" ({self.where})"
        text += ". The run stopped before it could reach the parameters."
        if self.dump:
            text += f" The tensor and its batch were saved to {self.dump}."
        return text


class EnvWorkerError(RLightningError, RuntimeError):
    """An environment raised, missed its deadline or died."""


class NoClientError(EnvWorkerError):
    """Environments that should dial in did not come, or did not come back."""


class PlacementError(RLightningError, ValueError):
    """A cluster lacks what a run asks for.

    Attributes:
        role: which workers cannot be placed: ``"train"``, ``"eval"``, ``"env"`` or ``"buffer"``.
        resource: what is missing: ``"GPU"``, ``"CPU"``, ``"memory"``, ``"node"`` or ``"place"``.
        asked: how much of it the run asks for.
        available: how much of it there is.
    """

    def __init__(
        self, message: str, *, role: str, resource: str, asked: float, available: float
    ) -> None:
        super().__init__(message)
        self.role = role
        self.resource = resource
        self.asked = asked
        self.available = available


class WorkerLostError(RLightningError, RuntimeError):
    """A worker of a cluster died, or missed its deadline and counts as dead.

    Attributes:
        worker: its name, for example ``env-0``.
        reason: what is known of why.
    """

    def __init__(self, worker: str, *, reason: str) -> None:
        super().__init__(worker)
        self.worker = worker
        self.reason = reason

    def __str__(self) -> str:
        return f"worker {self.worker} is lost: {self.reason}"


class CheckpointError(RLightningError, RuntimeError):
    """A checkpoint is missing, damaged, or belongs to another policy."""


class RunDirectoryError(RLightningError, RuntimeError):
    """A run directory exists already, or the given folder is not one."""


class StopRequested(RLightningError):  # noqa: N818  # a request, not a fault
    """Ctrl-C or SIGTERM arrived; the run saves and ends with exit code 0."""


USER_ERRORS = (
    ConfigError,
    UnknownNameError,
    DuplicateNameError,
    NoClientError,
    PlacementError,
    CheckpointError,
    RunDirectoryError,
)
"""Mistakes in a command or a configuration: a command shows their message and no traceback."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the closest known names, or an empty string."""
    folded = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), folded, n=2, cutoff=0.6)
    if not close:
        return ""
    return f" Did you mean {' or '.join(repr(folded[c]) for c in close)}?"
