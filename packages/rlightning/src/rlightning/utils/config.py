"""The public import path of the configuration: everything lives in `rlightning.config`."""

from rlightning.config import *  # noqa: F403  # a door: one line, no names of its own
from rlightning.config import __all__ as __all__
