"""Every error that this distribution raises on purpose.

The tree::

    EnvClientError
    ├── UsageError (ValueError)          a command line that cannot be meant
    ├── UnknownEnvironmentError (KeyError)  no environment has this uid
    ├── EnvContractError (ValueError)    an environment broke its contract: shapes, modes, rewards
    ├── ActionShapeError (ValueError)    the server's actions do not fit the environment
    └── MissingVideoExtraError (ImportError)  videos need an extra

What goes wrong on the wire is raised by `plugrl_protocol`, what goes wrong inside a simulator by
`plugrl_envs` or by the simulator itself.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "ActionShapeError",
    "EnvClientError",
    "EnvContractError",
    "MissingVideoExtraError",
    "UnknownEnvironmentError",
    "UsageError",
]


class EnvClientError(Exception):
    """Root of everything that this distribution raises."""


class UsageError(EnvClientError, ValueError):
    """A command line that cannot be meant."""


class UnknownEnvironmentError(EnvClientError, KeyError):
    """No environment is registered under a uid.

    Attributes:
        uid: what was asked for.
        known: what there is.
    """

    def __init__(self, uid: str, known: Iterable[str]) -> None:
        super().__init__(uid)
        self.uid = uid
        self.known = sorted(known)

    def __str__(self) -> str:
        folded = {name.lower(): name for name in self.known}
        close = difflib.get_close_matches(self.uid.lower(), folded, n=1)
        hint = f" Did you mean {folded[close[0]]!r}?" if close else ""
        return (
            f"no environment {self.uid!r} is registered.{hint} Known: {', '.join(self.known)}. "
            "One of your own is registered by importing its module: --import my_package.my_env"
        )


class EnvContractError(EnvClientError, ValueError):
    """An environment broke its contract."""


class ActionShapeError(EnvClientError, ValueError):
    """The server's actions do not fit the environment, or what was declared about them."""


class MissingVideoExtraError(EnvClientError, ImportError):
    """Videos were asked for, and nothing is installed that writes them."""

    def __str__(self) -> str:
        return 'videos need imageio-ffmpeg: pip install "plugrl-env-client[video]"'
