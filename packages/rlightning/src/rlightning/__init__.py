"""Reinforcement learning for robots: one policy class, from one process to a cluster.

Importing this prints nothing, starts nothing and changes no global state; sub-packages load when
they are first used.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["__version__", "buffer", "engine", "env", "policy", "types", "utils", "weights"]

try:
    __version__ = version("rlightning")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0"


def __getattr__(name: str) -> Any:
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
