"""For whoever writes an environment: a check of its contract, and an agent that needs no server.

`check_env` steps an environment as the client does and names what breaks the contract.
`NotingAgent` answers with a function and remembers everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from gymnasium.vector import AutoresetMode

from plugrl_env_client.agent.base_agent import BaseAgent
from plugrl_env_client.envs.base_env import Observation
from plugrl_env_client.errors import EnvContractError

if TYPE_CHECKING:
    import gymnasium as gym
    import numpy.typing as npt

__all__ = ["NotingAgent", "Report", "check_env"]

ActFunction: TypeAlias = Callable[[Observation, "npt.NDArray[np.int64]"], Any]
Report: TypeAlias = dict[str, Any]
"""The arguments of one ``feedback``, by name."""


class NotingAgent(BaseAgent):
    """Answers each `infer` with a function of it, and remembers everything.

    Args:
        act: gives ``[H, n, *A]`` for an observation of n rows and their indices ``[n]``.
        metadata: what `get_server_metadata` returns.

    Attributes:
        requests: ``(observation, env_indices, step_ids)`` of every `infer`.
        reports: the arguments of every `feedback`.
    """

    def __init__(self, act: ActFunction, metadata: dict[str, Any] | None = None) -> None:
        self.act = act
        self.metadata = metadata or {}
        self.requests: list[tuple[Observation, Any, Any]] = []
        self.reports: list[Report] = []

    def get_server_metadata(self) -> dict[str, Any]:
        """See `BaseAgent.get_server_metadata`."""
        return self.metadata

    def infer(
        self,
        obs: Observation,
        *,
        env_indices: npt.NDArray[np.int64],
        step_ids: npt.NDArray[np.int64],
    ) -> dict[str, Any]:
        """See `BaseAgent.infer`."""
        self.requests.append((obs.rows(np.arange(len(obs))), env_indices.copy(), step_ids.copy()))
        return {"env_ids": env_indices, "action": np.asarray(self.act(obs, env_indices))}

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
        """See `BaseAgent.feedback`."""
        self.reports.append(
            {
                "obs": obs.rows(np.arange(len(obs))),
                "rewards": rewards.copy(),
                "terminated": terminated.copy(),
                "truncated": truncated.copy(),
                "info": info,
                "env_indices": env_indices.copy(),
                "step_ids": step_ids.copy(),
                "steps": None if steps is None else steps.copy(),
            }
        )

    def reset(self) -> None:
        """Nothing to forget: the notes stay."""


def check_env(env: gym.vector.VectorEnv[Any, Any, Any], *, steps: int = 200, seed: int = 0) -> None:
    """Step an environment as the client does, and refuse what breaks the contract of `BaseEnv`.

    Args:
        env: a `BaseEnv`, wrapped or not, or what `make_vec` returns.
        steps: how long; more than an episode shows more.
        seed: of the first reset.

    Raises:
        EnvContractError: says what was found and what was expected.
    """
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise EnvContractError(f"metadata['autoreset_mode'] is {mode!r}; expected an AutoresetMode")
    first, _ = env.reset(seed=seed)
    _check_observation(first, env.num_envs, None)
    again, _ = env.reset(seed=seed)
    _check_same(first, again, "two resets with one seed show different observations")
    env.single_action_space.seed(seed)
    for _ in range(steps):
        actions = np.stack([env.single_action_space.sample() for _ in range(env.num_envs)])
        obs, rewards, terminated, truncated, info = env.step(actions)
        _check_observation(obs, env.num_envs, first)
        _check_column("rewards", rewards, env.num_envs, "f")
        _check_column("terminated", terminated, env.num_envs, "b")
        _check_column("truncated", truncated, env.num_envs, "b")
        done = np.asarray(terminated) | np.asarray(truncated)
        if done.any() and mode is AutoresetMode.SAME_STEP:
            _check_final(info, done, first)
        elif done.any():
            _check_partial_reset(env, obs, np.flatnonzero(done))


def _check_observation(obs: Any, num_envs: int, first: Observation | None) -> None:
    if not isinstance(obs, Observation) or len(obs) != num_envs:
        raise EnvContractError(f"found {obs!r}; expected an Observation of {num_envs} rows")
    for name, image in obs.images.items():
        if image.dtype != np.uint8 or image.ndim != 4:
            raise EnvContractError(
                f"image {name!r} is {image.dtype} {image.shape}; expected uint8 [n, h, w, c]"
            )
    for name, state in obs.states.items():
        if state.dtype.kind not in "fiu" or state.ndim != 2:
            raise EnvContractError(
                f"state {name!r} is {state.dtype} {state.shape}; expected numbers [n, d]"
            )
        if not np.isfinite(state).all():
            raise EnvContractError(f"state {name!r} holds a NaN or an infinity")
    if first is not None and _layout(obs) != _layout(first):
        raise EnvContractError(f"a step shows {obs}; the first reset showed {first}")


def _layout(obs: Observation) -> dict[str, Any]:
    named = {**{f"images.{k}": v for k, v in obs.images.items()},
             **{f"states.{k}": v for k, v in obs.states.items()}}  # fmt: skip
    return {name: (array.dtype, array.shape[1:]) for name, array in named.items()}


def _check_same(one: Observation, other: Observation, complaint: str) -> None:
    if _layout(one) != _layout(other) or not (one.text == other.text).all():
        raise EnvContractError(f"{complaint}: {one} and {other}")
    for group in ("images", "states"):
        for name, array in getattr(one, group).items():
            if not np.array_equal(array, getattr(other, group)[name]):
                raise EnvContractError(f"{complaint}: {group}[{name!r}] differs")


def _check_column(name: str, column: Any, num_envs: int, kind: str) -> None:
    array = np.asarray(column)
    if array.dtype.kind != kind or array.shape != (num_envs,):
        expected = "floats" if kind == "f" else "bools"
        raise EnvContractError(
            f"{name} is {array.dtype} {array.shape}; expected {expected} of shape ({num_envs},)"
        )
    if kind == "f" and not np.isfinite(array).all():
        raise EnvContractError(f"{name} holds a NaN or an infinity")


def _check_final(info: dict[str, Any], done: npt.NDArray[np.bool_], first: Observation) -> None:
    final, mask = info.get("final_obs"), info.get("_final_obs")
    if final is None or mask is None or not np.array_equal(np.asarray(mask), done):
        raise EnvContractError(
            f"rows {np.flatnonzero(done).tolist()} ended; expected info['final_obs'] and the mask "
            f"info['_final_obs'] of these rows, found {mask!r}"
        )
    _check_observation(final, len(done), first)


def _check_partial_reset(
    env: gym.vector.VectorEnv[Any, Any, Any], obs: Observation, rows: npt.NDArray[np.int64]
) -> None:
    shown, _ = env.reset(options={"reset_indices": rows})
    if not isinstance(shown, Observation) or len(shown) not in (len(rows), len(obs)):
        raise EnvContractError(
            f"a reset of rows {rows.tolist()} shows {shown!r}; expected these rows, or all"
        )
    others = np.setdiff1d(np.arange(len(obs)), rows)
    if len(shown) == len(obs) and len(others):
        complaint = f"a reset of rows {rows.tolist()} changed other rows"
        _check_same(obs.rows(others), shown.rows(others), complaint)
