"""The two WebSocket libraries behind one seam: frames in, frames out, close frames as values.

A link knows how bytes travel: handshake, cap, keepalive, closing. It knows nothing of messages.
`choose` picks the library: ``websockets`` always works, ``picows`` is the extra ``[fast]``.
"""

from plugrl_protocol.links.base import (
    ClientLink,
    ClientOptions,
    ConnectFailedError,
    Receiver,
    ServerLink,
    ServerLinks,
    ServerOptions,
    choose,
    keep_freed_memory,
)

__all__ = [
    "ClientLink",
    "ClientOptions",
    "ConnectFailedError",
    "Receiver",
    "ServerLink",
    "ServerLinks",
    "ServerOptions",
    "choose",
    "keep_freed_memory",
]
