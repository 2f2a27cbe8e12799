"""A training server for environments anywhere: policies and algorithms behind a WebSocket."""

__version__ = "0.1.0"

__all__ = ["__version__"]
