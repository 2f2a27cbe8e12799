"""`EnvGroup`: all environment workers of a run, addressed as one."""

from __future__ import annotations

import contextlib
import copy
import time
from typing import TYPE_CHECKING, Any, cast

from rlightning.config import Config
from rlightning.env.fitted_env import FittedEnv
from rlightning.env.step_counter import EnvStepCounter, ThroughputTracker
from rlightning.env.task_spaces import TaskSpaces
from rlightning.env.utils.utils import default_env_preprocess_fn
from rlightning.errors import ConfigError, UnknownNameError
from rlightning.types import BatchedData
from rlightning.utils.registry import ENVS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rlightning.config import EnvConfig
    from rlightning.env.base_env import BaseEnv
    from rlightning.types import EnvMeta, EnvRet, PolicyResponse

    PreprocessFn = Callable[[PolicyResponse], Any]
    MakeEnv = Callable[[EnvConfig, PreprocessFn, int, str], Any]

__all__ = ["EnvGroup", "evaluation_config"]

_LOOK_EVERY_S = 0.002
"""How often steps that others make are looked for, where several are under way."""


class EnvGroup:
    """The environment workers of a run; each entry of the configuration list is one.

    Args:
        env_cfg_list: one section per worker; the position is the worker's index.
        preprocess_fn: from a policy's response to an action: one for all workers, or one each.
        make: makes a worker from its section, its function, its index and its purpose, ``"train"``
            or ``"eval"``; by default one that lives in this process.
        tasks: the name of each worker's task; by default its section's own.
        spaces: what a policy sees of all tasks, where another group has found out; by default
            `init` does.

    Attributes:
        env_list: the workers.
        env_ids: their names, in order.
        id_to_env: the workers by name.
        tasks: the name of each worker's task, in order.

    Raises:
        ValueError: there is no section, or the functions do not fit the sections.
    """

    def __init__(
        self,
        env_cfg_list: Sequence[EnvConfig],
        preprocess_fn: PreprocessFn | Sequence[PreprocessFn] = default_env_preprocess_fn,
        *,
        make: MakeEnv | None = None,
        purpose: str = "train",
        tasks: Sequence[str] | None = None,
        spaces: TaskSpaces | None = None,
    ) -> None:
        self._maker = make
        self._make: MakeEnv = make or self._build_here
        self._configs = list(env_cfg_list)
        if not self._configs:
            raise ConfigError("there is no environment section; give at least one")
        self._preprocess_fns = _one_each(preprocess_fn, len(self._configs))
        self.tasks = [config.name for config in self._configs] if tasks is None else list(tasks)
        self._spaces = spaces
        self.env_list: list[BaseEnv] = []
        try:
            for index, config in enumerate(self._configs):
                env = self._make(config, self._preprocess_fns[index], index, purpose)
                fits = config.multitask.pad_spaces or config.multitask.task_id
                self.env_list.append(cast("BaseEnv", FittedEnv(env)) if fits else env)
        except BaseException:
            self.close()
            raise
        self.env_ids = [env.get_env_id() for env in self.env_list]
        self.id_to_env = dict(zip(self.env_ids, self.env_list, strict=True))
        self.id_to_num_envs = {env.get_env_id(): env.num_envs for env in self.env_list}
        self.step_counter: EnvStepCounter | None = None
        self.throughput = ThroughputTracker()
        self._reset_kwargs: dict[str, Any] = {}
        self._pending: list[tuple[BaseEnv, PolicyResponse]] = []
        self._first_env_rets: BatchedData[EnvRet] | None = None

    @classmethod
    def build_env(
        cls,
        env_cfg: EnvConfig,
        preprocess_fn: PreprocessFn = default_env_preprocess_fn,
        worker_index: int | None = None,
    ) -> BaseEnv:
        """Return the worker that a section describes.

        Raises:
            UnknownNameError: no environment class has the name ``env_cfg.backend``.
        """
        kind = ENVS.get(env_cfg.backend)
        env: BaseEnv = kind(env_cfg, worker_index=worker_index or 0, preprocess_fn=preprocess_fn)
        return env

    def _build_here(
        self, env_cfg: EnvConfig, preprocess_fn: PreprocessFn, worker_index: int, purpose: str
    ) -> BaseEnv:
        env = self.build_env(env_cfg, preprocess_fn, worker_index)
        env.purpose = purpose  # type: ignore[assignment]  # one of the two
        return env

    def __len__(self) -> int:
        return len(self.env_list)

    def __getitem__(self, env_id: str) -> BaseEnv:
        """Return a worker by name; ``"<worker>/<row>"`` names its worker too.

        Raises:
            KeyError: no worker has the name.
        """
        env = self.id_to_env.get(env_id) or self.id_to_env.get(env_id.split("/")[0])
        if env is None:
            raise UnknownNameError(env_id, kind="environment group", known=self.env_ids)
        return env

    def size(self) -> int:
        """Return the number of workers."""
        return len(self.env_list)

    @property
    def ids(self) -> list[str]:
        """The names of the workers, in order."""
        return self.env_ids

    @property
    def has_test_set(self) -> bool:
        """Whether some worker has other tasks for ``obj_set: test`` than for training."""
        return any(env.has_test_set for env in self.env_list)

    @property
    def first_env_rets(self) -> BatchedData[EnvRet]:
        """What the reset of `init` returned: where the first rollout starts.

        Raises:
            RuntimeError: `init` has not been called.
        """
        if self._first_env_rets is None:
            raise RuntimeError("the environments are not initialised; call init() first")
        return self._first_env_rets

    def init(self, seed: int | None = None) -> list[EnvMeta]:
        """Initialise all workers, check that one policy can serve them, and reset them.

        Where that fails, they are closed.

        Args:
            seed: the base seed, from which every row of every worker gets its own.

        Returns:
            The spaces of one row as a policy sees them, and the number of rows, per worker.

        Raises:
            ConfigError: the spaces differ, and are not to be padded or cannot be.
        """
        try:
            metas = self._fit([env.init() for env in self.env_list])
            self._first_env_rets, _ = self.reset(seed=seed)
        except BaseException:
            self.close()  # nobody goes on with it
            raise
        return metas

    def _fit(self, metas: list[EnvMeta]) -> list[EnvMeta]:
        """Make the workers of all tasks fit one policy; return what it sees of them."""
        common = self._spaces
        if common is None:
            common = TaskSpaces.of(self.tasks, metas, self._configs[0].multitask)
        seen: list[EnvMeta] = []
        for env, task, meta in zip(self.env_list, self.tasks, metas, strict=True):
            if isinstance(env, FittedEnv):
                self._spaces = common
                env.fit(common.fit(task, meta.observation_space, meta.action_space))
                seen.append(common.seen(meta))
            else:
                seen.append(meta)
        return seen

    def get_observation_spaces(self) -> list[Any]:
        """Return the observation space of one row, per worker."""
        return [env.get_observation_space() for env in self.env_list]

    def get_action_spaces(self) -> list[Any]:
        """Return the action space of one row, per worker."""
        return [env.get_action_space() for env in self.env_list]

    def reset(self, *args: Any, **kwargs: Any) -> tuple[BatchedData[EnvRet], list[bool]]:
        """Reset all workers; arguments go to each worker's ``reset``.

        A ``seed`` is a base seed: workers that take one derive one per row, all different. Options
        are kept for the resets of `auto_reset`; arguments that are None are not passed.

        Returns:
            The first observations, and per worker False: no rollout ends here.
        """
        kwargs = {name: value for name, value in kwargs.items() if value is not None}
        self._reset_kwargs = {name: kwargs[name] for name in kwargs if name != "seed"}
        for env in self.env_list:
            env.begin_reset(*args, **kwargs)
        env_rets = [env._reset(*args, **kwargs) for env in self.env_list]  # its framework
        if self.step_counter is not None:
            self.step_counter.reset_all()
        return BatchedData(self.env_ids, env_rets), [False] * len(self.env_list)

    def step(
        self, batched_policy_resp: BatchedData[PolicyResponse]
    ) -> tuple[BatchedData[EnvRet], list[bool] | None]:
        """Step the workers named in the batch.

        Inside `auto_reset` a worker that has reached its limit is reset instead, and its action is
        ignored.

        Returns:
            What the workers returned, in the order of the batch; and, inside `auto_reset`, per
            worker whether it has reached its limit with this step, else None.

        Raises:
            KeyError: the batch names an unknown worker; nothing was stepped.
        """
        begin_s = time.perf_counter()
        ids = batched_policy_resp.ids()
        envs = [self[env_id] for env_id in ids]
        rows, counter = 0, self.step_counter
        self.begin_step(batched_policy_resp)
        env_rets: list[EnvRet] = []
        limits: list[bool] = []
        for env, response in zip(envs, batched_policy_resp.values(), strict=True):
            if counter is None:
                env_rets.append(env._step(response))  # the group is its framework
            else:
                env_ret, limit_reached = self._step_counted(counter, env, response)
                env_rets.append(env_ret)
                limits.append(limit_reached)
            rows += env.num_envs
        self.throughput.record(rows, begin_s=begin_s)
        return BatchedData(ids, env_rets), None if counter is None else limits

    def begin_step(self, batched_policy_resp: BatchedData[PolicyResponse]) -> None:
        """Let workers that live elsewhere begin what `step` with the same batch returns.

        Others step when `step` is called.

        Raises:
            KeyError: the batch names an unknown worker.
        """
        if self._maker is not None:
            for env_id, response in batched_policy_resp:
                self._begin_one(self[env_id], response)

    def _begin_one(self, env: BaseEnv, response: PolicyResponse) -> None:
        """Begin a step that is made elsewhere, so that several are made side by side."""
        counter = self.step_counter
        if counter is not None and counter.is_reached_max_steps(env.env_id):
            env.begin_reset(**self._reset_kwargs)
        else:
            env.begin_step(response)

    def _step_one(self, env: BaseEnv, response: PolicyResponse) -> tuple[EnvRet, bool]:
        if self.step_counter is None:
            return env._step(response), False  # the group is its framework
        return self._step_counted(self.step_counter, env, response)

    def _step_counted(
        self, counter: EnvStepCounter, env: BaseEnv, response: PolicyResponse
    ) -> tuple[EnvRet, bool]:
        if counter.is_reached_max_steps(env.env_id):
            counter.reset(env.env_id)
            return env._reset(**self._reset_kwargs), False
        env_ret = env._step(response)
        return env_ret, counter.step(env.env_id)

    def step_async(self, batched_policy_resp: BatchedData[PolicyResponse]) -> None:
        """Begin steps of the workers named in the batch; `collect_async` returns them.

        Workers in this process step at once.

        Raises:
            KeyError: the batch names an unknown worker.
        """
        begun = [(self[env_id], response) for env_id, response in batched_policy_resp]
        for env, response in begun:
            self._begin_one(env, response)
        self._pending += begun

    def collect_async(
        self,
        timeout: float | None = None,
        wait_all: bool = False,  # noqa: FBT001, FBT002  # public contract
    ) -> tuple[BatchedData[EnvRet], list[bool]]:
        """Return the steps that have finished; nothing if none was begun.

        Args:
            timeout: how long to wait for more than the first, in seconds.
            wait_all: wait for all, however long.

        Raises:
            ValueError: `timeout` is not positive.
        """
        if timeout is not None and timeout <= 0:
            raise ValueError(f"timeout is {timeout} s; expected a positive number, or None")
        begin_s = time.perf_counter()
        ready = self._pending if wait_all else self._wait_for_some(timeout)
        self._pending = [item for item in self._pending if item not in ready]
        stepped = [self._step_one(env, response) for env, response in ready]
        self.throughput.record(sum(env.num_envs for env, _ in ready), begin_s=begin_s)
        env_rets = BatchedData([env.env_id for env, _ in ready], [item for item, _ in stepped])
        return env_rets, [limit_reached for _, limit_reached in stepped]

    def _wait_for_some(self, timeout_s: float | None) -> list[tuple[BaseEnv, PolicyResponse]]:
        """Return the steps that have finished, at least one unless `timeout_s` passes."""
        deadline_s = None if timeout_s is None else time.perf_counter() + timeout_s
        while self._pending:
            ready = [item for item in self._pending if item[0].is_ready()]
            if ready or (deadline_s is not None and time.perf_counter() >= deadline_s):
                return ready
            self._pending[0][0].is_ready(_LOOK_EVERY_S)
        return []

    @contextlib.contextmanager
    def auto_reset(self, max_episode_steps: int | None = None) -> Iterator[EnvGroup]:
        """Reset each worker by itself after so many of its steps, inside a ``with`` block.

        Args:
            max_episode_steps: for all workers; None takes each worker's own limit.

        Raises:
            ValueError: a limit is missing or not positive.
        """
        limits = [
            env.get_max_episode_steps() if max_episode_steps is None else max_episode_steps
            for env in self.env_list
        ]
        checked: list[int] = []
        for config, limit in zip(self._configs, limits, strict=True):
            if limit is None:
                raise ConfigError(
                    f"env {config.name!r} has no max_episode_steps; set it, or give auto_reset "
                    "a limit for all"
                )
            checked.append(limit)
        before = self.step_counter
        self.step_counter = EnvStepCounter(self.env_ids, checked)
        try:
            yield self
        finally:
            self.step_counter = before

    def take_lost_episodes(self) -> dict[str, int]:
        """Return how many episodes each worker lost by dying since this was last asked.

        A worker that died goes on with new episodes; what it returned last starts them.
        """
        if self._maker is None:
            return {}  # workers in this process do not die alone
        lost = {env.env_id: env.take_lost_episodes() for env in self.env_list}
        return {env_id: count for env_id, count in lost.items() if count}

    def get_stats(self) -> dict[str, float]:
        """Return environment steps per second, over all rows."""
        return self.throughput.get_stats()

    def get_env_stats(self, reset: bool = False) -> dict[str, float]:  # noqa: FBT001, FBT002  # public contract
        """Return the mean of every metric, and tell all workers that a rollout has finished.

        Where there are several tasks, over all episodes and, as ``<task>/<metric>``, over those of
        each. A metric without a single episode is absent, never NaN.

        Args:
            reset: forget the episodes afterwards.
        """
        totals: dict[str, list[float]] = {}
        several = len(set(self.tasks)) > 1
        for env, task in zip(self.env_list, self.tasks, strict=True):
            own = env.get_env_stats(reset=reset)
            _add_up(totals, own)
            if several:
                _add_up(totals, {f"{task}/{name}": total for name, total in own.items()})
        for env in self.env_list:
            env.finish_rollout()
        return {name: value / count for name, (value, count) in totals.items() if count}

    def for_evaluation(self) -> EnvGroup:
        """Return new workers with the settings of ``evaluate_cfg``, whose seeds are never ours."""
        configs = [evaluation_config(config) for config in self._configs]
        group = EnvGroup(
            configs,
            self._preprocess_fns,
            make=self._maker,
            purpose="eval",
            tasks=self.tasks,
            spaces=self._spaces,
        )
        group.apply_evaluate_cfg()
        return group

    def for_recording(self, render_mode: str, task: str | None = None) -> EnvGroup:
        """Return one new worker of one row, with the settings of evaluation, that renders.

        Args:
            render_mode: ``"rgb_array"`` to take frames, ``"human"`` for a window.
            task: the name of its task; by default the first.

        Raises:
            UnknownNameError: there is no such task.
        """
        task = self.tasks[0] if task is None else task
        if task not in self.tasks:
            raise UnknownNameError(task, kind="task", known=list(dict.fromkeys(self.tasks)))
        if self._spaces is None and isinstance(self.env_list[0], FittedEnv):
            metas = [env.get_metadata() for env in self.env_list]
            self._spaces = TaskSpaces.of(self.tasks, metas, self._configs[0].multitask)
        index = self.tasks.index(task)
        config = evaluation_config(self._configs[index])
        config.num_envs, config.num_workers = 1, 1
        config.env_kwargs = Config(**{**config.env_kwargs.to_dict(), "render_mode": render_mode})
        for key, value in (("vectorization", "sync"), ("keep_frames", render_mode == "rgb_array")):
            if key in config:
                setattr(config, key, value)
        group = EnvGroup(
            [config],
            self._preprocess_fns[index : index + 1],
            purpose="eval",
            tasks=[task],
            spaces=self._spaces,
        )
        group.apply_evaluate_cfg()
        return group

    def apply_evaluate_cfg(self) -> None:
        """Switch all workers to the settings of evaluation."""
        for env in self.env_list:
            env.apply_evaluate_cfg()

    def restore_evaluate_cfg(self) -> None:
        """Switch all workers back to the settings of training."""
        for env in self.env_list:
            env.restore_evaluate_cfg()

    def offload(self) -> None:
        """Let all workers free accelerator memory."""
        for env in self.env_list:
            env.offload()

    def reload(self) -> None:
        """Undo `offload`."""
        for env in self.env_list:
            env.reload()

    def get_state(self) -> dict[str, Any] | None:
        """Return plain data that continues all episodes, or None if a worker cannot give it."""
        states = [env.get_state() for env in self.env_list]
        return None if any(state is None for state in states) else {"envs": states}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned from a group with the same configuration.

        Raises:
            ValueError: the state is for another number of workers.
        """
        states = state["envs"]
        if len(states) != len(self.env_list):
            raise ConfigError(
                f"the state is for {len(states)} environment workers; there are "
                f"{len(self.env_list)}"
            )
        for env, env_state in zip(self.env_list, states, strict=True):
            env.set_state(env_state)

    def print_timing_summary(self, reset: bool = False) -> None:  # noqa: FBT001, FBT002  # public contract
        """Log the timings of all workers.

        Args:
            reset: forget them afterwards.
        """
        for env in self.env_list:
            env.print_timing_summary(reset=reset)

    def close(self) -> None:
        """Close all workers."""
        for env in self.env_list:
            env.close()


def _add_up(totals: dict[str, list[float]], more: dict[str, list[float]]) -> None:
    """Add totals ``{metric: [sum, count]}`` to others, in place."""
    for name, (value, count) in more.items():
        total = totals.setdefault(name, [0.0, 0])
        total[0] += value
        total[1] += count


def _one_each(preprocess_fn: Any, count: int) -> list[Any]:
    functions = (
        list(preprocess_fn) if isinstance(preprocess_fn, (list, tuple)) else [preprocess_fn] * count
    )
    if len(functions) != count:
        raise ConfigError(
            f"{len(functions)} preprocess functions for {count} environment workers; give one "
            "each, or one for all"
        )
    for function in functions:
        if not callable(function):
            raise ConfigError(f"preprocess_fn is {function!r}; expected a function")
    return functions


def evaluation_config(config: EnvConfig) -> EnvConfig:
    """Return a copy of `config` with the keys of its ``evaluate_cfg`` in place of its own.

    Raises:
        ConfigError: it replaces what the training loop relies on.
    """
    changed = copy.deepcopy(config)
    overrides = {} if config.evaluate_cfg is None else dict(**config.evaluate_cfg)
    for key, value in overrides.items():
        if key in ("backend", "name", "num_workers", "evaluate_cfg"):
            raise ConfigError(f"evaluate_cfg cannot replace {key!r} of env {config.name!r}")
        mine = config.get(key)
        if isinstance(mine, Config) and isinstance(value, Config):
            value = Config(**{**mine, **value})  # a section is merged, not replaced
        setattr(changed, key, value)
    return changed
