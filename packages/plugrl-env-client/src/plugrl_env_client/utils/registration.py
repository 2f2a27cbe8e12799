"""Register environments by uid, look them up, and make them.

A class and its options are registered separately, under one uid. Lookups do not mind case, since
command lines write uids in lower case.
"""

from __future__ import annotations

import dataclasses
import json
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, TypeVar

import gymnasium as gym
from gymnasium.vector import AutoresetMode

from plugrl_env_client.errors import EnvContractError, UnknownEnvironmentError
from plugrl_env_client.utils.contract import ContractWrapper
from plugrl_env_client.utils.wrappers import (
    ActionBorderWrapper,
    TimeLimitWrapper,
    VectorEpisodeStatsWrapper,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugrl_env_client.envs.base_env import BaseEnv, BaseEnvConfig

__all__ = [
    "ENTRY_POINT_GROUP",
    "REGISTERED_ENVS",
    "REGISTERED_ENV_CONFIGS",
    "EnvSpec",
    "get_env_config",
    "get_env_spec",
    "load_entry_points",
    "make",
    "make_vec",
    "register_env",
    "register_env_config",
]

ENTRY_POINT_GROUP = "plugrl_env_client.envs"

ClassT = TypeVar("ClassT", bound=type[Any])
WrappedVectorEnv = gym.vector.VectorEnv[Any, Any, Any]


@dataclasses.dataclass(frozen=True)
class EnvSpec:
    """A registered environment."""

    uid: str
    cls: Any
    """A subclass of `BaseEnv`."""
    max_episode_steps: int | None
    best_reward_threshold_for_success: float | None
    kwargs: dict[str, Any]


REGISTERED_ENVS: dict[str, EnvSpec] = {}
"""uid to what was registered."""
REGISTERED_ENV_CONFIGS: dict[str, BaseEnvConfig] = {}
"""uid to its options with their defaults."""


def register_env(
    uid: str,
    max_episode_steps: int | None = None,
    best_reward_threshold_for_success: float | None = None,
    override: bool = False,  # noqa: FBT001, FBT002  # the documented signature
    **kwargs: Any,
) -> Callable[[ClassT], ClassT]:
    """Register a class, as a decorator; also with Gymnasium, so that its ``make_vec`` finds it.

    Args:
        uid: for example ``"Reach-v1"``.
        max_episode_steps: where the options set no limit.
        best_reward_threshold_for_success: see `VectorEpisodeStatsWrapper`.
        override: replace an earlier class.
        kwargs: passed to the class on construction; what JSON can say.

    Raises:
        KeyError: the uid is taken by another class and `override` is false.
        TypeError: not a vector environment, or keyword arguments that JSON cannot say.
    """
    json.dumps(kwargs)

    def decorate(cls: ClassT) -> ClassT:
        if not (isinstance(cls, type) and issubclass(cls, gym.vector.VectorEnv)):
            raise TypeError(f"environment {uid} is {cls!r}; expected a subclass of BaseEnv")
        known = REGISTERED_ENVS.get(uid)
        if known is not None and not override and not _is_same(known.cls, cls):
            raise KeyError(
                f"environment {uid} is registered already, by {known.cls.__module__}; "
                "choose another uid or pass override=True"
            )
        REGISTERED_ENVS[uid] = EnvSpec(
            uid, cls, max_episode_steps, best_reward_threshold_for_success, kwargs
        )
        gym.registry.pop(uid, None)
        gym.register(uid, vector_entry_point=_GymnasiumDoor(uid))
        return cls

    return decorate


@dataclasses.dataclass(frozen=True)
class _GymnasiumDoor:
    """What Gymnasium calls for ``gymnasium.make_vec(uid, num_envs, ...)``."""

    uid: str

    def __call__(self, num_envs: int = 1, **kwargs: Any) -> WrappedVectorEnv:
        return make_vec(self.uid, num_envs, **kwargs)


def _is_same(one: type[Any], other: type[Any]) -> bool:
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def register_env_config(uid: str) -> Callable[[ClassT], ClassT]:
    """Register options, as a decorator; they are constructed at once, from their defaults.

    Raises:
        KeyError: the uid has options already.
    """

    def decorate(cls: ClassT) -> ClassT:
        known = REGISTERED_ENV_CONFIGS.get(uid)
        if known is not None and not _is_same(type(known), cls):
            raise KeyError(f"environment {uid} has options already: {type(known).__name__}")
        REGISTERED_ENV_CONFIGS[uid] = cls()
        return cls

    return decorate


def get_env_spec(uid: str) -> EnvSpec:
    """Look an environment up; case does not matter.

    Raises:
        UnknownEnvironmentError: there is none; close names are suggested.
    """
    for known, spec in REGISTERED_ENVS.items():
        if known.lower() == uid.lower():
            return spec
    raise UnknownEnvironmentError(uid, REGISTERED_ENVS)


def get_env_config(uid: str) -> BaseEnvConfig:
    """Return a copy of an environment's options with their defaults.

    Raises:
        UnknownEnvironmentError: there is no such environment.
        EnvContractError: it was registered without options.
    """
    spec = get_env_spec(uid)
    try:
        return dataclasses.replace(REGISTERED_ENV_CONFIGS[spec.uid])
    except KeyError:
        raise EnvContractError(
            f"environment {spec.uid} has no options: decorate a subclass of BaseEnvConfig with "
            f"@register_env_config({spec.uid!r})"
        ) from None


def load_entry_points() -> None:
    """Import the environments that installed distributions declare.

    A distribution declares them in its ``pyproject.toml``, under
    ``[project.entry-points."plugrl_env_client.envs"]``, as ``name = "package.module"``.
    """
    for point in entry_points(group=ENTRY_POINT_GROUP):
        point.load()


def make(env_id: str, **kwargs: Any) -> WrappedVectorEnv:
    """Make one row; see `make_vec`."""
    return make_vec(env_id, 1, **kwargs)


def make_vec(
    env_id: str,
    num_envs: int,
    *,
    config: BaseEnvConfig | None = None,
    max_episode_steps: int | None = None,
    process_id: int | None = None,
    total_processes: int | None = None,
) -> WrappedVectorEnv:
    """Make an environment with its contract, its action border, its time limit, its statistics.

    Args:
        env_id: a uid; case does not matter.
        num_envs: rows, at least 1.
        config: its options; None takes the defaults.
        max_episode_steps: goes before ``config.max_episode_steps``, which goes before the limit
            that was registered.
        process_id: passed on, if not None.
        total_processes: likewise.

    Raises:
        UnknownEnvironmentError: there is none of this uid.
        EnvContractError: it does not say how it resets, cannot apply the limit, or has no
            `single_action_space`.
        ValueError: `num_envs` is below 1.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs is {num_envs}; expected at least 1")
    spec = get_env_spec(env_id)
    config = get_env_config(env_id) if config is None else config
    limits = (max_episode_steps, config.max_episode_steps, spec.max_episode_steps)
    limit = next((limit for limit in limits if limit is not None), None)
    config = dataclasses.replace(config, max_episode_steps=limit)
    processes = {"process_id": process_id, "total_processes": total_processes}
    known = {name: value for name, value in processes.items() if value is not None}
    base: BaseEnv[Any] = spec.cls(config, num_envs=num_envs, **known, **spec.kwargs)
    try:
        _check(base, spec)
        env: WrappedVectorEnv = ContractWrapper(base)
        if not base.checks_actions:
            env = ActionBorderWrapper(env)
        if limit is not None and not base.limits_episodes:
            _refuse_same_step(base, spec, limit)
            env = TimeLimitWrapper(env, limit)
    except BaseException:
        base.close()
        raise
    return VectorEpisodeStatsWrapper(
        env, best_reward_threshold_for_success=spec.best_reward_threshold_for_success
    )


def _check(env: BaseEnv[Any], spec: EnvSpec) -> None:
    mode = env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise EnvContractError(
            f"environment {spec.uid} declares the autoreset mode {mode!r}; expected "
            'metadata["autoreset_mode"] to be one of '
            f"{', '.join(str(known) for known in AutoresetMode)}"
        )
    if getattr(env, "single_action_space", None) is None:
        raise EnvContractError(
            f"environment {spec.uid} sets no single_action_space: the action space of one row"
        )


def _refuse_same_step(env: BaseEnv[Any], spec: EnvSpec, limit: int) -> None:
    if env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP:
        raise EnvContractError(
            f"environment {spec.uid} resets its rows itself, so only it can end episodes after "
            f"{limit} steps: apply config.max_episode_steps and set limits_episodes = True"
        )
