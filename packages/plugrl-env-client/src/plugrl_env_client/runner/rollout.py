"""The loop: ask for rows whose chunk ran out, step all rows, report chunks that finished.

One message carries all rows that are due. A row whose episode ends reports at once, with the last
observation of that episode, and begins a new episode before it asks again.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode

from plugrl_env_client.agent.websocket_env_client_agent import ConnectionReplaced, ServerStopped
from plugrl_env_client.envs.base_env import Observation
from plugrl_env_client.errors import ActionShapeError
from plugrl_env_client.runner.plans import Plans
from plugrl_env_client.runner.timing import Pacer, RolloutTiming

if TYPE_CHECKING:
    import gymnasium as gym

    from plugrl_env_client.agent.base_agent import BaseAgent
    from plugrl_env_client.recorder import Recorder

__all__ = ["RolloutLoop", "RolloutOptions", "RolloutResult", "rollout"]

_EPISODE_KEYS = ("r", "l", "s")
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """How to roll out."""

    num_episodes: int
    """Episodes to finish, spread evenly over the rows: a row's further ones do not count, so that
    short episodes are not favoured."""
    replan_steps: int | None = None
    """Use at most so many steps of a chunk; None uses all."""
    seed: int | None = None
    """Of the first reset."""
    fps: float | None = None
    """Steps per second; None steps as fast as it can."""
    action_horizon: int | None = None
    """Steps of a chunk, if that is known."""
    log_every_s: float = 30.0
    """How often to log the timing."""


@dataclasses.dataclass(kw_only=True)
class RolloutResult:
    """What a rollout did."""

    episodes: int = 0
    """Episodes that counted."""
    env_steps: int = 0
    """Over all rows."""
    returns: array[float] = dataclasses.field(default_factory=lambda: array("d"))
    """Of the episodes that counted, where the environment reports them."""
    successes: array[int] = dataclasses.field(default_factory=lambda: array("b"))
    """1 or 0 of those that tell success."""
    connections_lost: int = 0
    server_stopped: bool = False
    timing: RolloutTiming = dataclasses.field(default_factory=RolloutTiming)

    def summary(self) -> dict[str, Any]:
        """Return plain numbers; means are None where there is nothing to average."""
        return {
            "episodes": self.episodes,
            "env_steps": self.env_steps,
            "mean_return": float(np.mean(self.returns)) if self.returns else None,
            "success_rate": float(np.mean(self.successes)) if self.successes else None,
            "connections_lost": self.connections_lost,
            "server_stopped": self.server_stopped,
            "timing": self.timing.as_dict(),
        }


def rollout(
    env: gym.vector.VectorEnv[Any, Any, Any],
    agent: BaseAgent,
    *,
    num_episodes: int,
    replan_steps: int | None = None,
    num_envs: int | None = None,
    recorder: Recorder | None = None,
    seed: int | None = None,
) -> RolloutResult:
    """Roll out until enough episodes have ended or the server says that the run is finished.

    Args:
        env: what `plugrl_env_client.utils.make_vec` returns.
        agent: chooses actions.
        num_episodes: how many, over all rows.
        replan_steps: use at most so many steps of a chunk; None uses all.
        num_envs: rows that the caller expects; None takes those of `env`.
        recorder: writes to disk.
        seed: of the first reset.

    Raises:
        ValueError: `replan_steps` is longer than a chunk, or `num_envs` is not the environment's.
        EnvContractError: the environment broke its contract.
        ActionShapeError: chunks of actions do not fit the environment; the agent is told so.
        WireError: the connection ended in a way that a new one would not mend.
    """
    if num_envs is not None and num_envs != env.num_envs:
        raise ValueError(f"num_envs is {num_envs}, the environment has {env.num_envs} rows")
    options = RolloutOptions(num_episodes=num_episodes, replan_steps=replan_steps, seed=seed)
    return RolloutLoop(env, agent, options, recorder).run()


class RolloutLoop:
    """One rollout; see `rollout`."""

    def __init__(
        self,
        env: gym.vector.VectorEnv[Any, Any, Any],
        agent: BaseAgent,
        options: RolloutOptions,
        recorder: Recorder | None = None,
    ) -> None:
        self._env = env
        self._agent = agent
        self._options = options
        self._recorder = recorder
        self._resets_itself = env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP
        n = self._num_envs = env.num_envs
        self._quota = options.num_episodes // n + (np.arange(n) < options.num_episodes % n)
        self._counted = np.zeros(n, np.int64)
        self._plans = Plans(n, env.single_action_space.shape or ())
        self._pacer = Pacer(options.fps)
        self._obs = Observation(text=[""] * n)
        self._next_log_s = time.monotonic() + options.log_every_s
        self.result = RolloutResult()
        self._timing = self.result.timing

    def run(self) -> RolloutResult:
        """Roll out; see `rollout`."""
        self._begin()
        try:
            while (self._counted < self._quota).any():
                try:
                    self._ask()
                    while not self._step():
                        pass
                except ConnectionReplaced as lost:
                    _log.warning("%s; dropped the chunks in flight, connecting again", lost)
                    self.result.connections_lost += 1
                    self._plans.drop()
        except ServerStopped:
            _log.info("the server says that the run is finished")
            self.result.server_stopped = True
        except ActionShapeError as error:
            self._agent.refuse(str(error))
            raise
        _log.info("rolled out %d episodes: %s", self.result.episodes, self._timing.describe())
        return self.result

    def _begin(self) -> None:
        with self._timing.measure("env_reset"):
            obs, _ = self._env.reset(seed=self._options.seed)
        self._obs = obs
        if self._recorder is not None:
            self._recorder.begin(self._obs)

    def _ask(self) -> None:
        asking = self._plans.without_chunk()
        with self._timing.measure("infer_obs_pack"):
            everybody = len(asking) == self._num_envs
            obs = self._obs if everybody else self._obs.rows(asking)
            step_ids = self._plans.step_id[asking]
        with self._timing.measure("infer_wait"):
            data = self._agent.infer(obs, env_indices=asking, step_ids=step_ids)
        action = data["action"]
        self._plans.load(asking, action, use_steps=self._steps_of(len(action)))

    def _steps_of(self, horizon: int) -> int:
        """Tell how many steps of a chunk to take."""
        declared, replan_steps = self._options.action_horizon, self._options.replan_steps
        if declared is not None and horizon != declared:
            raise ActionShapeError(
                f"the server sent a chunk of {horizon} steps; {declared} were declared"
            )
        if replan_steps is None:
            return horizon
        if replan_steps > horizon:
            raise ActionShapeError(
                f"replan_steps is {replan_steps}; the server's chunks have {horizon} steps"
            )
        return replan_steps

    def _step(self) -> bool:
        """Step every row once; tell whether chunks finished, which rows must now ask for."""
        timing, plans = self._timing, self._plans
        with timing.measure("pace"):
            timing.late_steps += not self._pacer.wait()
        actions = plans.next_actions()
        with timing.measure("env_step"):
            obs, rewards, terminated, truncated, info = self._env.step(actions)
        done = terminated | truncated
        timing.steps += 1
        self.result.env_steps += self._num_envs
        finished = np.flatnonzero(plans.add(rewards) | done)
        final = info["final_obs"] if self._resets_itself and done.any() else None
        if self._recorder is not None:
            with timing.measure("record"):
                shown = obs if final is None else final
                self._recorder.step(actions, rewards, terminated, truncated, shown)
        lost = None
        if len(finished):
            try:
                self._report(finished, obs, final, (terminated, truncated), info)
            except ConnectionReplaced as error:
                lost = error
            plans.finish(finished, done)
        self._obs = self._restarted(obs, done)
        self._log_sometimes()
        if lost is not None:
            raise lost
        return bool(len(finished))

    def _report(
        self,
        finished: npt.NDArray[np.int64],
        obs: Observation,
        final: Observation | None,
        flags: tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]],
        info: dict[str, Any],
    ) -> None:
        terminated, truncated = flags
        ended = np.flatnonzero(terminated | truncated)
        shown = obs.rows(finished)
        if final is not None:
            shown = shown.with_rows(np.searchsorted(finished, ended), final.rows(ended))
        report = self._count(finished, ended, info) if len(ended) else {}
        with self._timing.measure("feedback"):
            self._agent.feedback(
                shown,
                self._plans.reward[finished].astype(np.float32),
                terminated[finished],
                truncated[finished],
                report,
                env_indices=finished,
                step_ids=self._plans.step_id[finished],
                steps=self._plans.position[finished],
            )

    def _count(
        self, finished: npt.NDArray[np.int64], ended: npt.NDArray[np.int64], info: dict[str, Any]
    ) -> dict[str, Any]:
        """Count the episodes that ended, and return what the server is told about them."""
        counts = np.zeros(self._num_envs, np.bool_)
        counts[ended] = self._counted[ended] < self._quota[ended]
        rows = np.flatnonzero(counts)
        self._counted[rows] += 1
        self.result.episodes += len(rows)
        episode = info.get("episode")
        if episode is None:
            return {}
        self.result.returns.extend(episode["r"][rows].tolist())
        if "s" in episode:
            self.result.successes.extend(episode["s"][rows].tolist())
        if self._recorder is not None:
            self._recorder.episodes(ended, episode, counts)
        told = {key: episode[key][finished] for key in _EPISODE_KEYS if key in episode}
        return {"episode": {**told, "mask": counts[finished]}}

    def _restarted(self, obs: Observation, done: npt.NDArray[np.bool_]) -> Observation:
        """Begin the next episode of rows that do not do so themselves."""
        if not done.any():
            return obs
        rows = np.flatnonzero(done)
        if not self._resets_itself:
            with self._timing.measure("env_reset"):
                first, _ = self._env.reset(options={"reset_indices": rows})
            obs = obs.with_rows(rows, first if len(first) == len(rows) else first.rows(rows))
        if self._recorder is not None:
            self._recorder.restart(rows, obs)
        return obs

    def _log_sometimes(self) -> None:
        now_s = time.monotonic()
        if now_s >= self._next_log_s:
            self._next_log_s = now_s + self._options.log_every_s
            _log.info("%d episodes: %s", self.result.episodes, self._timing.describe())
            if self._recorder is not None:
                self._recorder.flush()
