"""One row of a vector environment: a Gymnasium environment that is reset when its episode ends.

Used by the rows in this process and by the worker processes, so that both behave alike.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from plugrl_envs.contract import QuickLook, check_reset, check_step

if TYPE_CHECKING:
    from collections.abc import Callable

    import gymnasium as gym

__all__ = ["Row"]


class Row:
    """An environment, reset in the step that ends its episode.

    Args:
        env_fn: makes the environment.

    Attributes:
        env: the environment.
    """

    __slots__ = ("_base", "_is_right", "_options", "_resets", "_resets_expected", "_warned", "env")

    def __init__(self, env_fn: Callable[[], gym.Env[Any, Any]]) -> None:
        self.env = env_fn()
        self._base = self.env.unwrapped
        self._is_right = QuickLook(self.env.observation_space)
        self._resets = 0
        self._resets_expected = 0
        self._warned = False
        self._options: dict[str, Any] | None = None
        self._watch()

    def _watch(self) -> None:
        """Count the base environment's resets, and look at them and at its first step.

        Whoever calls them: wrappers already stumble over what breaks Gymnasium's contract.
        """
        base = self._base
        reset, step = base.reset, base.step

        def watched_reset(*args: Any, **kwargs: Any) -> Any:
            self._resets += 1
            found = reset(*args, **kwargs)
            check_reset(base, found)
            return found

        def first_step(*args: Any, **kwargs: Any) -> Any:
            base.step = step  # type: ignore[method-assign]  # later ones are looked at in `step`
            found = step(*args, **kwargs)
            check_step(base, found)
            return found

        # On the instance, so that a call from inside the environment's own step counts too.
        base.reset = watched_reset  # type: ignore[method-assign]
        base.step = first_step  # type: ignore[method-assign]

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Step, and return Gymnasium's five values.

        Raises:
            EnvResultError: the environment returned something else.
        """
        found = self.env.step(action)
        if not self._is_right(found):
            check_step(self.env, found, self._name())
        return found

    def _name(self) -> str:
        """Return what decides how observations look: the environment, or its outermost wrapper."""
        env, base = self.env, self._base
        shows_bases = env.observation_space is base.observation_space
        return type(base if shows_bases else env).__name__

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Reset and return the first observation and its info; `restart` keeps the options."""
        self._options = options
        result = self.env.reset(seed=seed, options=options)
        check_reset(self.env, result, self._name())
        self._resets_expected = self._resets
        return result

    def restart(self) -> tuple[Any, dict[str, Any]]:
        """Reset after an episode's end; warn once if the environment had reset itself already."""
        result = self.env.reset(options=self._options)
        if not self._is_right.sees(result[0]):
            check_reset(self.env, result, self._name())
        if self._resets > self._resets_expected + 1 and not self._warned:
            self._warned = True
            warnings.warn(
                f"{self._base} resets itself inside step(), and is reset again when its episode "
                "ends: every second initial state is skipped. Remove the reset from its step().",
                RuntimeWarning,
                stacklevel=3,
            )
        self._resets_expected = self._resets
        return result
