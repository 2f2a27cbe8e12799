"""Frames on a machine without a display: choose what draws them, or say what is missing.

Left to itself, MuJoCo takes the window system, whose absence shows late and reads like a crash, and
SDL, which draws for pygame, looks for it and complains.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from plugrl_envs.errors import RenderingError

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["choose_opengl", "choose_sdl"]

_logger = logging.getLogger("plugrl_envs")

_PROBE = """
import importlib, sys, mujoco
context = importlib.import_module("mujoco." + sys.argv[1]).GLContext(64, 64)
context.make_current()
model = mujoco.MjModel.from_xml_string("<mujoco><worldbody><geom size='1'/></worldbody></mujoco>")
mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
context.free()
"""
"""Run in a process of its own: a library that fails would keep the next one from loading."""
_PROBE_LIMIT_S = 60


def choose_sdl(render_mode: str | None) -> None:
    """Set ``SDL_VIDEODRIVER`` to the one without windows, where frames need none and it is open.

    Args:
        render_mode: how an environment will render; None and ``"human"`` need nothing here.
    """
    if render_mode not in (None, "human") and sys.platform == "linux" and not _has_display():
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")


def _has_display() -> bool:
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def choose_opengl(spec: gym.envs.registration.EnvSpec, render_mode: str | None) -> None:
    """Set ``MUJOCO_GL`` to what can draw `spec`'s frames, where that is left open.

    It is left open on Linux without a display while the variable is unset. EGL comes first, then
    OSMesa; with ``MUJOCO_EGL_DEVICE_ID``, which counts EGL's devices and not CUDA's, only EGL.

    Args:
        spec: the environment; only MuJoCo's matter.
        render_mode: how it will render; None and ``"human"`` need nothing here.

    Raises:
        RenderingError: none of them works; says why not.
    """
    if render_mode in (None, "human") or "gymnasium.envs.mujoco" not in str(spec.entry_point):
        return
    if os.environ.get("MUJOCO_GL") or _has_display() or sys.platform != "linux":
        return
    reasons = {}
    for library in ("egl",) if os.environ.get("MUJOCO_EGL_DEVICE_ID") else ("egl", "osmesa"):
        reasons[library] = _why_not(library)
        if reasons[library] is None:
            os.environ["MUJOCO_GL"] = library
            _logger.info("no display: MuJoCo draws with %s (MUJOCO_GL chooses another)", library)
            return
    raise RenderingError(
        f"{spec.id} cannot be drawn: there is no display, and "
        + ", and ".join(f"{library} fails ({reason})" for library, reason in reasons.items())
        + ". Install libegl1 with a driver (libgl1-mesa-dri without a GPU) or libosmesa6, or do "
        "without frames"
    )


def _why_not(library: str) -> str | None:
    """Return why `library` cannot draw here, or None where it can."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE, library],
            env={**os.environ, "MUJOCO_GL": library},
            capture_output=True,
            text=True,
            timeout=_PROBE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_LIMIT_S} s"
    if done.returncode == 0:
        return None
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
