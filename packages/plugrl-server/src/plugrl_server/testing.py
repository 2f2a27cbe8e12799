"""For whoever writes a policy or an algorithm: checks of their contracts, runs without a server.

`check_policy` asks what the guide promises. `IdentityTask` is solved in seconds by whatever can
learn at all, and `train_in_process` runs an algorithm on it (or on anything like it), without
sockets and threads. `serve` runs the whole server beside blocking code; `TaskClient` plays a task
against it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np

from plugrl_protocol.env_client import Backoff, EnvClient
from plugrl_protocol.errors import ConnectionReplaced, ServerStopped
from plugrl_protocol.messages import Feedback, Infer, parse_observation
from plugrl_server.algorithm.base_algorithm import FrameBatch, Sampled
from plugrl_server.common.layout import check_layout, layout_of
from plugrl_server.common.trees import leaves
from plugrl_server.errors import PolicyContractError
from plugrl_server.policy.registration import REGISTERED_POLICY_CONFIGS, make_policy
from plugrl_server.policy.state import slice_batched_state, to_numpy_state
from plugrl_server.server.websocket_agent_server import WebSocketAgentServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from plugrl_server.algorithm.base_algorithm import BaseAlgorithm
    from plugrl_server.policy.base_policy import BasePolicy
    from plugrl_server.server.trainer import Ending

__all__ = [
    "IdentityTask",
    "PolicyClient",
    "RunningServer",
    "Task",
    "TaskClient",
    "check_policy",
    "serve",
    "serve_policy",
    "train_in_process",
]

_START_TIMEOUT_S = 30.0

Array = np.ndarray[Any, Any]


def check_policy(policy: BasePolicy, observation: Callable[[int], dict[str, Any]]) -> None:
    """Check a policy against its contract, with batches of one to three rows.

    Args:
        policy: under test.
        observation: gives a batched observation of so many rows.

    Raises:
        PolicyContractError: a promise is broken; the message says which.
    """
    name = type(policy).__name__
    per_row: tuple[int, ...] | None = None
    for rows in (1, 2, 3):
        action, state = policy.get_action_and_runtime_state(observation(rows))
        action = to_numpy_state(action)
        if action.ndim < 2 or action.shape[0] != rows:
            raise PolicyContractError(
                f"{name} gives an action of shape {action.shape} for {rows} rows; expected "
                "[n, H, ...]: batch first, then the horizon"
            )
        per_row = per_row or action.shape[1:]
        if action.shape[1:] != per_row:
            raise PolicyContractError(
                f"{name} gives actions of shape {per_row} per row and of shape {action.shape[1:]} "
                "in another batch; keep the action's shape stable"
            )
        _check_state(name, state, policy.fake_runtime_state(rows), rows)
    horizon = getattr(policy, "action_horizon", None)
    if per_row is not None and isinstance(horizon, int) and horizon != per_row[0]:
        raise PolicyContractError(
            f"{name} sets action_horizon to {horizon} and gives {per_row[0]} steps per chunk"
        )


def _check_state(name: str, state: Any, fake: Any, rows: int) -> None:
    if (state is None) != (fake is None):
        raise PolicyContractError(
            f"{name} returns a runtime state of {type(state).__name__}; fake_runtime_state gives "
            f"{type(fake).__name__}"
        )
    if state is None:
        return
    for path, leaf in leaves(state):
        if len(leaf) != rows:
            raise PolicyContractError(
                f"the runtime state of {name} has {len(leaf)} rows in {'.'.join(path)}, expected "
                f"{rows}: the server cuts it per environment"
            )
    for row in range(rows):
        slice_batched_state(state, row)
    what = f"the runtime state of {name}"
    check_layout(what, to_numpy_state(state), layout_of(to_numpy_state(fake)))


class Task(Protocol):
    """A batch of environments that reset themselves, for `train_in_process`."""

    def observe(self) -> dict[str, Any]:
        """Give the current observation of every environment, batched."""

    def step(self, action: Array) -> tuple[dict[str, Any], Array, Array, Array]:
        """Step every environment.

        Args:
            action: ``[n, *A]``.

        Returns:
            What followed (an ended episode's own last observation), rewards float32 ``[n]``,
            terminated and truncated bool ``[n]``.
        """


@final
class IdentityTask:
    """Repeat what you see: the reward is highest for the action that equals the observation.

    Args:
        num_envs: n.
        discrete: observations are one-hot and actions indices; otherwise both are in [-1, 1].
        size: number of actions, or width of observation and action.
        length: steps per episode; odd environments are truncated there, even ones terminated.
        seed: of the observations.
    """

    def __init__(
        self, num_envs: int, *, discrete: bool, size: int = 2, length: int = 10, seed: int = 0
    ) -> None:
        self.num_envs, self.discrete, self.size, self.length = num_envs, discrete, size, length
        self._rng = np.random.default_rng(seed)
        self._steps = np.zeros(num_envs, np.int64)
        self._draw()

    def _draw(self) -> None:
        if self.discrete:
            self._goal = self._rng.integers(self.size, size=self.num_envs)
            self._seen = np.eye(self.size, dtype=np.float32)[self._goal]
        else:
            shape = (self.num_envs, self.size)
            self._seen = self._goal = self._rng.uniform(-1, 1, shape).astype(np.float32)

    def observe(self) -> dict[str, Any]:
        """See `Task.observe`."""
        text = np.full(self.num_envs, "")
        return {"images": {}, "states": {"obs": self._seen}, "text": text}

    def step(self, action: Array) -> tuple[dict[str, Any], Array, Array, Array]:
        """See `Task.step`."""
        if self.discrete:
            reward = (action == self._goal).astype(np.float32)
        else:
            reward = 1.0 - np.abs(action - self._goal).mean(1, dtype=np.float32)
        self._steps += 1
        ended = self._steps >= self.length
        self._steps[ended] = 0
        self._draw()
        even = np.arange(self.num_envs) % 2 == 0
        return self.observe(), reward, ended & even, ended & ~even


def train_in_process(algorithm: BaseAlgorithm, task: Task) -> list[float]:
    """Run an algorithm to its end, one action per inference.

    Args:
        algorithm: constructed, with its optimizers.
        task: the environments.

    Returns:
        The mean reward of every round, in order.
    """
    rewards: list[float] = []
    obs = task.observe()
    rows = len(obs["text"])
    was_terminated = was_truncated = np.zeros(rows, np.bool_)
    while not algorithm.should_stop():
        action, runtime_state = algorithm.infer(obs)
        next_obs, reward, terminated, truncated = task.step(action[:, 0])
        algorithm.feedback_batch(
            FrameBatch(
                chains=np.arange(rows),
                sampled=Sampled(obs, runtime_state, algorithm.derive_train_state),
                was_terminated=was_terminated,
                was_truncated=was_truncated,
                next_obs=next_obs,
                rewards=reward,
                steps=np.ones(rows, np.int64),
                terminated=terminated,
                truncated=truncated,
                info={},
            )
        )
        obs, was_terminated, was_truncated = task.observe(), terminated, truncated
        rewards.append(float(reward.mean()))
        if algorithm.should_learn():
            algorithm.pre_learn()
            algorithm.learn()
            algorithm.post_learn()
    return rewards


# ---------------------------------------------------------------------------------- a live server


@dataclasses.dataclass
class RunningServer:
    """A server that runs in a thread; made by `serve`."""

    server: WebSocketAgentServer
    thread: threading.Thread
    url: str
    ending: list[Ending | BaseException]
    """How the run ended, once it has: one entry."""

    def wait_until_alone(self) -> None:
        """Wait until all that clients sent before they closed has arrived.

        Raises:
            TimeoutError: a client is still connected.
        """
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while self.server.trainer.metrics.connections and not self.ending:
            if time.monotonic() > deadline_s:
                raise TimeoutError("a client is still connected")
            time.sleep(0.002)

    def stop(self) -> None:
        """Stop as a signal does, and wait for the end."""
        self.server.request_stop()
        self.join()

    def join(self, timeout_s: float = _START_TIMEOUT_S) -> None:
        """Wait for the end.

        Raises:
            TimeoutError: it does not come.
        """
        self.thread.join(timeout_s)
        if self.thread.is_alive():
            raise TimeoutError("the server does not end")


@contextlib.contextmanager
def serve(algorithm: BaseAlgorithm, **options: Any) -> Iterator[RunningServer]:
    """Run a server in a thread until the block ends.

    Args:
        algorithm: constructed; optimizers included.
        **options: of `WebSocketAgentServer`.

    Raises:
        TimeoutError: it does not begin to listen.
    """
    listening = threading.Event()
    quiet = {"show_metric_table": False, "show_progress_bar": False, "port": 0}
    server = WebSocketAgentServer(
        algorithm, on_listening=lambda _: listening.set(), **{**quiet, **options}
    )
    ending: list[Ending | BaseException] = []

    def run() -> None:
        try:
            ending.append(server.serve_forever())
        except BaseException as error:  # noqa: BLE001  # a thread's border: kept for the test
            ending.append(error)
            listening.set()

    thread = threading.Thread(target=run, name="plugrl-server", daemon=True)
    thread.start()
    if not listening.wait(_START_TIMEOUT_S):
        raise TimeoutError("the server does not begin to listen")
    running = RunningServer(server, thread, f"ws://127.0.0.1:{server.port}", ending)
    try:
        yield running
    finally:
        running.stop()


@final
class PolicyClient:
    """Asks a served policy for actions; made by `serve_policy`."""

    def __init__(self, client: EnvClient) -> None:
        self._client = client
        self._steps = 0

    @property
    def metadata(self) -> dict[str, Any]:
        """What the server said about itself."""
        return dict(self._client.metadata.values)

    def infer(self, observation: dict[str, Any]) -> Array:
        """Ask for the actions of one batch, and report that nothing came of it.

        Returns:
            ``[H, n, *A]``, time first.
        """
        n = len(observation["text"])
        seen = parse_observation(observation, n)
        ids, steps = np.arange(n), np.full(n, self._steps)
        request = Infer(env_indices=ids, step_ids=steps, observation=seen)
        reply = self._client.infer(request, timeout_s=_START_TIMEOUT_S)
        self._steps += 1
        self._client.feedback(
            Feedback(
                env_indices=ids,
                step_ids=steps,
                observation=seen,
                rewards=np.zeros(n, np.float32),
                terminated=np.zeros(n, np.bool_),
                truncated=np.zeros(n, np.bool_),
                steps=np.full(n, len(reply.action)),
            )
        )
        return reply.action


@contextlib.contextmanager
def serve_policy(uid: str, variant: str = "default") -> Iterator[PolicyClient]:
    """Serve a registered policy without learning, and connect to it."""
    from plugrl_server.algorithm.eval.eval_algorithm import EvalAlgorithm
    from plugrl_server.algorithm.eval.eval_config import EvalConfig

    policy = make_policy(uid, REGISTERED_POLICY_CONFIGS[uid][variant])
    with serve(EvalAlgorithm(EvalConfig(), policy)) as running, EnvClient(running.url) as client:
        yield PolicyClient(client)


@final
class TaskClient:
    """Plays a task against a server, one action per inference.

    Args:
        url: of the server.
        task: the environments.
        reuse: leave out observations that the server has.

    Attributes:
        frames_sent: frames reported so far, over all connections.
        episodes: finished so far.
        rewards: the mean reward of every round.
    """

    def __init__(self, url: str, task: Task, *, reuse: bool = True) -> None:
        self.client = EnvClient(url, reuse=reuse, backoff=Backoff(first_s=0.05, limit_s=20.0))
        self.task = task
        self.frames_sent = 0
        self.episodes = 0
        self.rewards: list[float] = []
        n = len(task.observe()["text"])
        self._ids = np.arange(n)
        self._step_ids = np.zeros(n, np.int64)
        self._returns = np.zeros(n, np.float32)

    def play(self, rounds: int | None = None) -> bool:
        """Play so many rounds, or until the run is finished; True if it is."""
        done = 0
        while rounds is None or done < rounds:
            try:
                self.play_round()
            except ServerStopped:
                return True
            except ConnectionReplaced:
                continue
            done += 1
        return False

    def play_round(self) -> None:
        """Ask, step, report.

        Raises:
            ClosedError: the connection ended.
        """
        n = len(self._ids)
        request = Infer(
            env_indices=self._ids,
            step_ids=self._step_ids.copy(),
            observation=parse_observation(self.task.observe(), n),
        )
        reply = self.client.infer(request, timeout_s=_START_TIMEOUT_S)
        next_obs, reward, terminated, truncated = self.task.step(reply.action[0])
        ended = terminated | truncated
        self._returns += reward
        self._step_ids += 1
        episode = {"r": self._returns.copy(), "l": self._step_ids.copy(), "s": terminated}
        report = Feedback(
            env_indices=self._ids,
            step_ids=request.step_ids,
            observation=parse_observation(next_obs, n),
            rewards=reward,
            terminated=terminated,
            truncated=truncated,
            info={"episode": episode} if ended.any() else {},
            steps=np.ones(n, np.int64),
        )
        self._step_ids[ended], self._returns[ended] = 0, 0.0
        self.rewards.append(float(reward.mean()))
        self.client.feedback(report)
        self.frames_sent += n
        self.episodes += int(ended.sum())

    def close(self) -> None:
        """End the connection."""
        self.client.close()
