"""Small environments with known answers, for tests of anything that steps environments."""

from __future__ import annotations

import copy
import os
import signal
import time
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

__all__ = ["CounterEnv", "FaultyEnv", "NativeCounterEnv", "SelfResettingEnv", "SpaceEnv"]

Array = np.ndarray[Any, Any]

TERMINATE_AT = 3
TRUNCATE_AT = 5


class CounterEnv(gym.Env[Any, Any]):
    """Counts: even episodes terminate after 3 steps, odd ones are truncated after 5.

    Observes ``[episode, steps]``; the reward is the action plus the steps, so that a transition
    tells where it belongs.
    """

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Box(0, 1e6, (2,), np.float64)
        self.action_space = gym.spaces.Discrete(10)
        self.episode = -1
        self.steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Start the next episode."""
        super().reset(seed=seed)
        self.episode += 1
        self.steps = 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Count one step."""
        self.steps += 1
        terminated = self.episode % 2 == 0 and self.steps == TERMINATE_AT
        truncated = self.episode % 2 == 1 and self.steps == TRUNCATE_AT
        return self._observe(), float(action + self.steps), terminated, truncated, {}

    def _observe(self) -> Array:
        return np.array([self.episode, self.steps], dtype=np.float64)


class NativeCounterEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """`CounterEnv` vectorised by hand, in any autoreset mode.

    Args:
        num_envs: rows.
        mode: how ended rows are reset; None declares nothing.
        reset_mask: declare that `reset` takes ``options["reset_mask"]``.
    """

    def __init__(
        self, num_envs: int, mode: AutoresetMode | None, *, reset_mask: bool = False
    ) -> None:
        self.num_envs = num_envs
        self.metadata: dict[str, Any] = {"reset_mask": reset_mask}
        if mode is not None:
            self.metadata["autoreset_mode"] = mode
        self._mode = mode
        single = CounterEnv()
        self.single_observation_space = single.observation_space
        self.single_action_space = single.action_space
        self.observation_space = batch_space(single.observation_space, num_envs)
        self.action_space = batch_space(single.action_space, num_envs)
        self._episode = np.full(num_envs, -1)
        self._steps = np.zeros(num_envs, dtype=np.int64)
        self._ended = np.zeros(num_envs, dtype=np.bool_)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Start the next episode of all rows, or of those in the mask."""
        everything = np.ones(self.num_envs, dtype=np.bool_)
        self._restart((options or {}).get("reset_mask", everything))
        return self._observe(), {}

    def step(self, actions: Any) -> tuple[Array, Array, Array, Array, dict[str, Any]]:
        """Count one step of every row."""
        dummies = self._ended.copy()
        self._steps += 1
        reward = (actions + self._steps).astype(np.float64)
        terminated = (self._episode % 2 == 0) & (self._steps == TERMINATE_AT)
        truncated = (self._episode % 2 == 1) & (self._steps == TRUNCATE_AT)
        if self._mode is AutoresetMode.NEXT_STEP:
            self._restart(dummies)
            reward[dummies], terminated[dummies], truncated[dummies] = 0.0, False, False
        self._ended = terminated | truncated
        info: dict[str, Any] = {}
        if self._mode is AutoresetMode.SAME_STEP and self._ended.any():
            final_obs = np.full(self.num_envs, None, dtype=object)
            for row in np.flatnonzero(self._ended):
                final_obs[row] = self._observe()[row]
            info = {"final_obs": final_obs, "_final_obs": self._ended.copy()}
            self._restart(self._ended.copy())
        return self._observe(), reward, terminated, truncated, info

    def _restart(self, mask: Array) -> None:
        self._episode[mask] += 1
        self._steps[mask] = 0
        self._ended[mask] = False

    def _observe(self) -> Array:
        return np.stack([self._episode, self._steps], axis=1).astype(np.float64)


class SpaceEnv(gym.Env[Any, Any]):
    """Observes samples of any space, remembers the actions it got, truncates after `length` steps.

    Args:
        action_space: any space.
        observation_space: any space; by default two numbers.
        length: steps per episode.

    Attributes:
        received: every action since construction.
    """

    def __init__(
        self,
        action_space: gym.Space[Any],
        observation_space: gym.Space[Any] | None = None,
        length: int = 4,
    ) -> None:
        self.action_space = copy.deepcopy(action_space)  # rows must not share random streams
        self.observation_space = copy.deepcopy(observation_space or gym.spaces.Box(-1, 1, (2,)))
        self.length = length
        self.received: list[Any] = []
        self.steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Start an episode; a seed fixes the observations."""
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Remember the action."""
        self.received.append(action)
        self.steps += 1
        return self.observation_space.sample(), 1.0, False, self.steps == self.length, {}


class FaultyEnv(CounterEnv):
    """A `CounterEnv` that raises, hangs or dies.

    Args:
        fault: what goes wrong; ``"ignore"`` hangs and does not end when asked to (SIGTERM).
        on: in which call.
        at: in which step of an episode, for ``on="step"``.
    """

    def __init__(
        self,
        fault: Literal["raise", "hang", "ignore", "die", "none"] = "none",
        *,
        on: Literal["make", "reset", "step"] = "step",
        at: int = 2,
    ) -> None:
        super().__init__()
        self._fault, self._on, self._at = fault, on, at
        if on == "make":
            self._fail()

    def _fail(self) -> None:
        if self._fault == "raise":
            raise ZeroDivisionError("the simulator is broken")
        if self._fault == "ignore":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if self._fault in ("hang", "ignore"):
            time.sleep(1e6)
        if self._fault == "die":
            os._exit(7)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        """Start the next episode, or fail."""
        if self._on == "reset":
            self._fail()
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Count one step, or fail."""
        if self._on == "step" and self.steps + 1 == self._at:
            self._fail()
        return super().step(action)


class SelfResettingEnv(CounterEnv):
    """The common mistake: resets itself inside `step` when its episode ends."""

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        """Count one step."""
        result = super().step(action)
        if result[2] or result[3]:
            self.reset()
        return result
