"""Every error this distribution raises on purpose.

The tree::

    PlugrlEnvsError
    ├── UnknownEnvError (ValueError)        no environment has this id
    ├── MissingExtraError (ImportError)     the simulator family is not installed
    ├── UnsupportedSpaceError (ValueError)  a space that policies cannot be given
    ├── AutoresetError (ValueError)         how the rows are reset is unknown or unusable
    ├── InvalidActionError (ValueError)     an action of the wrong shape, dtype or range
    ├── EnvResultError (ValueError)         an environment returned what Gymnasium does not know
    ├── RenderingError (RuntimeError)       nothing on this machine can draw the frames asked for
    └── EnvWorkerError (RuntimeError)       an environment raised or died; names the row
        └── EnvTimeoutError (TimeoutError)  an environment missed its deadline
"""

from __future__ import annotations

__all__ = [
    "AutoresetError",
    "EnvResultError",
    "EnvTimeoutError",
    "EnvWorkerError",
    "InvalidActionError",
    "MissingExtraError",
    "PlugrlEnvsError",
    "RenderingError",
    "UnknownEnvError",
    "UnsupportedSpaceError",
]


class PlugrlEnvsError(Exception):
    """Root of all errors of this distribution."""


class UnknownEnvError(PlugrlEnvsError, ValueError):
    """No environment is registered under the id."""


class MissingExtraError(PlugrlEnvsError, ImportError):
    """The packages of a simulator family are not installed.

    Attributes:
        extra: the extra of plugrl-envs that brings them.
    """

    def __init__(self, env_id: str, *, extra: str, reason: str) -> None:
        super().__init__(env_id)
        self.env_id = env_id
        self.extra = extra
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"environment {self.env_id!r} needs the {self.extra!r} extra ({self.reason}); "
            f'install it with: pip install "plugrl-envs[{self.extra}]"'
        )


class UnsupportedSpaceError(PlugrlEnvsError, ValueError):
    """An observation or action space that policies cannot be given."""


class AutoresetError(PlugrlEnvsError, ValueError):
    """How a vector environment resets its rows is not declared, or cannot be used."""


class InvalidActionError(PlugrlEnvsError, ValueError):
    """An action has the wrong shape, dtype or range."""


class RenderingError(PlugrlEnvsError, RuntimeError):
    """Frames were asked for, and nothing on this machine can draw them."""


class EnvResultError(PlugrlEnvsError, ValueError):
    """An environment returned something else than Gymnasium's contract says."""


class EnvWorkerError(PlugrlEnvsError, RuntimeError):
    """An environment raised or its process died.

    Attributes:
        index: the row of the environment.
        during: what it was doing: ``"start"``, ``"reset"``, ``"step"``, ...
        reason: what happened, with the environment's own traceback where there is one.
    """

    def __init__(self, index: int, *, during: str, reason: str) -> None:
        super().__init__(index)
        self.index = index
        self.during = during
        self.reason = reason

    def __str__(self) -> str:
        return f"environment {self.index} failed during {self.during}: {self.reason}"


class EnvTimeoutError(EnvWorkerError, TimeoutError):
    """An environment did not answer within its deadline."""
