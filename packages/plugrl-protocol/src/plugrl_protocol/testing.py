"""Fakes for whoever builds on the wire: a probe environment, a policy that keeps notes, a pipe.

``ProbeEnv`` is ``probe-v1`` of the wire page. ``play`` is the smallest honest rollout: chunks,
re-planning, resets, lost connections. ``NotingApplication`` answers every infer with a function and
remembers what came. ``serve_in_thread`` runs an endpoint beside blocking code; ``Pipe`` joins a
client and a server session without any I/O.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from plugrl_protocol.client_session import ClientSession
from plugrl_protocol.endpoint import Connection, Endpoint, EndpointConfig
from plugrl_protocol.errors import Close, ConnectionReplaced
from plugrl_protocol.messages import (
    Action,
    Feedback,
    Infer,
    Metadata,
    Observation,
    make_metadata,
    make_observation,
)
from plugrl_protocol.server_session import ServerSession

if TYPE_CHECKING:
    import numpy.typing as npt

    from plugrl_protocol.env_client import EnvClient
    from plugrl_protocol.templates import Array

_START_TIMEOUT_S = 10.0

ActionFunction: TypeAlias = Callable[[Infer], Any]


def probe_action(request: Infer, *, horizon: int = 4, action_dim: int = 3) -> Array:
    """Give the action of the page's checker: ``10000*k + 10*j + d``, with j the env index.

    Returns:
        float64 ``[H, n, action_dim]``; k is the horizon step, d the dimension.
    """
    k = np.arange(horizon, dtype=np.float64)[:, None, None]
    j = request.env_indices.astype(np.float64)[None, :, None]
    d = np.arange(action_dim, dtype=np.float64)[None, None, :]
    action: Array = 10_000 * k + 10 * j + d
    return action


class ProbeEnv:
    """The probe environment ``probe-v1``: n envs whose whole history can be read from a state.

    Args:
        num_envs: n; env i's episodes last ``3 + 2 * (i mod 3)`` steps.
        action_dim: d.
    """

    def __init__(self, num_envs: int, *, action_dim: int = 3) -> None:
        self.num_envs = num_envs
        self.lengths_steps = 3 + 2 * (np.arange(num_envs) % 3)
        self._steps = np.zeros(num_envs)
        self._last_action = np.zeros((num_envs, action_dim))

    def reset(self, envs: npt.NDArray[np.int64] | None = None) -> Observation:
        """Begin new episodes in some envs (None: all) and observe all of them."""
        chosen = slice(None) if envs is None else envs
        self._steps[chosen] = 0.0
        self._last_action[chosen] = 0.0
        return self.observe()

    def observe(self) -> Observation:
        """Observe: states ``t`` float64 ``[n, 1]`` and ``a`` float64 ``[n, d]``."""
        states = {"t": self._steps[:, None].copy(), "a": self._last_action.copy()}
        return make_observation(num_envs=self.num_envs, states=states)

    def step(self, action: Array) -> tuple[Observation, Array, npt.NDArray[np.bool_]]:
        """Step every env.

        Args:
            action: ``[n, d]``.

        Returns:
            Observation, rewards ``[n]`` (always 1) and terminated ``[n]``; nothing truncates.
        """
        self._steps += 1.0
        self._last_action[:] = action
        return self.observe(), np.ones(self.num_envs), self._steps >= self.lengths_steps


@dataclass(slots=True)
class PlayResult:
    """What a `play` did."""

    episodes: int = 0
    env_steps: int = 0
    infers: int = 0
    replaced: int = 0
    """Connections that were lost on the way."""


class _Plan:
    """The chunks in flight, one per env."""

    def __init__(self, num_envs: int) -> None:
        self.chunk: list[Array | None] = [None] * num_envs
        self.position = np.zeros(num_envs, np.int64)
        self.reward = np.zeros(num_envs, np.float32)
        self.step_ids = np.zeros(num_envs, np.int64)
        self.episode_return = np.zeros(num_envs)
        self.episode_steps = np.zeros(num_envs, np.int64)

    def without_chunk(self) -> npt.NDArray[np.int64]:
        return np.array([i for i, chunk in enumerate(self.chunk) if chunk is None], np.int64)

    def drop(self) -> None:
        self.chunk = [None] * len(self.chunk)
        self.reset_chunks(np.arange(len(self.chunk)))

    def reset_chunks(self, envs: npt.NDArray[np.int64]) -> None:
        self.position[envs] = 0
        self.reward[envs] = 0.0

    def begin_episodes(self, envs: npt.NDArray[np.int64]) -> None:
        self.step_ids[envs] = 0
        self.episode_return[envs] = 0.0
        self.episode_steps[envs] = 0


def play(
    client: EnvClient, env: ProbeEnv, *, episodes: int, replan_steps: int | None = None
) -> PlayResult:
    """Roll out until enough episodes have ended.

    Args:
        client: talks to the server; connects when needed.
        env: steps every env at once.
        episodes: how many, over all envs.
        replan_steps: use at most this prefix of each chunk; None uses all of it.

    Returns:
        Counts.

    Raises:
        ServerStopped: and every other end that a client cannot mend.
    """
    result, plan = PlayResult(), _Plan(env.num_envs)
    observation = env.reset()
    while result.episodes < episodes:
        try:
            observation = _advance(client, env, plan, observation, result, replan_steps)
        except ConnectionReplaced as lost:
            result.replaced += 1
            plan.drop()
            again = np.array(sorted(lost.must_reset), np.int64)
            plan.begin_episodes(again)
            observation = env.reset(again)
    return result


def _advance(
    client: EnvClient,
    env: ProbeEnv,
    plan: _Plan,
    observation: Observation,
    result: PlayResult,
    replan_steps: int | None,
) -> Observation:
    """Ask for the envs without a chunk, then step until some chunk ends, then report."""
    asking = plan.without_chunk()
    reply = client.infer(
        Infer(
            env_indices=asking,
            step_ids=plan.step_ids[asking],
            observation=observation.rows(asking),
        )
    )
    result.infers += 1
    for column, env_index in enumerate(asking.tolist()):
        plan.chunk[env_index] = reply.action[:replan_steps, column]
    plan.reset_chunks(asking)
    while True:
        observation, done, finished = _step(env, plan)
        result.env_steps += env.num_envs
        if len(finished):
            break
    episode = {"r": plan.episode_return, "l": plan.episode_steps, "s": done}
    report = Feedback(
        env_indices=finished,
        step_ids=plan.step_ids[finished],
        observation=observation.rows(finished),
        rewards=plan.reward[finished],
        terminated=done[finished],
        truncated=np.zeros(len(finished), np.bool_),
        info={"episode": {key: column[finished] for key, column in episode.items()}},
        steps=plan.position[finished],
    )
    client.feedback(report)
    for env_index in finished.tolist():
        plan.chunk[env_index] = None
    plan.step_ids[finished] += 1
    ended = np.flatnonzero(done)
    plan.begin_episodes(ended)
    result.episodes += len(ended)
    return env.reset(ended) if len(ended) else observation


def _step(
    env: ProbeEnv, plan: _Plan
) -> tuple[Observation, npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Step once; tell whose episode ended and whose chunk ran out (an end flushes it early)."""
    chunks = [chunk for chunk in plan.chunk if chunk is not None]
    action = np.stack([chunk[at] for chunk, at in zip(chunks, plan.position, strict=True)])
    observation, rewards, done = env.step(action)
    plan.position += 1
    plan.reward += rewards.astype(np.float32)
    plan.episode_return += rewards
    plan.episode_steps += 1
    used_up = plan.position >= [len(chunk) for chunk in chunks]
    return observation, done, np.flatnonzero(used_up | done)


