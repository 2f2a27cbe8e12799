"""What users write, checked by mypy and never run: a client, an application, a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import plugrl_protocol as wire


def robot(url: str) -> float:
    total = 0.0
    backoff = wire.Backoff(limit_s=60.0)
    with wire.EnvClient(url, api_key="key", backoff=backoff, library="picows") as client:
        horizon: int | None = client.metadata.positive("action_horizon")
        image: npt.NDArray[np.uint8] = np.zeros((1, 8, 8, 3), np.uint8)
        seen: wire.Observation = wire.make_observation(
            num_envs=1, images={"wrist": image}, states={"pose": np.zeros((1, 7))}, text="pick"
        )
        env = np.array([0], dtype=np.int64)
        try:
            action: wire.Action = client.infer(
                wire.Infer(env_indices=env, step_ids=env, observation=seen), timeout_s=30.0
            )
        except wire.ConnectionReplaced as lost:
            again: frozenset[int] = lost.must_reset
            return float(len(again) + (horizon or 0))
        except wire.ServerStopped as stopped:
            return float(stopped.close.code)
        total += float(action.action.sum())
        client.feedback(
            wire.Feedback(
                env_indices=env,
                step_ids=env,
                observation=seen,
                rewards=np.zeros(1, np.float32),
                terminated=np.zeros(1, np.bool_),
                truncated=np.zeros(1, np.bool_),
                info={"episode": {"r": np.zeros(1)}},
            )
        )
    return total


class Policy:
    def connected(self, connection: wire.Connection) -> None: ...

    def infer(self, connection: wire.Connection, request: wire.Infer) -> None:
        action: npt.NDArray[Any] = np.zeros((4, len(request.env_indices), 7), np.float32)
        connection.answer(action)

    def feedback(self, connection: wire.Connection, report: wire.Feedback) -> None:
        for episode in wire.read_episodes(report):
            value: float | None = episode.episode_return
            connection.records[episode.env_index].owner = value

    def disconnected(self, connection: wire.Connection, close: wire.Close) -> None: ...


async def serve() -> None:
    application: wire.Application = Policy()
    config = wire.EndpointConfig(
        listen=wire.ServerOptions(host="127.0.0.1", port=8000, api_key="key"),
        session=wire.SessionConfig(feedback_timeout_s=30.0),
    )
    metadata = wire.make_metadata(action_horizon=4, action_dim=7)
    async with wire.Endpoint(application, metadata=metadata, config=config) as endpoint:
        port: int = endpoint.port
        endpoint.suspend_feedback_clock()
        endpoint.resume_feedback_clock()
        await endpoint.stop(wire.CLOSE_STOP)
        del port
