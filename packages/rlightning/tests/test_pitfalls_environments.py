"""Environments as runs use them: evaluation starts, videos, noise of simulators, rendering."""

import contextlib
import os
import subprocess
import sys

import gymnasium as gym
import numpy as np
import psutil
import pytest

from plugrl_envs import RenderingError, headless
from rlightning.config import EnvConfig
from rlightning.engine.evaluation import evaluate_episodes
from rlightning.engine.recording import record_episodes
from rlightning.env import EnvGroup
from rlightning.types import BatchedData, PolicyResponse
from rlightning.utils.video import VideoWriter


def group_of(task, **keys):
    return EnvGroup(
        [EnvConfig.from_dict({"name": "e", "backend": "gymnasium", "task": task, **keys})]
    )


class Acting:
    """Answers every worker with `act(observation)`, as a policy group does."""

    def __init__(self, act):
        self.act = act

    def rollout_batch(self, env_rets, *, deterministic):
        assert deterministic
        answers = [PolicyResponse(i, action=self.act(ret.observation)) for i, ret in env_rets]
        return BatchedData(env_rets.ids(), answers)

    def memory_kept(self, *, empty=False):
        return contextlib.nullcontext()


# ---- where episodes of an evaluation start -------------------------------------------------------


def starts_of_evaluated_episodes(act):
    """Return per row the first observations of its first three episodes, and all lengths."""
    training = group_of("CartPole-v1", num_envs=3, max_episode_steps=60)
    group = training.for_evaluation()
    group.init(seed=5)
    starts = [[] for _ in range(3)]
    reset, step = group.reset, group.step

    def watched_reset(**keys):
        env_rets, truncations = reset(**keys)
        for row in range(3):
            starts[row].append(env_rets.values()[0].observation[row].tolist())
        return env_rets, truncations

    def watched_step(responses):
        env_rets, truncations = step(responses)
        ret = env_rets.values()[0]
        for row in np.flatnonzero(ret.last_terminated | ret.last_truncated):
            starts[row].append(ret.observation[row].tolist())
        return env_rets, truncations

    group.reset, group.step = watched_reset, watched_step
    tally = evaluate_episodes(group, Acting(act), episodes=9, seed=5)
    group.close()
    training.close()
    return [row[:3] for row in starts], tally.lengths


def test_where_evaluated_episodes_start_does_not_depend_on_how_they_end():
    """The same nine starts, three in each of three rows, whether the pole falls or stands."""
    falls, short = starts_of_evaluated_episodes(lambda observation: np.zeros(3, int))
    stands, long = starts_of_evaluated_episodes(
        lambda observation: (observation[:, 2] + observation[:, 3] > 0).astype(int)
    )
    assert max(short) < 12
    assert min(long) == 60
    assert falls == stands
    assert len({tuple(start) for row in falls for start in row}) == 9


# ---- videos --------------------------------------------------------------------------------------


class Filmed(gym.Env):
    """Ten steps, and a frame of another grey for each."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012
    observation_space = gym.spaces.Box(0, 10, (1,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, render_mode=None):
        self.render_mode, self.steps = render_mode, 0

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.steps += 1
        return np.full(1, self.steps, np.float32), 1.0, self.steps == 10, False, {}

    def render(self):
        return np.full((128, 128, 3), 20 * self.steps, np.uint8)


def frames_in(path):
    import imageio_ffmpeg

    return imageio_ffmpeg.count_frames_and_secs(str(path))[0]


def test_two_hundred_recorded_episodes_are_frames_of_every_step_and_keep_memory_flat(tmp_path):
    """Kept in memory, their 2,200 frames would be 108 MB."""
    pytest.importorskip("imageio_ffmpeg")
    gym.register("pitfalls/Filmed-v0", entry_point=Filmed)
    group = group_of("pitfalls/Filmed-v0", keep_frames=False).for_recording("rgb_array")
    group.init(seed=0)
    acting = Acting(lambda observation: np.zeros(1, int))
    record_episodes(group, acting, tmp_path / "one.mp4", episodes=1, seed=0)
    before = psutil.Process().memory_info().rss
    returns = record_episodes(group, acting, tmp_path / "many.mp4", episodes=200, seed=0)
    grown_mb = (psutil.Process().memory_info().rss - before) / 2**20
    group.close()
    assert returns == [10.0] * 200
    assert grown_mb < 50
    assert frames_in(tmp_path / "one.mp4") == 11
    assert frames_in(tmp_path / "many.mp4") == 200 * 11


def test_a_video_that_an_error_cuts_short_is_playable(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    path = tmp_path / "cut.mp4"

    def record():
        with VideoWriter(path, fps=30) as video:
            for _ in range(25):
                video.write(np.zeros((64, 64, 3), np.uint8))
            raise OSError("the robot is gone")

    with pytest.raises(OSError, match="the robot is gone"):
        record()
    assert frames_in(path) == 25


# ---- simulators that talk ------------------------------------------------------------------------

ASYNC_HALFCHEETAH = """
import logging
from plugrl_envs import WorkerOptions, make_vec
if __name__ == "__main__":
    logging.basicConfig(format="%(message)s")
    for _ in range(2):
        env = make_vec("HalfCheetah-v5", 3, vectorization="async",
            workers=WorkerOptions(start_method="fork"))
        env.reset(seed=0)
        env.close()
