"""The PlugRL wire protocol, both ends: codec, sessions, a blocking client and an asyncio server."""

__version__ = "0.1.0"

__all__ = ["__version__"]
