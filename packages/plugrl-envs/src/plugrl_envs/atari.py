"""The usual treatment of Atari frames, as one wrapper with one list of options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["atari_preprocessing"]


def atari_preprocessing(
    env: gym.Env[Any, Any],
    *,
    frame_skip: int = 4,
    screen_size: int = 84,
    frame_stack: int = 4,
    noop_max: int = 30,
    terminal_on_life_loss: bool = False,
) -> gym.Env[Any, Any]:
    """Wrap an ALE environment: no-op starts, max of two frames, grey, resized, stacked.

    Frames stay uint8; scaling belongs into the network.

    Args:
        env: an ALE environment made with ``frameskip=1``, which `make_vec` sees to.
        frame_skip: frames per action.
        screen_size: height and width in pixels.
        frame_stack: how many frames an observation holds, as channels first.
        noop_max: up to how many no-op actions start an episode.
        terminal_on_life_loss: end the episode with every lost life.

    Returns:
        An environment that observes uint8 ``[frame_stack, screen_size, screen_size]``.
    """
    env = AtariPreprocessing(
        env,
        noop_max=noop_max,
        frame_skip=frame_skip,
        screen_size=screen_size,
        terminal_on_life_loss=terminal_on_life_loss,
    )
    return FrameStackObservation(env, frame_stack)
