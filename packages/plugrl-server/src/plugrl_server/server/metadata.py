"""What the server says about itself, first and once, to every client."""

from __future__ import annotations

from typing import Any, Final

import plugrl_server
from plugrl_protocol.messages import ALL_FEATURES, Metadata, make_metadata

__all__ = ["PROTOCOL_VERSION", "build_server_metadata", "describe_policy"]

PROTOCOL_VERSION: Final = 1


def describe_policy(policy: Any) -> dict[str, Any]:
    """Give a policy's class name and the shape of its actions; what is unknown is left out."""
    described: dict[str, Any] = {"policy": type(policy).__name__}
    for name in ("action_horizon", "action_dim"):
        value = getattr(policy, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            described[name] = value
    return described


def build_server_metadata(algorithm: Any = None, extra: dict[str, Any] | None = None) -> Metadata:
    """Build the metadata of a run.

    Args:
        algorithm: names itself and its policy; None leaves both out.
        extra: further keys; they win.
    """
    known: dict[str, Any] = {}
    if algorithm is not None:
        known = {"algorithm": type(algorithm).__name__, **describe_policy(algorithm.policy)}
    return make_metadata(
        server_version=plugrl_server.__version__,
        features=ALL_FEATURES,
        extra={**known, **(extra or {})},
    )
