"""Environments that dial in: runs simulators beside a training server reached over a WebSocket."""

__version__ = "0.1.0"

__all__ = ["__version__"]