@dataclass
class NotingApplication:
    """Answer each infer at once with a function of it, and remember everything.

    Attributes:
        act: gives ``[H, n, ...]``; None leaves infers open, to be answered by the test.
        requests: ``(connection, infer)`` in the order of arrival; likewise ``reports``, ``closes``.
    """

    act: ActionFunction | None = probe_action
    requests: list[tuple[Connection, Infer]] = field(default_factory=list)
    reports: list[tuple[Connection, Feedback]] = field(default_factory=list)
    closes: list[tuple[Connection, Close]] = field(default_factory=list)
    clients: list[Connection] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._changed = threading.Condition()

    def wait_for(
        self, condition: Callable[[NotingApplication], object], timeout_s: float = 10.0
    ) -> None:
        """Wait in another thread until a condition on the notes holds.

        Raises:
            TimeoutError: it never did.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: condition(self), timeout_s):
                raise TimeoutError("the condition on the notes never held")

    def connected(self, connection: Connection) -> None:
        """See `Application.connected`."""
        self._note(self.clients, connection)

    def infer(self, connection: Connection, request: Infer) -> None:
        """See `Application.infer`."""
        self._note(self.requests, (connection, request))
        if self.act is not None:
            connection.answer(self.act(request))

    def feedback(self, connection: Connection, report: Feedback) -> None:
        """See `Application.feedback`."""
        self._note(self.reports, (connection, report))

    def disconnected(self, connection: Connection, close: Close) -> None:
        """See `Application.disconnected`."""
        self._note(self.closes, (connection, close))

    def _note(self, notes: list[Any], entry: object) -> None:
        with self._changed:
            notes.append(entry)
            self._changed.notify_all()


class ServerThread:
    """An endpoint that runs beside blocking code; made by `serve_in_thread`."""

    def __init__(self, endpoint: Endpoint, loop: asyncio.AbstractEventLoop) -> None:
        self.endpoint = endpoint
        self.loop = loop
        scheme = "ws" if endpoint.config.listen.ssl_context is None else "wss"
        self.url = f"{scheme}://{endpoint.config.listen.host}:{endpoint.port}"

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the event loop and give its result."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(_START_TIMEOUT_S)

    def stop(self, close: Close) -> None:
        """Stop the endpoint with a close frame of one's own."""
        stopping = self.endpoint.stop(close)
        asyncio.run_coroutine_threadsafe(stopping, self.loop).result(_START_TIMEOUT_S)


