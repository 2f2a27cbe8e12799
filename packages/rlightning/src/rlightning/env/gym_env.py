"""`GymEnv`: every simulator that `plugrl_envs` can make, as an environment worker.

This is where rlightning meets `plugrl_envs`; how rows are stepped, reset and given actions is
decided there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from pydantic import Field

import plugrl_envs
from plugrl_envs.spaces import row_of
from rlightning.config import Config
from rlightning.env.base_env import BaseEnv
from rlightning.errors import ConfigError, ContractError, EnvWorkerError
from rlightning.types import EnvRet

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlightning.config import EnvConfig
    from rlightning.types import PolicyResponse

__all__ = ["GymEnv"]


class GymEnv(BaseEnv):
    """A Gymnasium environment of one or more rows; ``task`` is its id.

    Args:
        config: the worker's section; ``env_kwargs`` go to the environment.
        worker_index: position among all environment workers of the run.
        preprocess_fn: from a policy's response to the action.

    Raises:
        ConfigError: the environment does not exist, its simulator is not installed, or it cannot
            be used; says what to do.
    """

    takes_arrays = True

    class Extras(Config):
        """Further configuration keys of this environment."""

        seed: int | None = Field(default=None, ge=0)
        """Base seed of these workers; unset takes one derived from ``train.seed``."""
        vectorization: plugrl_envs.Vectorization = "auto"
        """How rows are stepped: ``sync``, ``async`` (a process per row) or ``native``."""
        wrappers: list[str] = Field(default_factory=list)
        """Wrappers of each row: ``atari``, or ``"pkg.module:callable"``."""
        step_timeout_s: float = Field(default=60.0, gt=0)
        """With ``async``: how long the slowest row may take for one step, in seconds."""
        start_timeout_s: float = Field(default=120.0, gt=0)
        """With ``async``: how long making all rows may take, in seconds."""
        start_method: str | None = None
        """With ``async``: ``forkserver``, ``spawn`` or ``fork``."""
        keep_frames: bool = False
        """Render after every reset and step, for `take_frames`; with ``sync`` and one row."""

    def __init__(
        self,
        config: EnvConfig,
        worker_index: int | None = 0,
        preprocess_fn: Callable[[PolicyResponse], Any] | None = None,
    ) -> None:
        super().__init__(config, worker_index, preprocess_fn)
        self._tap: plugrl_envs.FrameTap | None = None
        extras = self.Extras.read(config)
        workers = plugrl_envs.WorkerOptions(
            step_timeout_s=extras.step_timeout_s,
            start_timeout_s=extras.start_timeout_s,
            start_method=extras.start_method,
        )
        try:
            self.env = plugrl_envs.make_vec(
                config.task,
                self.num_envs,
                vectorization=extras.vectorization,
                max_episode_steps=config.max_episode_steps,
                env_kwargs=config.env_kwargs.to_dict(),
                wrappers=[*extras.wrappers, *([self._tap_frames] if extras.keep_frames else [])],
                workers=workers,
            )
        except _CANNOT_BE_MADE as error:
            raise ConfigError(f"env {config.name!r} cannot be made: {error}") from error

    def get_observation_space(self) -> Any:
        """Return the observation space of one row."""
        return self.env.single_observation_space

    def get_action_space(self) -> Any:
        """Return the action space of one row, its Discrete values starting at 0."""
        return self.env.single_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> EnvRet:
        """Start episodes in all rows.

        Args:
            seed: this worker's seed, from which every row gets its own; None continues the
                random streams.
            options: handed to every environment.
        """
        seeds = None if seed is None else plugrl_envs.row_seeds(seed, self.num_envs)
        try:
            observation, info = self.env.reset(seed=seeds, options=options)
        except _ROW_ERRORS as error:
            raise _ours(error, self.label) from error
        no = np.zeros(self.num_envs, dtype=np.bool_)
        return self._env_ret(
            observation, np.zeros(self.num_envs, dtype=np.float32), no, no.copy(), info
        )

    def step(self, policy_resp: PolicyResponse) -> EnvRet:
        """Step every row with the action of `policy_resp`, ``[N, *A]``; for one row also ``[*A]``.

        Raises:
            ContractError: the action does not fit the action space.
            EnvWorkerError: a row raised, hung or died.
        """
        action = self._preprocess_fn(policy_resp)
        try:
            observation, reward, terminated, truncated, info = self.env.step(action)
        except _ROW_ERRORS as error:
            raise _ours(error, self.label) from error
        return self._env_ret(observation, reward.astype(np.float32), terminated, truncated, info)

    def _env_ret(
        self, observation: Any, reward: Any, terminated: Any, truncated: Any, info: dict[str, Any]
    ) -> EnvRet:
        if self.num_envs == 1:
            observation = row_of(observation, 0)
            reward, terminated, truncated = reward[0], terminated[0], truncated[0]
            info = _only_row(info)
        return EnvRet(self.env_id, observation, reward, terminated, truncated, info)

    def get_state(self) -> dict[str, Any] | None:
        """Return plain data that continues all episodes bit for bit, or None if that cannot be."""
        state = plugrl_envs.get_state(self.env)
        if state is None:
            return None
        return {"env": state, "statistics": self._statistics.state_dict()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned from a worker with the same configuration."""
        plugrl_envs.set_state(self.env, state["env"])
        self._statistics.load_state_dict(state["statistics"])

    def _tap_frames(self, env: Any) -> Any:
        self._tap = plugrl_envs.FrameTap(env)
        return self._tap

    def take_frames(self) -> list[np.ndarray[Any, Any]]:
        """Return the frames since the last call; needs ``keep_frames: true``."""
        if self._tap is None:
            raise ConfigError(f"env {self.config.name!r} keeps no frames; set keep_frames: true")
        return self._tap.take()

    def get_render_fps(self) -> float:
        """Return what the simulator says, else 30."""
        return float(self.env.metadata.get("render_fps", 30.0))

    def close(self) -> None:
        """Close all rows and end their processes."""
        self.env.close()


_CANNOT_BE_MADE = (
    plugrl_envs.PlugrlEnvsError,
    gym.error.Error,
    ImportError,  # of a package that the environment needs
    ValueError,
    TypeError,
)
_ROW_ERRORS = (plugrl_envs.InvalidActionError, plugrl_envs.EnvWorkerError)


def _ours(error: Exception, label: str) -> Exception:
    """Return our error for one of `_ROW_ERRORS`, with the worker's name."""
    wrong_action = isinstance(error, plugrl_envs.InvalidActionError)
    return (ContractError if wrong_action else EnvWorkerError)(f"{label}: {error}")


def _only_row(info: dict[str, Any]) -> dict[str, Any]:
    """Return the info of a vector environment of one row without the row axis."""
    return {
        key: _only_row(value)
        if isinstance(value, dict) and key != "final_obs"
        else row_of(value, 0)
        if isinstance(value, (np.ndarray, dict, tuple))
        else value
        for key, value in info.items()
    }
