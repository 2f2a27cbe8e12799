"""Environments stepped at the same time, each in a process of its own, with deadlines.

Observations, rewards and flags come back through shared memory, infos over one pipe per worker.
Whatever happens to a worker (an exception, a hang, a crash), the caller learns which row it was
before the deadline has passed, and no process is left behind.
"""

from __future__ import annotations

import multiprocessing
import time
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import CloudpickleWrapper, batch_space

from plugrl_envs.async_worker import run_worker
from plugrl_envs.errors import EnvTimeoutError, EnvWorkerError
from plugrl_envs.infos import add_info
from plugrl_envs.quiet import log_once
from plugrl_envs.shared_batch import SharedBatch
from plugrl_envs.spaces import action_rows, copy_batch
from plugrl_envs.sync_vector import row_seeds, split_reset_mask

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from multiprocessing.connection import Connection

__all__ = ["AsyncRows"]

Array = np.ndarray[Any, Any]

_CLOSE_TIMEOUT_S = 5.0
_START_HINT = (
    " A script that makes asynchronous environments must do so below "
    "`if __name__ == '__main__':`, because every worker imports it."
)


class AsyncRows(gym.vector.VectorEnv[Any, Any, Any]):
    """A vector environment of worker processes; resets a row in the step that ends it.

    After an `EnvWorkerError` all workers are gone and the object is closed: make a new one.

    Args:
        env_fns: one maker per row; all rows must have the same spaces.
        step_timeout_s: how long the slowest row may take for a reset or step.
        start_timeout_s: how long making all environments may take.
        start_method: how worker processes start: ``"forkserver"``, ``"spawn"`` or ``"fork"``
            (fast, and unsafe once threads run). By default the first that the system has.

    Raises:
        EnvWorkerError: an environment cannot be made; names the row.
    """

    dense_final_obs = True

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gym.Env[Any, Any]]],
        *,
        step_timeout_s: float = 60.0,
        start_timeout_s: float = 120.0,
        start_method: str | None = None,
    ) -> None:
        self.num_envs = len(env_fns)
        self._step_timeout_s = step_timeout_s
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._shared: SharedBatch | None = None
        try:
            self._start(_context(start_method), env_fns)
            rows = list(range(self.num_envs))
            self._adopt_spaces(self._receive(rows, "start", start_timeout_s))
            self._shared = SharedBatch(self.single_observation_space, self.num_envs)
            arguments = [(self._shared.name, row, self.num_envs) for row in rows]
            self._ask(rows, "attach", arguments, timeout_s=start_timeout_s)
        except BaseException:
            self._end(grace_s=0.0)
            raise

    def _start(self, context: Any, env_fns: Sequence[Callable[[], Any]]) -> None:
        for index, env_fn in enumerate(env_fns):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=run_worker,
                args=(CloudpickleWrapper(env_fn), theirs, ours),
                name=f"env-{index}",
                daemon=True,
            )
            self._pipes.append(ours)
            process.start()
            theirs.close()
            self._processes.append(process)

    def _adopt_spaces(self, answers: list[Any]) -> None:
        first = answers[0]
        for index, answer in enumerate(answers):
            for warning in answer["warnings"]:
                log_once(warning)
            for name in ("observation_space", "action_space"):
                if answer[name] != first[name]:
                    raise ValueError(
                        f"environment {index} has {name} {answer[name]}, environment 0 has "
                        f"{first[name]}; the rows of a vector environment share their spaces"
                    )
        self.metadata = {**first["metadata"], "autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = first["render_mode"]
        self.single_observation_space = first["observation_space"]
        self.single_action_space = first["action_space"]
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all rows, or those in ``options["reset_mask"]``.

        Args:
            seed: one seed per row, or a number that row ``i`` adds ``i`` to.
            options: passed on to every row, without ``"reset_mask"`` (bool ``[N]``).

        Returns:
            Observations ``[N, ...]`` of all rows, and the infos of the reset rows.

        Raises:
            EnvWorkerError: a row raised, hung or died; all workers have been ended.
        """
        options, mask = split_reset_mask(options, self.num_envs)
        seeds = row_seeds(seed, self.num_envs)
        rows = [row for row in range(self.num_envs) if mask is None or mask[row]]
        infos = self._ask(rows, "reset", [(seeds[row], options) for row in rows])
        return copy_batch(self._batch().observations), self._join_infos(rows, infos)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step every row with its action of `actions` ``[N, *A]``.

        Raises:
            EnvWorkerError: a row raised, hung or died; all workers have been ended.
        """
        rows = list(range(self.num_envs))
        each = action_rows(self.single_action_space, actions)
        infos = self._ask(rows, "step", [(each[row],) for row in rows])
        batch = self._batch()
        info = self._join_infos(rows, infos)
        terminated, truncated = batch.terminated.copy(), batch.truncated.copy()
        ended = terminated | truncated
        if ended.any():
            info["final_obs"] = copy_batch(batch.final_obs)
            info["_final_obs"] = ended
        return (
            copy_batch(batch.observations),
            batch.rewards.copy(),
            terminated,
            truncated,
            info,
        )

    def _join_infos(self, rows: list[int], infos: list[dict[str, Any]]) -> dict[str, Any]:
        info: dict[str, Any] = {}
        for row, row_info in zip(rows, infos, strict=True):
            if row_info:
                add_info(info, row_info, row, self.num_envs)
        return info

    def _batch(self) -> SharedBatch:
        if self._shared is None:
            raise RuntimeError("the vector environment is closed; make a new one")
        return self._shared

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of, or read an attribute from, every row."""
        rows = list(range(self.num_envs))
        return tuple(self._ask(rows, "call", [(name, args, kwargs)] * self.num_envs))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute from every row."""
        return self.call(name)

    def get_states(self) -> list[Any]:
        """Return the state of every row, None where it cannot be captured."""
        rows = list(range(self.num_envs))
        return self._ask(rows, "get_state", [()] * self.num_envs)

    def set_states(self, states: Sequence[Any]) -> None:
        """Restore what `get_states` returned."""
        self._ask(list(range(self.num_envs)), "set_state", [(state,) for state in states])

    def _ask(
        self,
        rows: list[int],
        command: str,
        arguments: Sequence[tuple[Any, ...]],
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Send one command to each of `rows` and return their answers, in order."""
        if self.closed:
            raise RuntimeError(f"{command} on a closed vector environment; make a new one")
        for row, row_arguments in zip(rows, arguments, strict=True):
            try:
                self._pipes[row].send((command, row_arguments))
            except OSError:
                self._fail(self._died(row, command))
        return self._receive(rows, command, timeout_s or self._step_timeout_s)

    def _receive(self, rows: list[int], during: str, timeout_s: float) -> list[Any]:
        deadline = time.monotonic() + timeout_s
        waiting: dict[Any, int] = {self._pipes[row]: row for row in rows}
        answers: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = sorted(waiting.values())
                reason = f"no answer within {timeout_s:g} s (rows without an answer: {late})"
                self._fail(EnvTimeoutError(late[0], during=during, reason=reason))
            for pipe in ready:
                row = waiting.pop(pipe)
                try:
                    good, answer = self._pipes[row].recv()
                except (EOFError, OSError):
                    self._fail(self._died(row, during))
                if not good:
                    self._fail(EnvWorkerError(row, during=during, reason=answer))
                answers[row] = answer
        return [answers[row] for row in rows]

    def _died(self, row: int, during: str) -> EnvWorkerError:
        process = self._processes[row]
        process.join(1.0)
        reason = f"its process died with exit code {process.exitcode}."
        if process.exitcode == -9:
            reason += " Exit code -9 often means that the system ran out of memory."
        if during == "start":
            reason += _START_HINT
        return EnvWorkerError(row, during=during, reason=reason)

    def _fail(self, error: EnvWorkerError) -> None:
        self._end(grace_s=0.0)
        raise error

    def close_extras(self, **kwargs: Any) -> None:
        """Ask the workers to close, and end those that do not."""
        self._end(grace_s=_CLOSE_TIMEOUT_S)

    def _end(self, *, grace_s: float) -> None:
        """End every worker: politely within `grace_s`, then not; reap them all."""
        self.closed = True
        deadline = time.monotonic() + grace_s
        for pipe in self._pipes:
            if grace_s > 0:
                try:
                    pipe.send(("close", ()))
                except OSError:
                    continue  # dead already
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            process.join(1.0)
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []
        if self._shared is not None:
            self._shared.close()
            self._shared = None

    def __del__(self) -> None:
        if not self.closed and getattr(self, "_processes", None):
            self._end(grace_s=0.0)


def _context(start_method: str | None) -> Any:
    available = multiprocessing.get_all_start_methods()
    method = start_method or ("forkserver" if "forkserver" in available else "spawn")
    if method not in available:
        raise ValueError(f"start_method is {method!r}; this system has {', '.join(available)}")
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        # Workers then start with these already imported.
        context.set_forkserver_preload(["plugrl_envs.async_worker"])
    return context
