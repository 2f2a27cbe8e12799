"""`LocalRows`: an environment of this process, stepped with chunks of actions from elsewhere.

What `RemoteEnvClient` needs of its environment: rows that are shown by name, chunks that are used
up, reports of what came of them. Knows nothing about the wire.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np

from rlightning.env.base_env import BaseEnv
from rlightning.errors import ContractError
from rlightning.types import PolicyResponse, map_leaves, to_numpy
from rlightning.utils.observation_form import ObservationWriter

if TYPE_CHECKING:
    from rlightning.types import EnvRet

__all__ = ["LocalRows", "Report"]

Array: TypeAlias = "np.ndarray[Any, Any]"


class Report(NamedTuple):
    """What became of the chunks that finished, m of them."""

    rows: Array
    step_ids: Array
    shown: dict[str, Any]
    rewards: Array
    terminated: Array
    truncated: Array
    info: dict[str, Any]
    steps: Array


class _Step(NamedTuple):
    """One step of every row, ``[N, ...]``; rows whose episode ended have begun the next."""

    observation: Any
    reward: Array
    terminated: Array
    truncated: Array
    final: Any


class _Env(Protocol):
    """An environment whose rows reset themselves."""

    rows: int
    observation_space: Any
    action_shape: tuple[int, ...]

    def reset(self, seed: int | None) -> Any:
        """Start all rows; return what they see, ``[N, ...]``."""

    def step(self, action: Array) -> _Step:
        """Act, ``[N, *A]``."""


class _Worker:
    """A `BaseEnv` as `_Env`."""

    def __init__(self, env: BaseEnv) -> None:
        self._env = env
        meta = env.init()
        self.rows = meta.num_envs or 1
        self.observation_space = meta.observation_space
        self.action_shape: tuple[int, ...] = meta.action_space.shape or ()

    def reset(self, seed: int | None) -> Any:
        seeded = {} if seed is None else {"seed": seed}
        return self._stacked(self._env._reset(**seeded).observation)

    def step(self, action: Array) -> _Step:
        chosen = action if self.rows > 1 else action[0]
        env_ret: EnvRet = self._env._step(PolicyResponse(self._env.env_id, action=chosen))
        ended = np.atleast_1d(np.logical_or(env_ret.last_terminated, env_ret.last_truncated))
        final = env_ret.info.get("final_obs")
        if ended.any() and final is None:
            raise ContractError(
                f"an episode of {self._env.env_id} ended and info has no final_obs: put its last "
                "observation there, and the row mask into info['_final_obs']"
            )
        return _Step(
            self._stacked(env_ret.observation),
            np.atleast_1d(to_numpy(env_ret.last_reward)),
            np.atleast_1d(to_numpy(env_ret.last_terminated)).astype(bool),
            np.atleast_1d(to_numpy(env_ret.last_truncated)).astype(bool),
            None if final is None else self._stacked(final),
        )

    def _stacked(self, observation: Any) -> Any:
        observation = to_numpy(observation)
        if self.rows > 1:
            return observation
        return map_leaves(lambda leaf: np.asarray(leaf)[None], observation)


class _Single:
    """A Gymnasium environment as `_Env` of one row."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self.rows = 1
        self.observation_space = env.observation_space
        self.action_shape: tuple[int, ...] = env.action_space.shape or ()
        self._is_discrete = not hasattr(env.action_space, "low") and not self.action_shape

    def reset(self, seed: int | None) -> Any:
        return _row(self._env.reset(seed=seed)[0])

    def step(self, action: Array) -> _Step:
        chosen = int(action[0]) if self._is_discrete else action[0]
        observation, reward, terminated, truncated, _ = self._env.step(chosen)
        final = _row(observation)
        over = bool(terminated or truncated)
        flags = np.array([bool(terminated)]), np.array([bool(truncated)])
        now = self.reset(None) if over else final
        return _Step(now, np.array([float(reward)]), *flags, final if over else None)


def _row(observation: Any) -> Any:
    return map_leaves(lambda leaf: np.asarray(leaf)[None], observation)


