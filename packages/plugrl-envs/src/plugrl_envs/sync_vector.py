"""Environments stepped one after another in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from plugrl_envs.errors import EnvResultError, EnvWorkerError
from plugrl_envs.infos import add_info, add_infos
from plugrl_envs.row import Row
from plugrl_envs.spaces import action_rows, copy_batch, empty_batch, write_row

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["SyncRows"]

Array = np.ndarray[Any, Any]


class SyncRows(gym.vector.VectorEnv[Any, Any, Any]):
    """A vector environment whose rows live in this process; resets a row in the step that ends it.

    Differs from Gymnasium's `SyncVectorEnv` in that ``info["final_obs"]`` is a dense batch, an
    error names the row it came from, and every step returns fresh arrays without a second copy.

    Args:
        env_fns: one maker per row; all rows must have the same spaces.
    """

    dense_final_obs = True

    def __init__(self, env_fns: Sequence[Callable[[], gym.Env[Any, Any]]]) -> None:
        self.num_envs = len(env_fns)
        self._rows: list[Row] = []
        self.envs: list[gym.Env[Any, Any]] = []
        try:
            for env_fn in env_fns:
                self._rows.append(Row(env_fn))
                self.envs.append(self._rows[-1].env)
            self._adopt_spaces()
        except BaseException:
            self.close()
            raise

    def _adopt_spaces(self) -> None:
        first = self.envs[0]
        self.metadata = {**first.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = first.render_mode
        self.spec = first.spec
        self.single_observation_space = first.observation_space
        self.single_action_space = first.action_space
        self.observation_space = batch_space(first.observation_space, self.num_envs)
        self.action_space = batch_space(first.action_space, self.num_envs)
        for index, env in enumerate(self.envs):
            _check_same_spaces(index, env, first)
        self._nested = isinstance(first.observation_space, (gym.spaces.Dict, gym.spaces.Tuple))
        self._observations = empty_batch(first.observation_space, self.num_envs)

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
        """
        options, mask = split_reset_mask(options, self.num_envs)
        seeds = row_seeds(seed, self.num_envs)
        info: dict[str, Any] = {}
        batch = copy_batch(self._observations)
        for index, row in enumerate(self._rows):
            if mask is not None and not mask[index]:
                continue
            try:
                observation, row_info = row.reset(seeds[index], options)
                write_row(batch, index, observation)
            except (
                Exception
            ) as error:  # whatever a user's environment raises; re-raised with its row
                raise _row_error(index, "reset", error) from error
            add_info(info, row_info, index, self.num_envs)
        self._observations = batch
        return batch, info

    def step(self, actions: Any) -> tuple[Any, Array, Array, Array, dict[str, Any]]:
        """Step every row with its action of `actions` ``[N, *A]``."""
        rewards: list[Any] = []
        terminations: list[Any] = []
        truncations: list[Any] = []
        infos: list[dict[str, Any]] = []
        info: dict[str, Any] = {}
        batch = empty_batch(self.single_observation_space, self.num_envs)
        nested, index = self._nested, 0
        each = action_rows(self.single_action_space, actions)
        try:
            for index, (row, action) in enumerate(zip(self._rows, each, strict=True)):
                observation, reward, terminated, truncated, row_info = row.step(action)
                if terminated or truncated:
                    observation, row_info = self._restart(index, observation, row_info, info)
                if nested:
                    write_row(batch, index, observation)
                else:
                    batch[index] = observation
                rewards.append(reward)
                terminations.append(terminated)
                truncations.append(truncated)
                infos.append(row_info)
            if any(infos) and not add_infos(info, infos):
                for index, row_info in enumerate(infos):
                    add_info(info, row_info, index, self.num_envs)
        except Exception as error:  # whatever a user's environment raises; re-raised with its row
            raise _row_error(index, "step", error) from error
        self._observations = batch
        return (
            batch,
            np.array(rewards, dtype=np.float64).reshape(self.num_envs),
            np.array(terminations, dtype=np.bool_),
            np.array(truncations, dtype=np.bool_),
            info,
        )

    def _restart(
        self, index: int, final: Any, row_info: dict[str, Any], info: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if "final_obs" not in info:
            info["final_obs"] = empty_batch(self.single_observation_space, self.num_envs)
            info["_final_obs"] = np.zeros(self.num_envs, dtype=np.bool_)
        write_row(info["final_obs"], index, final)
        info["_final_obs"][index] = True
        add_info(info, {"final_info": row_info}, index, self.num_envs)
        return self._rows[index].restart()

    def render(self) -> tuple[Any, ...] | None:
        """Return one frame per row."""
        return tuple(env.render() for env in self.envs)

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of, or read an attribute from, every row."""
        found = [env.get_wrapper_attr(name) for env in self.envs]
        return tuple(item(*args, **kwargs) if callable(item) else item for item in found)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """Read an attribute from every row."""
        return tuple(env.get_wrapper_attr(name) for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        """Close every row."""
        for env in self.envs:
            env.close()


def split_reset_mask(
    options: dict[str, Any] | None, num_envs: int
) -> tuple[dict[str, Any] | None, Array | None]:
    """Return `options` without ``"reset_mask"``, and the mask or None.

    Raises:
        ValueError: the mask is not a bool array ``[N]`` with a True in it.
    """
    if options is None or "reset_mask" not in options:
        return options, None
    mask = np.asarray(options["reset_mask"])
    if mask.dtype != np.bool_ or mask.shape != (num_envs,) or not mask.any():
        raise ValueError(
            f"options['reset_mask'] is {mask!r}; expected a bool array of shape ({num_envs},) "
            "with at least one True"
        )
    rest = {key: value for key, value in options.items() if key != "reset_mask"}
    return rest or None, mask


def row_seeds(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """Return one seed or None per row.

    Raises:
        ValueError: a sequence of another length than `num_envs` was given.
    """
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + row for row in range(num_envs)]
    if len(seed) != num_envs:
        raise ValueError(f"{len(seed)} seeds for {num_envs} environments; give one per row")
    return list(seed)


def _check_same_spaces(index: int, env: gym.Env[Any, Any], first: gym.Env[Any, Any]) -> None:
    for name in ("observation_space", "action_space"):
        if getattr(env, name) != getattr(first, name):
            raise ValueError(
                f"environment {index} has {name} {getattr(env, name)}, environment 0 has "
                f"{getattr(first, name)}; the rows of a vector environment share their spaces"
            )


def _row_error(index: int, during: str, error: Exception) -> EnvWorkerError:
    known = isinstance(error, EnvResultError)  # says it all
    reason = str(error) if known else f"{type(error).__name__}: {error}"
    return EnvWorkerError(index, during=during, reason=reason)
