"""Every error the training server raises on purpose.

::

    ServerError
    ├── ObservationError (ValueError)     the policy was not built for this observation: close 1008
    ├── PolicyContractError (ValueError)  a policy or an algorithm broke the contract of the guide
    ├── MissingExtraError (ImportError)   an optional dependency is not installed
    ├── UsageError (ValueError)           a command line that cannot be meant
    ├── CannotListenError (OSError)       the address is taken, or is none of this machine
    ├── RunExistsError (FileExistsError)  the run's directory holds an earlier run
    └── RunInUseError (BlockingIOError)   another server writes into the run's directory

Registries raise plain ``KeyError`` and ``TypeError``, as the guide for policies expects. Knows
nothing about torch or sockets.
"""

from __future__ import annotations

import errno
from typing import Any

__all__ = [
    "CannotListenError",
    "MissingExtraError",
    "ObservationError",
    "PolicyContractError",
    "RunExistsError",
    "RunInUseError",
    "ServerError",
    "UsageError",
]


class ServerError(Exception):
    """Root of the errors of this distribution."""


class ObservationError(ServerError, ValueError):
    """An observation has other names or widths than the policy was built for.

    Attributes:
        found: what the client sent, for example ``"states a:3,t:1"``.
        expected: what the policy has, in the same form.
        hint: what to do about it.
    """

    def __init__(self, found: str, expected: str, *, hint: str = "") -> None:
        super().__init__(found, expected)
        self.found, self.expected, self.hint = found, expected, hint

    @property
    def reason(self) -> str:
        """Both sides, without the hint."""
        return f"{self.found}, policy has {self.expected}"

    def __str__(self) -> str:
        return self.reason + (f"; {self.hint}" if self.hint else "")


class PolicyContractError(ServerError, ValueError):
    """A policy or an algorithm returned something else than its contract says."""


class MissingExtraError(ServerError, ImportError):
    """An optional dependency is not installed.

    Attributes:
        what: what needs it.
        missing: the module that was not found.
        command: how to install it.
    """

    def __init__(self, what: str, *, missing: str, command: str) -> None:
        super().__init__(what, missing, command)
        self.what, self.missing, self.command = what, missing, command

    def __str__(self) -> str:
        return f"{self.what} needs {self.missing}, which is not installed: {self.command}"


class UsageError(ServerError, ValueError):
    """A command line that cannot be meant; the program ends with exit code 2."""


class CannotListenError(ServerError, OSError):
    """Nobody can be served at an address."""

    def __init__(self, host: str, port: int, reason: Exception) -> None:
        super().__init__(host, port, reason)
        self.host, self.port, self.reason = host, port, reason

    def __str__(self) -> str:
        taken = getattr(self.reason, "errno", None) == errno.EADDRINUSE
        hint = ". Choose another --port; 0 takes a free one" if taken else ""
        return f"cannot listen on {self.host} port {self.port}: {self.reason}{hint}"


class RunExistsError(ServerError, FileExistsError):
    """The directory of a run holds an earlier one."""

    def __init__(self, directory: Any) -> None:
        super().__init__(str(directory))
        self.directory = directory

    def __str__(self) -> str:
        return (
            f"{self.directory} holds an earlier run, which stays as it is. Continue it with "
            "--resume, choose another --exp-name, or start over with --overwrite"
        )


class RunInUseError(ServerError, BlockingIOError):
    """The directory of a run belongs to another server, which still runs."""

    def __init__(self, directory: Any) -> None:
        super().__init__(str(directory))
        self.directory = directory

    def __str__(self) -> str:
        return (
            f"another server that still runs writes into {self.directory}; stop it, or choose "
            "another --exp-name"
        )
