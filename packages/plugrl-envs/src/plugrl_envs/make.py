"""Make vector environments by id: one function for every simulator family."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from typing import TYPE_CHECKING, Any, Literal

import gymnasium as gym

from plugrl_envs.async_vector import AsyncRows
from plugrl_envs.atari import atari_preprocessing
from plugrl_envs.envpool_env import make_envpool
from plugrl_envs.families import prepare, prepare_simulator
from plugrl_envs.headless import choose_opengl, choose_sdl
from plugrl_envs.sync_vector import SyncRows
from plugrl_envs.vector import CanonicalVectorEnv

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    EnvFn = Callable[[], gym.Env[Any, Any]]
    Wrapper = Callable[[gym.Env[Any, Any]], gym.Env[Any, Any]]

__all__ = ["Vectorization", "WorkerOptions", "make_vec"]

Vectorization = Literal["auto", "sync", "async", "native"]

_ENVPOOL = "envpool:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """How asynchronous rows run."""

    step_timeout_s: float = 60.0
    """How long the slowest row may take for a reset or step, in seconds."""
    start_timeout_s: float = 120.0
    """How long making all environments may take, in seconds."""
    start_method: str | None = None
    """``"forkserver"``, ``"spawn"`` or ``"fork"``; None takes the first that the system has."""


def make_vec(
    env_id: str | EnvFn,
    num_envs: int,
    *,
    vectorization: Vectorization = "auto",
    max_episode_steps: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Sequence[str | Wrapper] = (),
    workers: WorkerOptions = WorkerOptions(),
) -> CanonicalVectorEnv:
    """Return `num_envs` environments as one vector environment.

    Args:
        env_id: a Gymnasium id; ``"module:id"`` imports the module first; ``"envpool:id"`` is
            EnvPool's; or a function that makes one environment.
        num_envs: rows, at least 1.
        vectorization: ``"sync"``: one after another in this process (what ``"auto"`` takes);
            ``"async"``: a process per row; ``"native"``: the vector environment that the id itself
            registers.
        max_episode_steps: truncate episodes after so many steps of an agent, whatever frames an
            Atari environment skips in one; None keeps the id's own limit. It is counted by the
            environment, inside `wrappers`, except that ``"atari"`` is inside it.
        env_kwargs: options of the environment itself.
        wrappers: applied to every row in order: callables, ``"pkg.module:callable"``, or
            ``"atari"``, which is `atari_preprocessing`.
        workers: how asynchronous rows run.

    Raises:
        UnknownEnvError: no such environment.
        MissingExtraError: its simulator family is not installed.
        AutoresetError: a native environment whose reset cannot be mapped.
        UnsupportedSpaceError: a space that policies cannot be given.
        RenderingError: frames of MuJoCo are asked for, and nothing here can draw them.
        ValueError: options that contradict each other.
    """
    if num_envs < 1:
        raise ValueError(f"num_envs is {num_envs}; expected at least 1")
    kwargs = dict(env_kwargs or {})
    if max_episode_steps is not None:
        if max_episode_steps < 1:
            raise ValueError(f"max_episode_steps is {max_episode_steps}; expected at least 1")
        kwargs["max_episode_steps"] = max_episode_steps
    if isinstance(env_id, str) and env_id.startswith(_ENVPOOL):
        _refuse_wrappers(wrappers, env_id)
        return CanonicalVectorEnv(make_envpool(env_id[len(_ENVPOOL) :], num_envs, **kwargs))
    if vectorization == "native":
        _refuse_wrappers(wrappers, env_id)
        return CanonicalVectorEnv(_make_native(env_id, num_envs, kwargs))
    env_fn = _row_maker(env_id, kwargs, wrappers)
    if vectorization in ("auto", "sync"):
        return CanonicalVectorEnv(SyncRows([env_fn] * num_envs))
    if vectorization == "async":
        return CanonicalVectorEnv(AsyncRows([env_fn] * num_envs, **dataclasses.asdict(workers)))
    raise ValueError(
        f"vectorization is {vectorization!r}; expected 'auto', 'sync', 'async' or 'native'"
    )


def _row_maker(
    env_id: str | EnvFn, kwargs: dict[str, Any], wrappers: Sequence[str | Wrapper]
) -> EnvFn:
    chosen = [_wrapper(wrapper) for wrapper in wrappers]
    spec = prepare(env_id) if isinstance(env_id, str) else None
    choose_sdl(kwargs.get("render_mode"))
    if spec is not None:
        choose_opengl(spec, kwargs.get("render_mode"))
    limit = None
    if atari_preprocessing in chosen:
        # What the wrapper skips, and its no-op starts, are frames and no steps of the agent.
        limit = kwargs.pop("max_episode_steps", None)
        if spec is not None and "frameskip" in spec.kwargs:
            kwargs.setdefault("frameskip", 1)  # skipping is the wrapper's work

    def make_row() -> gym.Env[Any, Any]:
        if spec is None:
            env = _make_from_function(env_id, kwargs)
        else:
            # The specification, not the id: a worker process may not have registered it.
            prepare_simulator(spec)
            env = gym.make(spec, disable_env_checker=True, **copy.deepcopy(kwargs))
        for wrap in chosen:
            env = wrap(env)
            if wrap is atari_preprocessing and limit is not None:
                env = gym.wrappers.TimeLimit(env, limit)
        return env

    return make_row


def _make_from_function(env_fn: Any, kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    own = {key: value for key, value in kwargs.items() if key != "max_episode_steps"}
    env: gym.Env[Any, Any] = env_fn(**own)
    limit = kwargs.get("max_episode_steps")
    return env if limit is None else gym.wrappers.TimeLimit(env, limit)


def _wrapper(wrapper: str | Wrapper) -> Wrapper:
    if callable(wrapper):
        return wrapper
    if wrapper == "atari":
        return atari_preprocessing
    module, _, name = wrapper.partition(":")
    try:
        found: Wrapper = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"wrapper {wrapper!r} cannot be found ({error}); expected 'atari', "
            "'pkg.module:callable' or a callable"
        ) from error
    return found


def _make_native(
    env_id: str | EnvFn, num_envs: int, kwargs: dict[str, Any]
) -> gym.vector.VectorEnv[Any, Any, Any]:
    if not isinstance(env_id, str):
        raise ValueError(
            "vectorization='native' needs an id, not a function; use 'sync' or 'async'"
        )
    spec = prepare(env_id)
    if spec.vector_entry_point is None:
        raise ValueError(
            f"{env_id} registers no native vector environment; use vectorization='sync' or 'async'"
        )
    if "ale_py" in str(spec.vector_entry_point):
        _adapt_native_atari(kwargs)
    return gym.make_vec(
        env_id, num_envs=num_envs, vectorization_mode="vector_entry_point", **kwargs
    )


def _adapt_native_atari(kwargs: dict[str, Any]) -> None:
    """Translate our options into ALE's: it resets in any mode, and counts frames, not steps."""
    kwargs.setdefault("autoreset_mode", gym.vector.AutoresetMode.SAME_STEP)
    kwargs.setdefault("reward_clipping", False)  # statistics must show the game's own score
    limit = kwargs.pop("max_episode_steps", None)
    if limit is not None:
        kwargs["max_num_frames_per_episode"] = limit * kwargs.get("frameskip", 4)


def _refuse_wrappers(wrappers: Sequence[Any], env_id: Any) -> None:
    if wrappers:
        raise ValueError(
            f"{env_id} is vectorised natively, where there is no single environment to wrap; "
            "use vectorization='sync' or 'async' with wrappers"
        )
