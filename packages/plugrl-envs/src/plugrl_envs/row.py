"""One row of a vector environment: a Gymnasium environment that is reset when its episode ends.

Used by the rows in this process and by the worker processes, so that both behave alike.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from plugrl_envs.contract import check_reset, check_step

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

    __slots__ = ("_base", "_options", "_resets", "_resets_expected", "_warned", "env")

    def __init__(self, env_fn: Callable[[], gym.Env[Any, Any]]) -> None:
        self.env = env_fn()
        self._base = self.env.unwrapped
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
            base.step = step  # type: ignore[method-assign]  # later steps cost nothing
            found = step(*args, **kwargs)
            check_step(base, found)
            return found

        # On the instance, so that a call from inside the environment's own step counts too.
        base.reset = watched_reset  # type: ignore[method-assign]
        base.step = first_step  # type: ignore[method-assign]

    def reset(self, seed: int | None, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        """Reset and return the first observation and its info; `restart` keeps the options."""
        self._options = options
        result = self.env.reset(seed=seed, options=options)
        self._resets_expected = self._resets
        return result

    def restart(self) -> tuple[Any, dict[str, Any]]:
        """Reset after an episode's end; warn once if the environment had reset itself already."""
        result = self.env.reset(options=self._options)
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