"""


def test_worker_processes_of_mujoco_say_their_warning_once_for_all_of_them(tmp_path):
    """Two times three processes, each of which loads the model that MuJoCo warns about."""
    pytest.importorskip("mujoco")
    script = tmp_path / "run.py"
    script.write_text(ASYNC_HALFCHEETAH)
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == ""
    assert done.stderr.count("settotalmass") == 1
    assert list(tmp_path.iterdir()) == [script]


# ---- drawing without a display -------------------------------------------------------------------

DRAWN = """
import os, sys
from plugrl_envs import make_vec
env = make_vec("Reacher-v5", 1, env_kwargs={"render_mode": "rgb_array"})
env.reset(seed=0)
[frame] = env.call("render")
env.close()
print(frame.shape, frame.max() > 0, os.environ["MUJOCO_GL"])
"""


OPENGL = (
    *("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL", "PYOPENGL_PLATFORM", "MUJOCO_EGL_DEVICE_ID"),
    *("SDL_VIDEODRIVER", "XDG_RUNTIME_DIR"),
)


def on_a_machine_without_display(code, **changes):
    kept = {name: value for name, value in os.environ.items() if name not in OPENGL}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=kept | changes, capture_output=True, text=True, check=False, timeout=60
    )
    return done.stdout.strip(), done.stderr


def test_mujoco_draws_without_a_display_or_says_what_to_install():
    pytest.importorskip("mujoco")
    shown, said = on_a_machine_without_display(DRAWN)
    if shown:
        assert shown in ("(480, 480, 3) True egl", "(480, 480, 3) True osmesa")
        assert said == ""
    else:
        assert "RenderingError: Reacher-v5 cannot be drawn: there is no display, and egl" in said
        assert "libosmesa6" in said


DRAWN_BY_PYGAME = """
from plugrl_envs import make_vec
env = make_vec("CartPole-v1", 1, env_kwargs={"render_mode": "rgb_array"})
env.reset(seed=0)
print(env.env.envs[0].render().shape)
"""


def test_pygame_draws_without_a_display_and_without_a_complaint():
    shown, said = on_a_machine_without_display(DRAWN_BY_PYGAME)
    assert shown.splitlines()[-1] == "(400, 600, 3)"
    assert "error" not in said.lower()


@pytest.mark.parametrize("display", [None, ":9"])
def test_only_frames_without_a_display_take_sdl_s_driver_without_windows(monkeypatch, display):
    for name in OPENGL:
        monkeypatch.delenv(name, raising=False)
    if display is not None:
        monkeypatch.setenv("DISPLAY", display)
    headless.choose_sdl(None)
    headless.choose_sdl("human")
    assert "SDL_VIDEODRIVER" not in os.environ
    monkeypatch.setenv("SDL_VIDEODRIVER", "")  # so that it is put back afterwards
    monkeypatch.delenv("SDL_VIDEODRIVER")
    headless.choose_sdl("rgb_array")
    assert os.environ.get("SDL_VIDEODRIVER") == (None if display else "dummy")


@pytest.mark.parametrize(
    ("working", "chosen"), [(("egl", "osmesa"), "egl"), (("osmesa",), "osmesa")], ids=str
)
def test_egl_is_taken_before_osmesa(monkeypatch, working, chosen):
    for name in OPENGL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MUJOCO_GL", "")
    monkeypatch.setattr(headless, "_why_not", lambda name: None if name in working else "missing")
    headless.choose_opengl(gym.spec("Ant-v5"), "rgb_array")
    assert os.environ["MUJOCO_GL"] == chosen


def test_what_cannot_be_drawn_names_each_library_with_its_reason(monkeypatch):
    for name in OPENGL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(headless, "_why_not", lambda name: f"no {name} driver")
    with pytest.raises(
        RenderingError, match=r"egl fails \(no egl driver\), and osmesa fails \(no o"
    ):
        headless.choose_opengl(gym.spec("Ant-v5"), "rgb_array")
    headless.choose_opengl(gym.spec("Ant-v5"), None)
    headless.choose_opengl(gym.spec("CartPole-v1"), "rgb_array")
    assert "MUJOCO_GL" not in os.environ


@pytest.mark.parametrize("variable", ["MUJOCO_GL", "DISPLAY"])
def test_an_explicit_choice_and_a_display_are_respected(monkeypatch, variable):
    for name in OPENGL:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "glfw")
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "1")
    monkeypatch.setattr(headless, "_why_not", lambda name: pytest.fail("looked for another"))
    before = dict(os.environ)
    headless.choose_opengl(gym.spec("Ant-v5"), "rgb_array")
    assert dict(os.environ) == before


def test_a_device_that_egl_does_not_have_is_named_not_replaced():
    """MUJOCO_EGL_DEVICE_ID counts EGL's devices; 99 is none of them."""
    pytest.importorskip("mujoco")
    shown, said = on_a_machine_without_display(DRAWN, MUJOCO_EGL_DEVICE_ID="99")
    assert shown == ""
    assert "RenderingError: Reacher-v5 cannot be drawn" in said
    assert "osmesa fails" not in said
