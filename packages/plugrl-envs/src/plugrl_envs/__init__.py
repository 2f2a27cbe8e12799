"""Simulator families as Gymnasium vector environments with one reset semantics."""

__version__ = "0.1.0"

__all__ = ["__version__"]