class LocalRows:
    """Chunks in flight, and what they earned.

    Args:
        env: a `BaseEnv`, or a Gymnasium environment.

    Attributes:
        step_ids: completed chunks of each row's episode, int64 ``[N]``.
    """

    def __init__(self, env: Any) -> None:
        self._source = env
        self._env: _Env = _Worker(env) if isinstance(env, BaseEnv) else _Single(env)
        self._write = ObservationWriter(self._env.observation_space)
        rows = self._env.rows
        self.step_ids = np.zeros(rows, np.int64)
        self._chunk: Array = np.zeros((0, rows))
        self._position = np.zeros(rows, np.int64)
        self._length = np.zeros(rows, np.int64)
        self._reward = np.zeros(rows, np.float64)
        self._return = np.zeros(rows, np.float64)
        self._steps = np.zeros(rows, np.int64)
        self._now: Any = None
        self._step: _Step | None = None

    @property
    def is_finished(self) -> bool:
        """Whether the environment has nothing left to do."""
        return isinstance(self._source, BaseEnv) and self._source.is_finish()

    def reset(self, seed: int | None) -> None:
        """Start all rows."""
        self._now = self._env.reset(seed)

    def without_chunk(self) -> Array:
        """Return the rows that have nothing to do."""
        return np.flatnonzero(self._length == 0)

    def show(self, rows: Array) -> dict[str, Any]:
        """Return what rows see, by name."""
        return self._write(map_leaves(lambda leaf: leaf[rows], self._now))

    def load(self, rows: Array, action: Array) -> None:
        """Give rows their chunks, ``[H, n, *A]``.

        Raises:
            ContractError: an action has another number of entries than the environment takes.
        """
        horizon, shape = len(action), self._env.action_shape
        if np.prod(action.shape[2:]) != np.prod(shape):
            raise ContractError(
                f"the trainer's actions have the shape {action.shape[2:]}, this environment takes "
                f"{shape}; is the policy built for another environment?"
            )
        if len(self._chunk) < horizon or self._chunk.dtype != action.dtype:
            before = self._chunk
            self._chunk = np.zeros((horizon, self._env.rows, *shape), action.dtype)
            if before.shape[2:] == self._chunk.shape[2:]:
                self._chunk[: len(before)] = before
        self._chunk[:horizon, rows] = action.reshape(horizon, len(rows), *shape)
        self._position[rows], self._reward[rows] = 0, 0.0
        self._length[rows] = horizon

    def step(self) -> bool:
        """Step every row once; tell whether chunks finished."""
        chosen = self._chunk[self._position, np.arange(self._env.rows)]
        self._step = step = self._env.step(chosen)
        self._now = step.observation
        self._position += 1
        self._steps += 1
        self._reward += step.reward
        self._return += step.reward
        over = step.terminated | step.truncated
        return bool((over | (self._position >= self._length)).any())

    def finish(self) -> Report:
        """Report the chunks that finished with the last step, and let go of them."""
        step = self._step
        assert step is not None  # `step` said that chunks finished
        over = step.terminated | step.truncated
        rows = np.flatnonzero(over | (self._position >= self._length))
        shown = map_leaves(np.copy, self._now)
        if over.any():
            _put(shown, over, step.final)
        episode = {"r": self._return[rows], "l": self._steps[rows]}
        report = Report(
            rows=rows,
            step_ids=self.step_ids[rows],
            shown=self._write(map_leaves(lambda leaf: leaf[rows], shown)),
            rewards=self._reward[rows].astype(np.float32),
            terminated=step.terminated[rows],
            truncated=step.truncated[rows],
            info={"episode": episode} if over.any() else {},
            steps=self._position[rows].copy(),
        )
        self._length[rows] = 0
        self.step_ids[rows] += 1
        self.step_ids[over] = 0
        self._return[over] = self._steps[over] = 0
        return report

    def drop(self) -> None:
        """Let go of every chunk without reporting it; episodes go on."""
        self._length[:] = 0


def _put(target: Any, mask: Array, values: Any) -> None:
    """Write the rows of `mask` into `target`, in place, containers included."""
    if isinstance(target, dict):
        for key, part in target.items():
            _put(part, mask, values[key])
    elif isinstance(target, tuple):
        for part, value in zip(target, values, strict=True):
            _put(part, mask, value)
    else:
        target[mask] = values[mask]
