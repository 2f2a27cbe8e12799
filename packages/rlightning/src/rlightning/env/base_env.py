"""`BaseEnv`: one environment worker of one or more rows, as users subclass it.

The framework calls `_reset` and `_step`, which call the user's `reset` and `step` and keep the
statistics of episodes from rewards and flags, so that every environment reports return and length
whether it knows of metrics or not.
"""

from __future__ import annotations

import copy
import inspect
import logging
import time
import uuid
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from plugrl_envs.seeding import derive_seeds
from plugrl_envs.statistics import EpisodeStatistics
from rlightning.config import Config
from rlightning.env.finite import check_finite
from rlightning.env.utils.utils import default_env_preprocess_fn
from rlightning.errors import ConfigError
from rlightning.types import EnvMeta, to_numpy

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlightning.config import EnvConfig
    from rlightning.types import EnvRet, PolicyResponse

__all__ = ["BaseEnv"]

_logger = logging.getLogger("rlightning.env")

Totals = dict[str, list[float]]
"""Metric name to [sum, count]."""


class BaseEnv(ABC):
    """An environment worker.

    A subclass makes its simulator, sets `env` (anything with ``observation_space`` and
    ``action_space`` of ONE environment, or override the two getters) and implements `reset` and
    `step`. With ``num_envs = 1`` observation, reward and flags have no leading axis; with more
    rows they have a leading ``[N]``. A row whose episode ended is reset in the same step; its last
    observation stands in ``info["final_obs"]`` with the row mask ``info["_final_obs"]``.

    Args:
        config: the worker's section; copied.
        worker_index: position among all environment workers of the run.
        preprocess_fn: turns a policy's response into what `step` wants; by default its action.

    A nested class ``Extras(Config)`` declares further keys of the worker's configuration section.

    Attributes:
        has_test_set: whether ``reset(options={"obj_set": "test"})`` gives other tasks than
            ``"train"``.
        purpose: ``"train"`` or ``"eval"``; environments of an evaluation never share a seed with
            those of training.
        env_id: unique name; ends in ``-<worker_index>``.
        label: how errors and the log call the worker.
        num_envs: rows.
        max_episode_steps: the configured limit, or None.
        timing_raw: seconds spent, ``{name: {"count", "total", "avg"}}``.
    """

    has_test_set = False
    address = ""
    """Which machine it is on, where that is another than the trainer's; empty here."""
    takes_arrays: ClassVar[bool] = False
    """Whether `step` is content with numpy arrays where a policy answered tensors: then a worker of
    a cluster that only steps environments need not load torch."""
    waits_for_others: ClassVar[bool] = False
    """Whether calls may wait for somebody outside the run, for as long as the environment allows,
    and evaluation takes turns with training on what comes from there. A worker of a cluster then
    holds the environments of both, and says now and then that it still waits."""

    class Extras(Config):
        """Further configuration keys of this environment: none."""

    def __init__(
        self,
        config: EnvConfig,
        worker_index: int | None = 0,
        preprocess_fn: Callable[[PolicyResponse], Any] | None = None,
    ) -> None:
        self.config = copy.deepcopy(config)
        self.worker_index = worker_index or 0
        self.env_id = f"{uuid.uuid4()}-{self.worker_index}"
        self.label = f"env {self.config.name!r} worker {self.worker_index}"
        self.purpose: Literal["train", "eval"] = "train"
        self.env: Any = None
        self.num_envs = self.config.num_envs
        self.max_episode_steps = self.config.max_episode_steps
        self.timing_raw: dict[str, dict[str, float]] = {}
        self._preprocess_fn = preprocess_fn or default_env_preprocess_fn
        self._statistics = EpisodeStatistics(self.num_envs)
        self._episode_env_infos: Totals = {}
        self._own_metrics: set[str] = set()
        self._num_steps = 0

    @abstractmethod
    def reset(self, *args: Any, **kwargs: Any) -> EnvRet:
        """Start episodes in all rows and return their first observations.

        The framework passes ``seed`` (this worker's own; absent when the random streams continue)
        and ``options`` to an implementation that takes them.
        """

    @abstractmethod
    def step(self, policy_resp: PolicyResponse) -> EnvRet:
        """Act, and return what came of it."""

    def init(self) -> EnvMeta:
        """Prepare for the first reset and return the spaces of one row."""
        return self.get_metadata()

    def get_env_id(self) -> str:
        """Return the unique name of this worker."""
        return self.env_id

    def get_max_episode_steps(self) -> int | None:
        """Return the configured limit of an episode, in steps."""
        return self.max_episode_steps

    def get_observation_space(self) -> Any:
        """Return the observation space of one row."""
        return self.env.observation_space

    def get_action_space(self) -> Any:
        """Return the action space of one row."""
        return self.env.action_space

    def get_metadata(self) -> EnvMeta:
        """Return the spaces of one row and the number of rows."""
        return EnvMeta(
            env_id=self.env_id,
            action_space=self.get_action_space(),
            observation_space=self.get_observation_space(),
            num_envs=self.num_envs,
            label=self.label,
        )

    def close(self) -> None:
        """Release the simulator."""

    def is_finish(self) -> bool:
        """Return whether a worker that drives itself has nothing left to do."""
        return False

    def offload(self) -> None:
        """Free accelerator memory between rollouts."""

    def reload(self) -> None:
        """Undo `offload`."""

    def apply_evaluate_cfg(self) -> None:
        """Switch to the settings of evaluation."""

    def restore_evaluate_cfg(self) -> None:
        """Switch back to the settings of training."""

    @classmethod
    def makes_frames(cls) -> bool:
        """Whether videos can be made: `take_frames` is implemented."""
        return cls.take_frames is not BaseEnv.take_frames

    @classmethod
    def check_frames(cls, setting: str) -> None:
        """Check that videos can be made, which is what `setting` asks for.

        Raises:
            ConfigError: this class has no frames.
        """
        if not cls.makes_frames():
            raise ConfigError(
                f"{setting} wants a video, and {cls.__name__} makes no frames (take_frames); "
                "environments of clients are filmed where they run: --recorder.record-video"
            )

    def take_frames(self) -> list[np.ndarray[Any, Any]]:
        """Return the frames since the last call, uint8 ``[height, width, 3]``, for videos.

        Raises:
            ConfigError: this environment has none.
        """
        raise ConfigError(f"{type(self).__name__} makes no frames; implement take_frames")

    def get_render_fps(self) -> float:
        """Return how many frames make a second of simulated time."""
        return 30.0

    def finish_rollout(self) -> None:
        """React to the end of a rollout."""

    def step_async(self, policy_resps: list[PolicyResponse]) -> None:
        """Begin steps of environments that live elsewhere."""
        raise NotImplementedError(f"{type(self).__name__} has no asynchronous steps")

    def collect_async(self, timeout: float | None = None) -> tuple[EnvRet, ...]:
        """Return what environments that live elsewhere have finished."""
        raise NotImplementedError(f"{type(self).__name__} has no asynchronous steps")

    def get_state(self) -> dict[str, Any] | None:
        """Return plain data that continues all episodes bit for bit, or None if that cannot be."""
        return None

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned; the last observation is the caller's to keep."""
        raise NotImplementedError(f"{type(self).__name__} cannot restore a state")

    def get_env_stats(self, reset: bool = False) -> Totals:  # noqa: FBT001, FBT002  # public contract
        """Return ``{metric: [sum, count]}`` over the episodes that ended.

        Args:
            reset: forget them afterwards.
        """
        totals = {name: list(total) for name, total in self._episode_env_infos.items()}
        if reset:
            self._episode_env_infos = {}
        return totals

    def print_timing_summary(self, reset: bool = False) -> None:  # noqa: FBT001, FBT002  # public contract
        """Log how long resets and steps took.

        Args:
            reset: forget the timings afterwards.
        """
        for name, timing in self.timing_raw.items():
            _logger.info(
                "%s %s: %d calls, %.6f s each", self.label, name, timing["count"], timing["avg"]
            )
        if reset:
            self.timing_raw = {}

    def begin_reset(self, *args: Any, **kwargs: Any) -> None:
        """Begin what `_reset` returns, where that happens elsewhere."""

    def begin_step(self, policy_resp: PolicyResponse) -> None:
        """Begin what `_step` returns, where that happens elsewhere."""

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Return whether `_step` would return at once, waiting at most `timeout_s`."""
        del timeout_s
        return True

    def take_lost_episodes(self) -> int:
        """Return how many episodes were lost since this was last asked, because a worker died."""
        return 0

    def _reset(self, *args: Any, **kwargs: Any) -> EnvRet:
        begin = time.perf_counter()
        env_ret = self.reset(*args, **self._reset_kwargs(kwargs))
        self._record("env_reset", time.perf_counter() - begin)
        self._statistics.reset()
        check_finite(env_ret, num_envs=self.num_envs, step=self._num_steps, label=self.label)
        return env_ret.mark_env_sent()

    def _reset_kwargs(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return `kwargs` with the base seed turned into this worker's, as far as `reset` takes it.

        ``seed`` and ``options`` come from the framework; a `reset` that takes neither is fine.
        """
        if "seed" in kwargs:
            base = self.config.get("seed")
            base = kwargs["seed"] if base is None else base
            own, *_ = derive_seeds(base, 1, worker_index=self.worker_index, purpose=self.purpose)
            kwargs = {**kwargs, "seed": own}
        parameters = inspect.signature(self.reset).parameters
        if any(item.kind is item.VAR_KEYWORD for item in parameters.values()):
            return kwargs
        untaken = {"seed", "options"} - parameters.keys()
        return {name: value for name, value in kwargs.items() if name not in untaken}

    def _step(self, policy_resp: PolicyResponse) -> EnvRet:
        begin = time.perf_counter()
        env_ret = self.step(self._pre_step_hook(policy_resp))
        self._record("env_step", time.perf_counter() - begin)
        self._num_steps += 1
        return self._post_step_hook(env_ret).mark_env_sent()

    def _pre_step_hook(self, policy_resp: PolicyResponse) -> PolicyResponse:
        """Return what `step` is called with."""
        return policy_resp

    def _post_step_hook(self, env_ret: EnvRet) -> EnvRet:
        """Check what `step` returned and account for episodes that ended."""
        check_finite(env_ret, num_envs=self.num_envs, step=self._num_steps, label=self.label)
        self._account(env_ret)
        return env_ret

    def _account(self, env_ret: EnvRet) -> None:
        info = env_ret.info
        own = info.get("episode_info") if info else None
        if own:
            self._own_metrics.update(own)
            for name, value in own.items():
                values = np.asarray(to_numpy(value), dtype=np.float64).reshape(-1)
                self._add(name, float(values.sum()), values.size)
        reward = env_ret.last_reward
        if isinstance(reward, dict):
            return  # one reward per agent has no single return
        finished = self._statistics.update(
            _array(reward),
            _array(env_ret.last_terminated),
            _array(env_ret.last_truncated),
            info,
        )
        if finished is None:
            return
        count = len(finished.rows)
        self._add_unless_own("episode_return", float(finished.returns.sum()), count)
        self._add_unless_own("episode_length", float(finished.lengths.sum()), count)
        if finished.success is not None:
            self._add_unless_own("success", float(finished.success.sum()), count)
            info.setdefault("success", self._in_rows(finished.rows, finished.success))

    def _in_rows(self, rows: Any, values: Any) -> Any:
        """Return `values` at their rows of ``[N]``, False elsewhere; a scalar for one row."""
        full = np.zeros(self.num_envs, dtype=values.dtype)
        full[rows] = values
        return full if self.num_envs > 1 else full[0]

    def _add_unless_own(self, name: str, value: float, count: int) -> None:
        """Add to a metric, unless the environment reports the metric itself."""
        if name not in self._own_metrics:
            self._add(name, value, count)

    def _add(self, name: str, value: float, count: int) -> None:
        total = self._episode_env_infos.setdefault(name, [0.0, 0])
        total[0] += value
        total[1] += count

    def _record(self, name: str, duration_s: float) -> None:
        timing = self.timing_raw.get(name)
        if timing is None:
            timing = self.timing_raw[name] = {"count": 0, "total": 0.0, "avg": 0.0}
        timing["count"] += 1
        timing["total"] += duration_s
        timing["avg"] = timing["total"] / timing["count"]


def _array(value: Any) -> Any:
    """Return `value` as numpy where it is a tensor."""
    if type(value) is np.ndarray:
        return value
    return value if isinstance(value, (np.ndarray, np.generic, bool, float)) else to_numpy(value)
