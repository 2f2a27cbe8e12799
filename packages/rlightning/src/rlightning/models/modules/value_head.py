"""The public path of ``ValueHead``."""

from rlightning.models.heads import ValueHead

__all__ = ["ValueHead"]
