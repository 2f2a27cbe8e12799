"""What an environment returns, checked where it returns it: names what was found and expected.

Innermost of the wrappers, so that the others meet only what they can work with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from gymnasium.vector import AutoresetMode

from plugrl_env_client.errors import EnvContractError
from plugrl_env_client.utils.observation import Observation
from plugrl_env_client.utils.wrappers import VectorWrapper
from plugrl_envs.contract import describe

if TYPE_CHECKING:
    import gymnasium as gym
    import numpy.typing as npt

__all__ = ["ContractWrapper", "Layout", "check_layout", "layout_of"]

Layout: TypeAlias = dict[str, tuple[np.dtype[Any], tuple[int, ...]]]
"""Per array of an observation, by ``states['name']``: its dtype and the shape of one row."""

_SUCCESS_KEYS: Final = ("is_success", "success")


class ContractWrapper(VectorWrapper):
    """Refuses what breaks the contract of `BaseEnv`, and hands on arrays.

    Args:
        env: anything with the methods of a `BaseEnv`.
    """

    def __init__(self, env: gym.vector.VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        self._layout: Layout | None = None
        self._resets_itself = env.metadata.get("autoreset_mode") is AutoresetMode.SAME_STEP

    def reset(
        self, *, seed: Any = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Reset; raises `EnvContractError` for anything but ``(observation, info)``."""
        found = self.env.reset(seed=seed, options=options)
        if not isinstance(found, tuple) or len(found) != 2:
            raise EnvContractError(
                f"reset returned {_describe(found)}; expected the two values (observation, info)"
            )
        obs, info = found
        rows = (options or {}).get("reset_indices")
        if rows is None:
            self._check_observation(obs, (self.num_envs,), "reset")
        else:
            what = f"reset(options={{'reset_indices': {np.asarray(rows).tolist()}}})"
            self._check_observation(obs, (len(rows), self.num_envs), what)
        return obs, _info(info, "reset")

    def step(
        self, actions: Any
    ) -> tuple[Observation, npt.NDArray[np.float64], Any, Any, dict[str, Any]]:
        """Step; raises `EnvContractError` for anything but the five values, each of n rows."""
        found = self.env.step(actions)
        if not isinstance(found, tuple) or len(found) != 5:
            raise EnvContractError(
                f"step returned {_describe(found)}; expected the five values (observation, "
                "rewards, terminated, truncated, info). A single `done` is told apart: terminated "
                "where the task is over, truncated where only the time is"
            )
        obs, rewards, terminated, truncated, info = found
        self._check_observation(obs, (self.num_envs,), "step")
        rewards = self._rewards(rewards)
        terminated = self._flags(terminated, "terminated")
        truncated = self._flags(truncated, "truncated")
        self._check_info(_info(info, "step"), terminated | truncated)
        return obs, rewards, terminated, truncated, info

    def _check_observation(self, obs: Any, sizes: tuple[int, ...], what: str) -> None:
        if not isinstance(obs, Observation) or len(obs) not in sizes:
            expected = " or of all ".join(f"{size} rows" for size in dict.fromkeys(sizes))
            raise EnvContractError(
                f"{what} shows {_describe(obs)}; expected an Observation of {expected}"
            )
        if self._layout is None:
            self._layout = layout_of(obs)
        check_layout(obs, self._layout, what)

    def _rewards(self, rewards: Any) -> npt.NDArray[np.float64]:
        try:
            earned = np.asarray(rewards)
        except ValueError:  # lists of several lengths
            earned = np.empty(0, object)
        if earned.shape != (self.num_envs,) or earned.dtype.kind not in "fiub":
            raise EnvContractError(
                f"step returned rewards that are {_describe(rewards)}; expected one number per "
                f"row, of shape ({self.num_envs},)"
            )
        earned = earned.astype(np.float64)
        if not np.isfinite(earned).all():
            row = int(np.flatnonzero(~np.isfinite(earned))[0])
            raise EnvContractError(f"row {row} of the environment earned a reward of {earned[row]}")
        return earned

    def _flags(self, flags: Any, name: str) -> npt.NDArray[np.bool_]:
        try:
            ended = np.asarray(flags)
        except ValueError:  # lists of several lengths
            ended = np.empty(0, object)
        if ended.dtype != np.bool_ or ended.shape != (self.num_envs,):
            raise EnvContractError(
                f"step returned {name} that is {_describe(flags)}; expected one bool per row, of "
                f"shape ({self.num_envs},)"
            )
        return ended

    def _check_info(self, info: dict[str, Any], done: npt.NDArray[np.bool_]) -> None:
        for key in _SUCCESS_KEYS:
            if key in info and np.size(info[key]) != self.num_envs:
                raise EnvContractError(
                    f"info[{key!r}] is {_describe(info[key])}; expected one bool per row, of shape "
                    f"({self.num_envs},)"
                )
        if not self._resets_itself or not done.any():
            return
        final, mask = info.get("final_obs"), np.asarray(info.get("_final_obs"))
        fits = isinstance(final, Observation) and mask.dtype == np.bool_
        if not fits or mask.shape != done.shape or (done & ~mask).any():
            raise EnvContractError(
                f"rows {np.flatnonzero(done).tolist()} ended and were reset in the same step; "
                "expected their last observations in info['final_obs'], an Observation of all "
                "rows, and the mask info['_final_obs'], one bool per row; found the keys "
                f"{sorted(info)}"
            )
        self._check_observation(final, (self.num_envs,), "info['final_obs']")


def layout_of(obs: Observation) -> Layout:
    """Return the dtype and the shape of one row of every array.

    Raises:
        EnvContractError: images are not ``uint8 [n, h, w, c]``, or states not numbers ``[n, d]``.
    """
    layout: Layout = {}
    for name, image in obs.images.items():
        if not isinstance(image, np.ndarray) or image.dtype != np.uint8 or image.ndim != 4:
            raise EnvContractError(
                f"the image {name!r} is {_describe(image)}; expected uint8 of shape [n, h, w, c]"
            )
        layout[f"images[{name!r}]"] = image.dtype, image.shape[1:]
    for name, state in obs.states.items():
        numbers = isinstance(state, np.ndarray) and state.dtype.kind in "fiu"
        if not numbers or state.ndim != 2:
            raise EnvContractError(
                f"the state {name!r} is {_describe(state)}; expected numbers of shape [n, d]"
            )
        layout[f"states[{name!r}]"] = state.dtype, state.shape[1:]
    return layout


def check_layout(obs: Observation, first: Layout, what: str) -> None:
    """Refuse an observation whose arrays are not those of the first one.

    Raises:
        EnvContractError: names, shapes or dtypes differ; or as `layout_of`.
    """
    now = layout_of(obs)
    if now == first:
        return
    differ = [name for name in first | now if now.get(name) != first.get(name)]
    name = differ[0]
    was, found = (_describe_row(side.get(name)) for side in (first, now))
    raise EnvContractError(
        f"{what} shows {name} as {found}, the first observation showed {was}; names, shapes and "
        "dtypes of observations must stay what they are"
    )


def _describe_row(entry: tuple[np.dtype[Any], tuple[int, ...]] | None) -> str:
    if entry is None:
        return "nothing"
    dtype, shape = entry
    return f"{dtype} [n, {', '.join(map(str, shape))}]"


def _info(info: Any, what: str) -> dict[str, Any]:
    if not isinstance(info, dict):
        raise EnvContractError(f"{what} returned an info that is {_describe(info)}; expected a map")
    return info


def _describe(value: Any) -> str:
    return repr(value) if isinstance(value, Observation) else describe(value)
