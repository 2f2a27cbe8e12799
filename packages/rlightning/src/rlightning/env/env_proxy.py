"""`EnvProxy`: an environment worker that lives elsewhere, with the surface of `BaseEnv`.

A worker that dies is started again with new episodes; the episodes that were under way are lost and
counted. Knows nothing about what carries calls to the worker.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import uuid
from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.env.utils.utils import default_env_preprocess_fn
from rlightning.errors import EnvWorkerError, WorkerLostError
from rlightning.runtime.frames import with_arrays
from rlightning.runtime.proxy import Proxy
from rlightning.runtime.supervision import Supervised
from rlightning.runtime.turns import Turns
from rlightning.utils.seeding import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlightning.config import EnvConfig
    from rlightning.env.base_env import BaseEnv
    from rlightning.env.patient_worker import PatientHandle
    from rlightning.runtime.base import Future, Handle
    from rlightning.types import EnvMeta, EnvRet, PolicyResponse

__all__ = ["EnvProxy", "make_env"]

_WHERE_LOST: dict[str, Any] = {
    "get_env_stats": {},
    "get_state": None,
    "apply_evaluate_cfg": None,
    "restore_evaluate_cfg": None,
    "finish_rollout": None,
    "offload": None,
    "reload": None,
    "print_timing_summary": None,
}
"""What calls between steps return of a worker that has died; the next step starts it again."""


def make_env(
    kind: type[BaseEnv],
    config: EnvConfig,
    worker_index: int,
    preprocess_fn: Any,
    env_id: str,
    purpose: str,
) -> BaseEnv:
    """Return the environment of a worker; called where it lives."""
    if not _sends_arrays(kind, preprocess_fn):
        importlib.import_module("torch")  # now, and not within the deadline of the first step
    env = kind(config, worker_index=worker_index, preprocess_fn=preprocess_fn)
    env.env_id = env_id
    env.purpose = purpose  # type: ignore[assignment]  # one of the two, from `EnvGroup`
    return env


def _sends_arrays(kind: type[BaseEnv], preprocess_fn: Any) -> bool:
    """Return whether actions go to the worker as arrays: nobody there minds."""
    return kind.takes_arrays and preprocess_fn is default_env_preprocess_fn


class EnvProxy(Proxy):
    """An environment worker elsewhere.

    Args:
        kind: its class.
        config: its section.
        worker_index: its position among the workers of the run.
        preprocess_fn: from a response to an action.
        purpose: ``"train"`` or ``"eval"``.
        spawn: starts a worker: gets `make_env` and its arguments. Of an environment that
            `BaseEnv.waits_for_others` it may return one that is shared.
    """

    def __init__(
        self,
        kind: type[BaseEnv],
        config: EnvConfig,
        worker_index: int,
        preprocess_fn: Any,
        purpose: str,
        spawn: Callable[[Callable[..., Any], tuple[Any, ...]], Supervised | PatientHandle],
    ) -> None:
        self.env_id = f"{uuid.uuid4()}-{worker_index}"
        self.config = config
        self.worker_index = worker_index
        self.purpose = purpose
        self.num_envs = config.num_envs
        self.max_episode_steps = config.max_episode_steps
        self.has_test_set = False
        """Whether the worker has other tasks for testing; known after `init`."""
        self.lost_episodes = 0
        """How many episodes were lost since `take_lost_episodes` was last asked."""
        self._supervised = spawn(
            make_env, (kind, config, worker_index, preprocess_fn, self.env_id, purpose)
        )
        super().__init__(kind, self._supervised)
        self._as_arrays = _sends_arrays(kind, preprocess_fn)
        self._answer: Future | None = None
        self.turns: Turns | None = None
        """While the worker and a policy's take turns, what they have done."""
        self.can_take_turns = isinstance(self._supervised, Supervised)
        """Whether that makes sense: not of environments that wait for others."""
        self._started = False
        self._evaluates = False
        self._seed: int | None = None
        self._reset_options: dict[str, Any] = {}

    @property
    def address(self) -> str:
        """Which machine the worker is on."""
        return self._supervised.address

    @property
    def restarts(self) -> int:
        """How often the worker was started again."""
        return self._supervised.restarts

    def get_env_id(self) -> str:
        """Return the unique name of this worker, which stays when it is started again."""
        return self.env_id

    def get_max_episode_steps(self) -> int | None:
        """Return the configured limit of an episode, in steps."""
        return self.max_episode_steps

    def init(self) -> EnvMeta:
        """Prepare the worker for the first reset; return the spaces of one row."""
        meta: EnvMeta = self._call("init")
        self.has_test_set = bool(self._read("has_test_set"))
        self._started = True
        return meta

    def apply_evaluate_cfg(self) -> None:
        """Switch to the settings of evaluation."""
        self._evaluates = True
        self._call("apply_evaluate_cfg")

    def restore_evaluate_cfg(self) -> None:
        """Switch back to the settings of training."""
        self._evaluates = False
        self._call("restore_evaluate_cfg")

    def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._call(method, *args, **kwargs)
        except WorkerLostError:
            if method not in _WHERE_LOST:
                raise
            return copy.copy(_WHERE_LOST[method])

    def begin_reset(self, *args: Any, **kwargs: Any) -> None:
        """Begin what `_reset` returns."""
        self._seed = kwargs.get("seed", self._seed)
        self._reset_options = {name: item for name, item in kwargs.items() if name != "seed"}
        self._answer = self.begin("_reset", *args, **kwargs)

    def begin_step(self, policy_resp: PolicyResponse) -> None:
        """Begin what `_step` returns; nothing where it has begun already, or was done in turns."""
        if self._answer is not None or (self.turns is not None and self.turns.has_outcome):
            return
        if self._as_arrays:
            policy_resp = with_arrays(policy_resp)
        self._answer = self.begin("_step", policy_resp)

    def is_ready(self, timeout_s: float = 0.0) -> bool:
        """Return whether what was begun has come, within `timeout_s`."""
        return self._answer is None or self._answer.poll(timeout_s)

    def _reset(self, *args: Any, **kwargs: Any) -> EnvRet:
        if self._answer is None:
            self.begin_reset(*args, **kwargs)
        return self._take()

    def begin_turns(self, policy: Handle, env_ret: EnvRet, steps: int) -> Turns | None:
        """Let the worker step with what a policy's worker answers, so many times; see `Turns`.

        Args:
            policy: the worker of a policy.
            env_ret: what this environment returned last.
            steps: how many steps.
        """
        return Turns.begin(
            self._supervised,
            policy,
            ask="_step",
            answer="answer",
            question=env_ret,
            further=[False],  # not deterministic
            rounds=steps,
            as_arrays=self._as_arrays,
        )

    def _step(self, policy_resp: PolicyResponse) -> EnvRet:
        done = None if self.turns is None else self.turns.take_outcome()
        if done is not None:
            return done  # type: ignore[no-any-return]  # what `_step` returned there
        if self._answer is None:
            self.begin_step(policy_resp)
        return self._take()

    def _take(self) -> EnvRet:
        """Return what was begun; of a worker that died, its first observation after a restart."""
        answer, self._answer = self._answer, None
        try:
            env_ret: EnvRet = answer.result()  # type: ignore[union-attr]  # begun by the caller
        except WorkerLostError as error:
            return self._start_again(error)
        return env_ret

    def _start_again(self, error: WorkerLostError) -> EnvRet:
        try:
            env_ret: EnvRet = self._supervised.restore(error, self._prepare)
        except WorkerLostError as final:
            raise EnvWorkerError(str(final)) from final
        self.lost_episodes += self.num_envs
        env_ret.info["_lost"] = np.ones(self.num_envs, bool) if self.num_envs > 1 else np.True_
        return env_ret

    def _prepare(self, handle: Handle) -> EnvRet:
        handle.call("init").result()
        if self._evaluates:
            handle.call("apply_evaluate_cfg").result()
        kwargs = dict(self._reset_options)
        if self._seed is not None:
            kwargs["seed"] = derive_seed(self._seed, "restart", self._supervised.restarts)
        env_ret: EnvRet = handle.call("_reset", **kwargs).result()
        return env_ret

    def take_lost_episodes(self) -> int:
        """Return how many episodes were lost since this was last asked."""
        lost, self.lost_episodes = self.lost_episodes, 0
        return lost

    def close(self) -> None:
        """Close the environment and end its worker."""
        if self._started:
            self._started = False
            with contextlib.suppress(WorkerLostError):  # then it is closed
                self._call("close")
        self._supervised.stop()
