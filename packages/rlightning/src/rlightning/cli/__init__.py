"""The command ``rlightning``. Nothing heavy is imported before a command needs it."""

from rlightning.cli.main import main

__all__ = ["main"]