@contextmanager
def serve_in_thread(
    application: Any,
    *,
    metadata: Metadata | None = None,
    config: EndpointConfig | None = None,
) -> Iterator[ServerThread]:
    """Run an endpoint in a thread of its own until the block ends."""
    endpoint = Endpoint(application, metadata=metadata, config=config)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="plugrl-endpoint", daemon=True)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(endpoint.start(), loop).result(_START_TIMEOUT_S)
        yield ServerThread(endpoint, loop)
    finally:
        asyncio.run_coroutine_threadsafe(endpoint.stop(), loop).result(_START_TIMEOUT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


class Pipe:
    """A client and a server session joined without I/O.

    Args:
        act: answers each infer.
        metadata: of the server.
    """

    def __init__(
        self, act: ActionFunction = probe_action, *, metadata: Metadata | None = None
    ) -> None:
        self.client = ClientSession()
        self.server = ServerSession(metadata=metadata or make_metadata())
        self.act = act
        self.client.receive(self.server.open())

    def infer(self, request: Infer) -> Action:
        """Ask through both sessions."""
        seen = self.server.receive(self.client.infer(request))
        if not isinstance(seen, Infer):
            raise TypeError("the server session took an infer for a feedback")
        reply = self.client.receive(self.server.answer(self.act(seen), now_s=0.0))
        if not isinstance(reply, Action):
            raise TypeError("the client session took an action for metadata")
        return reply

    def feedback(self, report: Feedback) -> Feedback:
        """Report through both sessions; gives what the server read."""
        seen = self.server.receive(self.client.feedback(report))
        if not isinstance(seen, Feedback):
            raise TypeError("the server session took a feedback for an infer")
        return seen
