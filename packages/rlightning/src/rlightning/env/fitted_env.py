"""`FittedEnv`: a worker whose spaces are made to fit those of the other tasks of a run.

It stands around a worker in the process of whoever steps the group, so that what travels to and
from a worker elsewhere is the worker's own, unpadded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlightning.env.base_env import BaseEnv
    from rlightning.env.task_spaces import TaskFit
    from rlightning.types import EnvRet, PolicyResponse

__all__ = ["FittedEnv"]


class FittedEnv:
    """Everything that `env` is, with the spaces that `fit` gives it; before that, with its own.

    The policy's action is cut to the worker's own before it is preprocessed; observations, the last
    ones of episodes and actions that a person executed are padded.

    Args:
        env: a worker, here or elsewhere.
    """

    def __init__(self, env: BaseEnv) -> None:
        self._env = env
        self._fit: TaskFit | None = None

    def __getattr__(self, name: str) -> Any:
        if name in ("_env", "_fit"):  # unset while unpickling
            raise AttributeError(name)
        return getattr(self._env, name)

    def fit(self, fit: TaskFit) -> None:
        """Translate by `fit` from now on."""
        self._fit = fit

    def get_observation_space(self) -> Any:
        """Return the observation space of one row, as the policy sees it."""
        own: Any = self._env.get_observation_space
        return own() if self._fit is None else self._fit.common.observation_space

    def get_action_space(self) -> Any:
        """Return the action space of one row, as the policy sees it."""
        own: Any = self._env.get_action_space
        return own() if self._fit is None else self._fit.common.action_space

    def begin_step(self, policy_resp: PolicyResponse) -> None:
        """Begin what `_step` returns, where that happens elsewhere."""
        self._env.begin_step(self._own_action(policy_resp))

    def _reset(self, *args: Any, **kwargs: Any) -> EnvRet:
        return self._seen(self._env._reset(*args, **kwargs))  # stands for its framework

    def _step(self, policy_resp: PolicyResponse) -> EnvRet:
        return self._seen(self._env._step(self._own_action(policy_resp)))  # as above

    def _own_action(self, response: PolicyResponse) -> PolicyResponse:
        if self._fit is None or not self._fit.translates:
            return response
        extras = {**response.extras, "action": self._fit.own_action(response.action)}
        return type(response)(response.env_id, **extras)

    def _seen(self, env_ret: EnvRet) -> EnvRet:
        fit = self._fit
        if fit is None:
            return env_ret
        flags = env_ret.last_terminated
        rows = int(flags.shape[0]) if getattr(flags, "ndim", 0) else None
        info = env_ret.info
        env_ret.observation = fit.observation(env_ret.observation, rows)
        if "final_obs" in info:
            info = {**info, "final_obs": fit.observation(info["final_obs"], rows)}
        if "executed_action" in info:
            info = {**info, "executed_action": fit.common_action(info["executed_action"])}
        env_ret.info = info
        return env_ret
