"""The public import path of `rlightning.build`: one line, no names of its own."""

from rlightning.build import *  # noqa: F403  # a door
from rlightning.build import __all__ as __all__
