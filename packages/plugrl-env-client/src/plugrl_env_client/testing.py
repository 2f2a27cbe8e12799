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
from plugrl_env_client.utils.contract import ContractWrapper

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
    env = ContractWrapper(env)
    first, _ = env.reset(seed=seed)
    _check_finite(first)
    again, _ = env.reset(seed=seed)
    _check_same(first, again, "two resets with one seed show different observations")
    env.single_action_space.seed(seed)
    for _ in range(steps):
        actions = np.stack([env.single_action_space.sample() for _ in range(env.num_envs)])
        obs, _, terminated, truncated, _ = env.step(actions)
        _check_finite(obs)
        ended = np.flatnonzero(terminated | truncated)
        if len(ended) and mode is not AutoresetMode.SAME_STEP:
            _check_partial_reset(env, obs, ended)


def _check_finite(obs: Observation) -> None:
    for name, state in obs.states.items():
        if not np.isfinite(state).all():
            raise EnvContractError(f"state {name!r} holds a NaN or an infinity")


def _check_same(one: Observation, other: Observation, complaint: str) -> None:
    if not (one.text == other.text).all():
        raise EnvContractError(f"{complaint}: {one} and {other}")
    for group in ("images", "states"):
        for name, array in getattr(one, group).items():
            if not np.array_equal(array, getattr(other, group)[name]):
                raise EnvContractError(f"{complaint}: {group}[{name!r}] differs")


def _check_partial_reset(
    env: gym.vector.VectorEnv[Any, Any, Any], obs: Observation, rows: npt.NDArray[np.int64]
) -> None:
    shown, _ = env.reset(options={"reset_indices": rows})
    others = np.setdiff1d(np.arange(len(obs)), rows)
    if len(shown) == len(obs) and len(others):
        complaint = f"a reset of rows {rows.tolist()} changed other rows"
        _check_same(obs.rows(others), shown.rows(others), complaint)
