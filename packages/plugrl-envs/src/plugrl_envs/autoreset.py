"""Map Gymnasium's autoreset modes onto one: a row is reset in the step that ends its episode.

Gymnasium knows three (``metadata["autoreset_mode"]``): the next step resets the row and ignores
its action (NEXT_STEP), the same step resets it and keeps the last observation in the info
(SAME_STEP), or the caller resets it (DISABLED). Everything here returns the second, so that no
transition ever crosses a reset and no dummy step reaches a buffer.

NEXT_STEP is mapped by resetting the ended rows at once, before the dummy step could happen. An
environment that can only reset all rows together would have to step its live rows without an
action for that; it is refused rather than served with wrong transitions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from plugrl_envs.errors import AutoresetError
from plugrl_envs.spaces import copy_batch, copy_rows, empty_batch, write_row

if TYPE_CHECKING:
    from collections.abc import Callable

    StepResult = tuple[Any, Any, Any, Any, dict[str, Any]]
    Step = Callable[[Any], StepResult]
    ResetRows = Callable[[np.ndarray[Any, Any]], tuple[Any, dict[str, Any]]]

__all__ = ["same_step"]


def same_step(vec_env: VectorEnv[Any, Any, Any]) -> Step:
    """Return a step function of `vec_env` that resets ended rows in the step that ends them.

    The function returns what `VectorEnv.step` returns. On steps where a row ended, the info holds
    ``"final_obs"``, a dense batch in the layout of the observation, and the row mask
    ``"_final_obs"`` (bool ``[N]``); on other steps neither key is present.

    Raises:
        AutoresetError: the mode is not declared, or its rows cannot be reset one by one.
    """
    mode = vec_env.metadata.get("autoreset_mode")
    if not isinstance(mode, AutoresetMode):
        raise AutoresetError(
            f"{vec_env} declares the autoreset mode {mode!r} in its metadata; expected one of "
            f"{', '.join(str(known) for known in AutoresetMode)}. Set "
            "metadata['autoreset_mode'] to what the environment does when an episode ends."
        )
    if mode is AutoresetMode.SAME_STEP:
        if getattr(vec_env, "dense_final_obs", False):
            return vec_env.step
        return lambda actions: _densify(vec_env, vec_env.step(actions))
    reset_rows = _row_resetter(vec_env, mode)
    return lambda actions: _step_then_reset(vec_env.step(actions), reset_rows)


def _row_resetter(vec_env: VectorEnv[Any, Any, Any], mode: AutoresetMode) -> ResetRows:
    """Return a function that resets the rows of a mask and returns observations and infos."""
    base = vec_env.unwrapped
    if (
        mode is AutoresetMode.DISABLED
        or isinstance(base, (SyncVectorEnv, AsyncVectorEnv))
        or vec_env.metadata.get("reset_mask")
    ):
        return lambda mask: vec_env.reset(options={"reset_mask": mask})
    if vec_env.num_envs == 1:
        # With one row there is nobody else to step: the dummy step is taken here and dropped.
        ignored = vec_env.action_space.sample()

        def take_dummy_step(_mask: np.ndarray[Any, Any]) -> tuple[Any, dict[str, Any]]:
            observation, _, _, _, info = vec_env.step(ignored)
            return observation, info

        return take_dummy_step
    if base is vec_env and type(base).__name__ == "CartPoleVectorEnv":
        return lambda mask: (_reset_cartpole_rows(base, mask), {})
    raise AutoresetError(
        f"{vec_env} resets its rows in the step after an episode ends (NEXT_STEP) and cannot reset "
        "single rows, so its transitions cannot be separated from its resets. Use "
        "vectorization='sync' or 'async', make it with AutoresetMode.SAME_STEP, or, if its reset() "
        "accepts options={'reset_mask': mask}, declare metadata['reset_mask'] = True."
    )


def _step_then_reset(result: StepResult, reset_rows: ResetRows) -> StepResult:
    observation, reward, terminated, truncated, info = result
    ended = np.logical_or(terminated, truncated)
    if not np.count_nonzero(ended):
        return result
    final_obs = copy_batch(observation)
    first, reset_info = reset_rows(ended)
    observation = copy_batch(observation)
    copy_rows(observation, first, ended)
    joined = {**info, **{key: value for key, value in reset_info.items() if key not in info}}
    joined |= {
        "final_obs": final_obs,
        "_final_obs": ended,
        "final_info": info,
        "_final_info": ended,
    }
    return observation, reward, terminated, truncated, joined


def _densify(vec_env: VectorEnv[Any, Any, Any], result: StepResult) -> StepResult:
    """Turn ``final_obs`` from an object array of observations into one batch."""
    observation, reward, terminated, truncated, info = result
    ended = np.logical_or(terminated, truncated)
    if not np.count_nonzero(ended):
        if "final_obs" in info:
            info = {key: info[key] for key in info if key not in ("final_obs", "_final_obs")}
        return observation, reward, terminated, truncated, info
    final_obs = info.get("final_obs")
    if final_obs is None:
        raise AutoresetError(
            f"{vec_env} declares SAME_STEP, but the info of a step that ended rows "
            f"{np.flatnonzero(ended).tolist()} has no 'final_obs'; its keys are {sorted(info)}. "
            "Without the last observation a truncated episode cannot be valued."
        )
    if isinstance(final_obs, np.ndarray) and final_obs.dtype == object:
        dense = empty_batch(vec_env.single_observation_space, vec_env.num_envs)
        for row in np.flatnonzero(ended):
            write_row(dense, int(row), final_obs[row])
    else:
        dense = copy_batch(final_obs)
    info = {**info, "final_obs": dense, "_final_obs": ended}
    return observation, reward, terminated, truncated, info


def _reset_cartpole_rows(env: Any, mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Reset rows of Gymnasium's native CartPole as its own dummy step would, without stepping."""
    size = (4, int(mask.sum()))
    env.state[:, mask] = env.np_random.uniform(low=env.low, high=env.high, size=size)
    env.steps[mask] = 0
    env.prev_done[mask] = False
    observation: np.ndarray[Any, Any] = env.state.T.astype(np.float32)
    return observation
