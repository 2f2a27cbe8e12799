"""The public import path of `rlightning.launch`: one line, no names of its own."""

from rlightning.launch import *  # noqa: F403  # a door
from rlightning.launch import __all__ as __all__
