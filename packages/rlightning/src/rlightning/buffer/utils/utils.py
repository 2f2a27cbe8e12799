"""The default stages of the pipeline from rows to transitions, and the advantage helpers.

A stage of your own has the signature of the default with the same name. Knows nothing about
buffers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rlightning.buffer.columns import Path, as_array, leaves, nest
from rlightning.buffer.schema import ENV_FLAGS
from rlightning.buffer.segment import Finals, align, with_finals
from rlightning.ops.returns import gae

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rlightning.types import EnvRet, PolicyResponse

__all__ = [
    "align_episode",
    "default_compute_gae",
    "default_env_ret_preprocess_fn",
    "default_gae_no_loop",
    "default_policy_resp_preprocess_fn",
    "default_postprocess_fn",
    "default_preprocess_fn",
]


def default_env_ret_preprocess_fn(
    transition_dict: dict[str, Any],
    env_ret: EnvRet,
    obs_preprocessor: Callable[[Any], Any],
    reward_preprocessor: Callable[[Any], Any],
) -> dict[str, Any]:
    """Add what the environment returned to `transition_dict` and return it.

    The preprocessors see a leading row axis where the worker has several environments. The last
    observations of ended episodes, ``info["final_obs"]``, are preprocessed like the others.
    """
    fields = env_ret.to_dict()
    fields["observation"] = obs_preprocessor(env_ret.observation)
    fields["last_reward"] = reward_preprocessor(env_ret.last_reward)
    if "final_obs" in env_ret.info:
        final = obs_preprocessor(env_ret.info["final_obs"])
        fields["info"] = {**env_ret.info, "final_obs": final}
    transition_dict.update(fields)
    return transition_dict


def default_policy_resp_preprocess_fn(
    transition_dict: dict[str, Any], policy_resp: PolicyResponse
) -> dict[str, Any]:
    """Add every field of the response to `transition_dict` and return it."""
    transition_dict.update(policy_resp.extras)
    return transition_dict


def default_preprocess_fn(  # the documented signature: every stage below is handed in
    transition_dict: dict[str, Any],
    env_ret: EnvRet,
    policy_resp: PolicyResponse,
    obs_preprocessor: Callable[[Any], Any],
    reward_preprocessor: Callable[[Any], Any],
    env_ret_preprocess_fn: Callable[..., dict[str, Any]],
    policy_resp_preprocess_fn: Callable[..., dict[str, Any]],
) -> dict[str, Any]:
    """Return one row: what the environment returned and what the policy answered to it."""
    transition_dict = env_ret_preprocess_fn(
        transition_dict, env_ret, obs_preprocessor, reward_preprocessor
    )
    return policy_resp_preprocess_fn(transition_dict, policy_resp)


def default_postprocess_fn(episode: Mapping[str, list[Any]]) -> dict[str, Any]:
    """Turn T+1 rows into T transitions.

    Args:
        episode: a list of T+1 values per field, as the preprocessing made them; ``info`` serves for
            the last observations of episodes and goes no further.

    Returns:
        ``next_observation``, ``observation``, ``reward``, ``terminated``, ``truncated`` and every
        other field, as tensors ``[T, ...]``; nested where observations are.
    """
    aligned = align_episode(episode)
    return nest({path: tensor for path, tensor in aligned.items() if path[0] != "_next"})


def align_episode(episode: Mapping[str, list[Any]]) -> dict[Path, torch.Tensor]:
    """Return the transitions of T+1 rows by path, as `rlightning.buffer.segment.align` does."""
    rows: dict[Path, torch.Tensor] = {}
    for name, values in episode.items():
        if name == "info":
            continue
        flat = [dict(leaves(name, value)) for value in values]
        for path in flat[0]:
            rows[path] = _stacked(path, [item[path] for item in flat])
    out = align(rows)
    finals = [
        (step, Finals.from_info(_size(info["_final_obs"]), info))
        for step, info in enumerate(episode.get("info", [])[1:])
        if "_final_obs" in info
    ]
    if any(len(item.envs) for _, item in finals):
        for path in [path for path in out if path[0] == "next_observation"]:
            out[path] = _put_finals(out[path], ("observation", *path[1:]), finals)
    return out


def _stacked(path: Path, values: list[Any]) -> torch.Tensor:
    arrays = [torch.as_tensor(as_array(path, value)) for value in values]
    stacked = torch.stack(arrays)
    wanted = ENV_FLAGS.get(path[0]) if len(path) == 1 else None
    if wanted is None and stacked.dtype == torch.float64:
        wanted = torch.float32
    return stacked if wanted is None else stacked.to(wanted)


def _size(mask: Any) -> int:
    array = as_array(("_final_obs",), mask)
    return int(array.shape[0]) if array.ndim else 1


def _put_finals(later: torch.Tensor, path: Path, finals: list[tuple[int, Finals]]) -> torch.Tensor:
    rows = max(item.rows for _, item in finals)
    if rows > 1:
        return with_finals(later, path, finals, slice(0, rows))
    return with_finals(later.unsqueeze(1), path, finals, slice(0, 1)).squeeze(1)


def default_compute_gae(  # the documented signature
    rewards: torch.Tensor,
    values: torch.Tensor,
    next_values: torch.Tensor,
    dones: torch.Tensor,
    gamma: float,
    lam: float,
    normalize_adv: bool = True,  # noqa: FBT001, FBT002  # the documented signature
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns by generalised advantage estimation.

    With one flag only, every end counts as a termination: nothing is bootstrapped there. Where
    truncations matter use `rlightning.ops.returns.gae`, which keeps the two apart.

    Args:
        rewards: ``[T, N]``.
        values: of the observations that were acted on, ``[T, N]``.
        next_values: of the observations that followed, ``[T, N]``.
        dones: bool, or 0 and 1 of any dtype, ``[T, N]``.
        gamma: discount per step.
        lam: trade-off between bias and variance.
        normalize_adv: whether advantages are shifted and scaled to mean 0 and deviation 1.

    Returns:
        ``(advantages, returns)``, ``[T, N]`` each; returns are never normalised.
    """
    dones = dones.bool()
    advantages, returns = gae(
        rewards,
        values,
        next_values,
        dones,
        torch.zeros_like(dones),
        gamma=gamma,
        gae_lambda=lam,
    )
    if normalize_adv:
        centred = advantages - advantages.mean()
        advantages = centred / (advantages.std(unbiased=False) + 1e-8)
    return advantages, returns


default_gae_no_loop = default_compute_gae
"""The same function under its second public name; one implementation serves both."""
