"""The one vector environment that policies meet, whatever steps its rows."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from plugrl_envs.actions import ActionBorder
from plugrl_envs.async_vector import AsyncRows
from plugrl_envs.autoreset import same_step
from plugrl_envs.seeding import derive_seeds
from plugrl_envs.snapshot import get_state, set_state
from plugrl_envs.spaces import check_observation_space
from plugrl_envs.sync_vector import SyncRows

__all__ = ["CanonicalVectorEnv"]

Array = np.ndarray[Any, Any]


class CanonicalVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """A vector environment with one reset semantics and one action border.

    After `step`, the observation of a row whose episode ended is the next episode's first. The
    ended episode's own last observation stands in ``info["final_obs"]``, a batch in the layout of
    the observation whose rows are meaningful where ``info["_final_obs"]`` (bool ``[N]``) is set;
    both keys are present only on steps where a row ended.

    Actions are checked and converted by `ActionBorder`: a policy acts in ``0..n-1`` whatever the
    ``start`` of a Discrete space, so `single_action_space` starts at 0 here.

    Args:
        vec_env: any Gymnasium vector environment that declares its autoreset mode.

    Raises:
        AutoresetError: `vec_env` declares no autoreset mode, or one that cannot be mapped.
        UnsupportedSpaceError: a space that policies cannot be given.
    """

    def __init__(self, vec_env: gym.vector.VectorEnv[Any, Any, Any]) -> None:
        self.env = vec_env
        self.num_envs = vec_env.num_envs
        try:
            check_observation_space(vec_env.single_observation_space)
            self._border = ActionBorder(vec_env.single_action_space, self.num_envs)
            self._step = same_step(vec_env)
        except BaseException:
            self.close()  # nobody else holds `vec_env` and the processes it may have
            raise
        self._seeds_by_row = isinstance(vec_env.unwrapped, _SEEDED_BY_ROW)
        self.metadata = {**vec_env.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.spec = vec_env.spec
        self.render_mode = vec_env.render_mode
        self.single_observation_space = vec_env.single_observation_space
        self.observation_space = vec_env.observation_space
        self.single_action_space = self._border.policy_space
        self.action_space = batch_space(self._border.policy_space, self.num_envs)

    def reset(
        self, *, seed: int | list[int] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all rows, or those in ``options["reset_mask"]`` where the rows allow it.

        Args:
            seed: a base seed, from which every row gets its own and the action spaces theirs; or
                one seed per row. None continues the random streams.
            options: passed on to the environments.

        Returns:
            Observations ``[N, ...]`` and the info.
        """
        if seed is None:
            return self.env.reset(options=options)
        seeds = derive_seeds(seed, self.num_envs) if isinstance(seed, int) else list(seed)
        self.single_action_space.seed(seeds[0])
        self.action_space.seed(seeds[0])
        if self._seeds_by_row:
            return self.env.reset(seed=seeds, options=options)  # type: ignore[arg-type]  # Gymnasium's own take a list
        return self.env.reset(seed=seeds[0], options=options)

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step every row.

        Args:
            actions: ``[N, *A]`` array, tensor or list; for one row also ``[*A]``.

        Returns:
            Observations ``[N, ...]``, rewards ``[N]``, terminated and truncated (bool ``[N]``),
            and the info.

        Raises:
            InvalidActionError: the actions have the wrong shape, dtype or values.
            EnvWorkerError: a row raised, hung or died.
        """
        return self._step(self._border.convert(actions))

    def get_state(self) -> dict[str, Any] | None:
        """Return what continues all episodes bit for bit, or None if it cannot be captured."""
        inner = get_state(self.env)
        return None if inner is None else {"env": inner}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_state` returned from an environment made in the same way."""
        set_state(self.env, state["env"])

    def render(self) -> tuple[Any, ...] | None:
        """Return one frame per row."""
        return self.env.render()

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of, or read an attribute from, every row."""
        result: tuple[Any, ...] = self.env.call(name, *args, **kwargs)  # type: ignore[attr-defined]  # native environments raise AttributeError
        return result

    def close_extras(self, **kwargs: Any) -> None:
        """Close all rows."""
        self.env.close(**kwargs)


_SEEDED_BY_ROW = (SyncRows, AsyncRows, gym.vector.SyncVectorEnv, gym.vector.AsyncVectorEnv)
