"""Episodes to look at: in a window, or as a video."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlightning.utils.video import VideoWriter

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Callable

    from rlightning.env import EnvGroup
    from rlightning.policy import PolicyGroup

__all__ = ["record_episodes", "show_episodes"]

LONGEST_EPISODE_STEPS = 10_000
"""Steps after which an episode that does not end is left."""


def record_episodes(
    env_group: EnvGroup,
    policy_group: PolicyGroup,
    path: pathlib.Path,
    *,
    episodes: int = 1,
    seed: int | None = None,
) -> list[float]:
    """Play episodes without exploration into a video; return their returns.

    An episode of n steps gives n + 1 frames: its first observation, and one per step.

    Args:
        env_group: one worker of one row that renders ``rgb_array``, see `EnvGroup.for_recording`.
        policy_group: acts deterministically and is not changed.
        path: the mp4 file.
        episodes: how many.
        seed: of the environment.
    """
    env = env_group.env_list[0]
    with VideoWriter(path, fps=env.get_render_fps()) as video:

        def write_frames(ended: int) -> None:
            frames = env.take_frames()
            if not video.frames:
                frames = frames[-1:]  # resets before this one are not part of the episode
            elif ended == episodes:
                frames = frames[:1]  # the last step also shows the next episode's first frame
            for frame in frames:
                video.write(frame)

        return _play(env_group, policy_group, episodes=episodes, seed=seed, on_step=write_frames)


def show_episodes(
    env_group: EnvGroup, policy_group: PolicyGroup, *, episodes: int = 1, seed: int | None = None
) -> list[float]:
    """Play episodes without exploration in the environment's own window; return their returns."""
    return _play(env_group, policy_group, episodes=episodes, seed=seed, on_step=lambda _: None)


def _play(
    env_group: EnvGroup,
    policy_group: PolicyGroup,
    *,
    episodes: int,
    seed: int | None,
    on_step: Callable[[int], None],
) -> list[float]:
    """Play whole episodes; `on_step` gets how many have ended."""
    with policy_group.memory_kept(empty=True):
        return _play_episodes(env_group, policy_group, episodes, seed, on_step)


def _play_episodes(
    env_group: EnvGroup,
    policy_group: PolicyGroup,
    episodes: int,
    seed: int | None,
    on_step: Callable[[int], None],
) -> list[float]:
    returns: list[float] = []
    env_rets, _ = env_group.reset(seed=seed)
    total, steps = 0.0, 0
    on_step(0)
    while len(returns) < episodes:
        responses = policy_group.rollout_batch(env_rets, deterministic=True)
        env_rets, _ = env_group.step(responses)
        env_ret = env_rets.values()[0]
        total, steps = total + float(env_ret.last_reward), steps + 1
        ended = bool(env_ret.last_terminated or env_ret.last_truncated)
        if ended or steps == LONGEST_EPISODE_STEPS:
            returns.append(total)
            total, steps = 0.0, 0
            if not ended:
                env_rets, _ = env_group.reset()
                policy_group.forget_episodes()
        on_step(len(returns))
    return returns
