"""What runs in the process of one asynchronous row: make the environment, then obey commands.

Every command is answered once: ``(True, result)`` or ``(False, text of what went wrong)``. After
an error the worker ends.
"""

from __future__ import annotations

import signal
import traceback
from typing import TYPE_CHECKING, Any

from plugrl_envs.errors import EnvResultError
from plugrl_envs.quiet import held_back
from plugrl_envs.row import Row
from plugrl_envs.shared_batch import SharedBatch
from plugrl_envs.snapshot import get_env_state, set_env_state
from plugrl_envs.spaces import write_row

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

    import gymnasium as gym

__all__ = ["run_worker"]


def run_worker(
    env_fn: Callable[[], gym.Env[Any, Any]], pipe: Connection, other_end: Connection
) -> None:
    """Serve one environment until told to close or until the other side is gone.

    Args:
        env_fn: makes the environment.
        pipe: where commands come from and answers go to.
        other_end: the caller's end, closed here so that its death is noticed.
    """
    other_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the caller, who closes its workers
    worker = None
    try:
        worker = _Worker(env_fn)
        pipe.send((True, worker.describe()))
        while True:
            command, arguments = pipe.recv()
            if command == "close":
                break
            pipe.send((True, getattr(worker, command)(*arguments)))
    except (EOFError, BrokenPipeError):
        pass  # the caller is gone, and nobody is left to tell
    except EnvResultError as error:
        pipe.send((False, str(error)))
    except Exception:  # noqa: BLE001  # process border: the caller raises it, with the row
        pipe.send((False, traceback.format_exc()))
    finally:
        if worker is not None:
            worker.close()


class _Worker:
    def __init__(self, env_fn: Callable[[], gym.Env[Any, Any]]) -> None:
        with held_back() as self._warnings:
            self._row = Row(env_fn)
        self._env = self._row.env
        self._index = -1
        self._shared: SharedBatch | None = None

    def describe(self) -> dict[str, Any]:
        env = self._env
        return {
            "observation_space": env.observation_space,
            "action_space": env.action_space,
            "metadata": env.metadata,
            "render_mode": env.render_mode,
            "warnings": self._warnings,
        }

    def attach(self, name: str, index: int, num_envs: int) -> None:
        self._index = index
        self._shared = SharedBatch(self._env.observation_space, num_envs, name=name)

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> dict[str, Any]:
        observation, info = self._row.reset(seed, options)
        if self._shared is not None:
            write_row(self._shared.observations, self._index, observation)
        return info

    def step(self, action: Any) -> dict[str, Any]:
        shared, index = self._shared, self._index
        if shared is None:
            raise RuntimeError("step before attach")
        observation, reward, terminated, truncated, info = self._row.step(action)
        if terminated or truncated:
            write_row(shared.final_obs, index, observation)
            final_info = info
            observation, info = self._row.restart()
            info = {**info, "final_info": final_info}
        write_row(shared.observations, index, observation)
        shared.rewards[index] = reward
        shared.terminated[index] = terminated
        shared.truncated[index] = truncated
        return info

    def call(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._env.get_wrapper_attr(name)
        return found(*args, **kwargs) if callable(found) else found

    def get_state(self) -> Any:
        return get_env_state(self._env)

    def set_state(self, state: Any) -> None:
        set_env_state(self._env, state)

    def close(self) -> None:
        if self._shared is not None:
            self._shared.close()
        self._env.close()
