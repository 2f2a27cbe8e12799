"""The agent that asks a training server.

It translates between batches of an environment and messages; patience and the protocol are
`plugrl_protocol`'s.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_env_client.agent.base_agent import BaseAgent
from plugrl_protocol import (
    Backoff,
    ConnectionReplaced,
    EnvClient,
    Feedback,
    Infer,
    ServerStopped,
)

if TYPE_CHECKING:
    import ssl

    import numpy.typing as npt

    from plugrl_env_client.envs.base_env import Observation
    from plugrl_protocol.links.base import Library

__all__ = ["ConnectionReplaced", "ServerStopped", "WebSocketEnvClientAgent"]

DEFAULT_PORT = 8000


class WebSocketEnvClientAgent(BaseAgent):
    """Asks a server for actions. It connects when first asked, and again after a loss.

    Args:
        host: of the server; a whole ``ws://`` or ``wss://`` URL stands for host and port.
        port: of the server; None is 8000.
        api_key: sent in the handshake.
        reconnect_on_server_stop: when the run is finished, wait for the next one.
        reuse_feedback_obs: leave out rows that are byte for byte what the server has.
        backoff: how patiently to look for a server.
        ssl_context: for ``wss``.
        library: what carries the frames.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int | None = None,
        api_key: str | None = None,
        reconnect_on_server_stop: bool = False,  # noqa: FBT001, FBT002  # the documented signature
        reuse_feedback_obs: bool = True,  # noqa: FBT001, FBT002  # the documented signature
        *,
        backoff: Backoff | None = None,
        ssl_context: ssl.SSLContext | None = None,
        library: Library = "websockets",
    ) -> None:
        scheme = "ws" if ssl_context is None else "wss"
        url = host if "://" in host else f"{scheme}://{_bracketed(host)}:{port or DEFAULT_PORT}"
        self.client = EnvClient(
            url,
            api_key=api_key,
            reuse=reuse_feedback_obs,
            wait_for_next_run=reconnect_on_server_stop,
            backoff=backoff,
            ssl_context=ssl_context,
            library=library,
        )

    def get_server_metadata(self) -> dict[str, Any]:
        """Return what the server said about itself, connecting first if need be.

        Raises:
            ServerNotFoundError: there is no server within the limit.
            WireError: what answered cannot be used.
        """
        return dict(self.client.connect().values)

    def infer(
        self,
        obs: Observation,
        *,
        env_indices: npt.NDArray[np.int64],
        step_ids: npt.NDArray[np.int64],
    ) -> dict[str, Any]:
        """Ask for actions; see `BaseAgent.infer`.

        Raises:
            ConnectionReplaced: the connection was lost: drop all chunks, then ask for all rows.
            ServerStopped: the run is finished.
            WireError: anything that asking again would not mend.
        """
        action = self.client.infer(
            Infer(env_indices=env_indices, step_ids=step_ids, observation=obs.to_wire())
        )
        return {"env_ids": action.env_ids, "action": action.action}

    def feedback(
        self,
        obs: Observation,
        rewards: npt.NDArray[Any],
        terminated: npt.NDArray[np.bool_],
        truncated: npt.NDArray[np.bool_],
        info: dict[str, Any],
        *,
        env_indices: npt.NDArray[np.int64],
        step_ids: npt.NDArray[np.int64],
        steps: npt.NDArray[np.int64] | None = None,
    ) -> None:
        """Report; see `BaseAgent.feedback`. Never connects and never repeats.

        Raises:
            ConnectionReplaced: the connection was lost, and this report with it.
            ServerStopped: the run is finished.
            WireError: anything that cannot be mended.
        """
        self.client.feedback(
            Feedback(
                env_indices=env_indices,
                step_ids=step_ids,
                observation=obs.to_wire(),
                rewards=np.asarray(rewards, np.float32),
                terminated=np.asarray(terminated, np.bool_),
                truncated=np.asarray(truncated, np.bool_),
                info=info,
                steps=steps,
            )
        )

    def reset(self) -> None:
        """End the connection; the next `infer` begins a new one."""
        self.client.close()

    def refuse(self, reason: str) -> None:
        """End the connection with 1008; the server logs the reason and goes on for others."""
        self.client.refuse(reason)

    def close(self) -> None:
        """End the connection the normal way."""
        self.client.close()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
