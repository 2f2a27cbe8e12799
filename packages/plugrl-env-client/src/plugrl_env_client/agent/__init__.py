"""Agents: who is asked for actions."""

from plugrl_env_client.agent.base_agent import BaseAgent
from plugrl_env_client.agent.websocket_env_client_agent import (
    ConnectionReplaced,
    ServerStopped,
    WebSocketEnvClientAgent,
)

__all__ = ["BaseAgent", "ConnectionReplaced", "ServerStopped", "WebSocketEnvClientAgent"]
