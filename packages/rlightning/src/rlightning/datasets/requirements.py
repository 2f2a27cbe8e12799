"""Import what only datasets need, or say which extra brings it."""

from __future__ import annotations

import importlib
from typing import Any

from rlightning.errors import ConfigError

__all__ = ["require"]


def require(module: str, layout: str) -> Any:
    """Import a module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"datasets in the layout of {layout} need {module.partition('.')[0]} ({error}); "
            'install it with: pip install "rlightning[datasets]"'
        ) from error
