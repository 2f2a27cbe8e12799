"""What is written to disk, read back."""

import dataclasses
import json
import subprocess

import numpy as np
import pytest

from plugrl_env_client.args import RecorderArgs
from plugrl_env_client.envs.dummy_env import DummyEnvConfig
from plugrl_env_client.envs.gym_env import GymEnvConfig
from plugrl_env_client.errors import MissingVideoExtraError, UsageError
from plugrl_env_client.recorder import Recorder
from plugrl_env_client.runner.rollout import rollout
from plugrl_env_client.testing import NotingAgent
from plugrl_env_client.utils.registration import make_vec
from plugrl_env_client.video import VideoWriter


def record(folder, uid="probe-v1", *, episodes=6, num_envs=2, config=None, **args):
    """Roll out with zeros for actions; gives the folder and the rollout's result."""
    env = make_vec(uid, num_envs, config=config)
    shape = env.single_action_space.shape
    agent = NotingAgent(lambda obs, rows: np.zeros((2, len(rows), *shape), np.int64))
    recorder = Recorder(folder / "proc_000", RecorderArgs(**args), manifest={"uid": uid})
    result = rollout(env, agent, num_episodes=episodes, recorder=recorder, seed=0)
    recorder.close(result.summary())
    env.close()
    return folder / "proc_000", result


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_episode_has_a_line_with_windowed_means(tmp_path):
    folder, _ = record(tmp_path, metric_window=2)
    found = lines(folder / "metrics" / "episode_metrics.jsonl")
    assert [line["episode"] for line in found] == list(range(1, len(found) + 1))
    returns = [line["return"] for line in found]
    assert set(returns) == {3.0, 5.0}
    assert [line["length"] for line in found] == returns
    windows = [returns[max(0, i - 1) : i + 1] for i in range(len(returns))]
    assert [line["mean_return"] for line in found] == [np.mean(window) for window in windows]
    assert sum(line["counted"] for line in found) == 6


def test_success_is_recorded_where_it_is_known(tmp_path):
    config = DummyEnvConfig(img_size=2, wrist_img_size=2, terminated_prob=0.5)
    folder, result = record(tmp_path, "dummy-v1", config=config, episodes=20)
    found = lines(folder / "metrics" / "episode_metrics.jsonl")
    counted = [line["success"] for line in found if line["counted"]]
    assert np.mean(counted) == result.summary()["success_rate"]
    assert 0 < np.mean(counted) < 1


def test_statistics_of_states_are_those_of_everything_seen(tmp_path):
    folder, _ = record(tmp_path, num_envs=1, episodes=3)
    (line,) = lines(folder / "metrics" / "obs_stats.jsonl")
    time = line["states"]["t"]
    seen = np.array([1, 2, 3] * 3)
    assert time["count"] == 9
    assert time["mean"] == pytest.approx([seen.mean()])
    assert time["std"] == pytest.approx([seen.std()])
    assert (time["min"], time["max"]) == ([1], [3])


def test_statistics_hold_far_from_zero(tmp_path):
    from plugrl_env_client.envs.base_env import Observation

    recorder = Recorder(tmp_path, RecorderArgs(), manifest={})
    rng = np.random.default_rng(0)
    states = 1e9 + rng.normal(size=(50, 4, 2))
    no = np.zeros(4, bool)
    for state in states:
        recorder.step(None, None, no, no, Observation(states={"x": state}))
    recorder.close(None)
    (line,) = lines(tmp_path / "metrics" / "obs_stats.jsonl")
    flat = states.reshape(-1, 2)
    assert line["states"]["x"]["std"] == pytest.approx(flat.std(0).tolist(), rel=1e-4)
    assert not (tmp_path / "summary.json").exists()


def test_statistics_leave_out_what_is_not_finite(tmp_path):
    from plugrl_env_client.envs.base_env import Observation

    recorder = Recorder(tmp_path, RecorderArgs(), manifest={})
    no = np.zeros(2, bool)
    for x in ([[np.nan, 1.0], [2.0, 3.0]], [[np.inf, 1.0], [4.0, 5.0]], [[np.nan, 1.0]] * 2):
        states = {"x": np.array(x), "y": np.ones((2, 1))}
        recorder.step(None, None, no, no, Observation(states=states))
    recorder.close(None)
    (line,) = lines(tmp_path / "metrics" / "obs_stats.jsonl")
    x, y = line["states"]["x"], line["states"]["y"]
    assert (x["count"], x["mean"], x["std"]) == (2, [3.0, 4.0], [1.0, 1.0])
    assert (x["min"], x["max"], y["count"]) == ([2.0, 3.0], [4.0, 5.0], 6)


def test_facts_and_a_summary_frame_the_run(tmp_path):
    folder, result = record(tmp_path)
    assert json.loads((folder / "manifest.json").read_text()) == {"uid": "probe-v1"}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["episodes"] == result.episodes == 6
    assert summary["mean_return"] == 4.0
    assert summary["timing"]["steps"] == result.timing.steps


def test_every_nth_episode_of_row_0_is_kept(tmp_path):
    folder, _ = record(tmp_path, episodes=10, episode_freq=2)
    kept = sorted(path.name for path in (folder / "sampled").iterdir())
    assert kept == [f"episode_{number:06d}.npz" for number in (0, 2, 4, 6)]
    with np.load(folder / "sampled" / kept[1], allow_pickle=False) as episode:
        assert episode["state.t"].ravel().tolist() == [0, 1, 2, 3]
        assert episode["action"].shape == (3, 3)
        assert episode["reward"].tolist() == [1, 1, 1]
        assert episode["terminated"].tolist() == [False, False, True]


def test_a_kept_episode_of_rows_that_reset_themselves_ends_with_its_own_last_state(tmp_path):
    config = GymEnvConfig(max_episode_steps=4)
    folder, _ = record(tmp_path, "gym-v1", config=config, num_envs=1, episodes=2, episode_freq=1)
    with np.load(folder / "sampled" / "episode_000000.npz") as episode:
        last = episode["state.obs"][-1]
        assert len(episode["state.obs"]) == 5
    with np.load(folder / "sampled" / "episode_000001.npz") as episode:
        assert not np.array_equal(episode["state.obs"][0], last)
        assert np.abs(episode["state.obs"][0]).max() <= 0.05


def test_images_are_kept_only_where_asked(tmp_path):
    config = DummyEnvConfig(img_size=4, wrist_img_size=2, terminated_prob=0.5)
    for full in (False, True):
        folder, _ = record(
            tmp_path / str(full), "dummy-v1", config=config, num_envs=1, episodes=1,
            episode_freq=1, record_full_rollout=full,
        )  # fmt: skip
        with np.load(folder / "sampled" / "episode_000000.npz") as episode:
            assert ("image.img" in episode) is full
            assert episode["text"].item() == "do something"
            if full:
                assert len(episode["image.img"]) == len(episode["reward"]) + 1


def test_nothing_is_written_that_was_switched_off(tmp_path):
    folder, _ = record(tmp_path, record_obs_stats=False, record_episode_metrics=False)
    assert list((folder / "metrics").iterdir()) == []


def test_videos_have_a_frame_per_observation_and_odd_sizes_are_padded(tmp_path):
    ffmpeg = pytest.importorskip("imageio_ffmpeg")
    config = DummyEnvConfig(img_size=33, wrist_img_size=16, terminated_prob=0.2)
    folder, _ = record(
        tmp_path, "dummy-v1", config=config, num_envs=1, episodes=1,
        episode_freq=1, record_video=True,
    )  # fmt: skip
    with np.load(folder / "sampled" / "episode_000000.npz") as episode:
        steps = len(episode["reward"])
    videos = sorted(path.name for path in (folder / "videos").iterdir())
    assert videos == ["episode_000000-img.mp4", "episode_000000-wrist_img.mp4"]
    command = [ffmpeg.get_ffmpeg_exe(), "-i", str(folder / "videos" / videos[0]),
               "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]  # fmt: skip
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    assert len(raw) == (steps + 1) * 34 * 34 * 3


def test_a_video_that_breaks_off_leaves_nothing(tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    video = VideoWriter(tmp_path / "a.mp4", 30.0)
    video.add(np.zeros((16, 16, 1), np.uint8))
    video.close(keep=False)
    VideoWriter(tmp_path / "b.mp4", 30.0).close()
    assert list(tmp_path.iterdir()) == []


def test_missing_video_support_is_said_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "imageio_ffmpeg", None)
    args = RecorderArgs(record_video=True, episode_freq=1)
    with pytest.raises(MissingVideoExtraError, match=r"plugrl-env-client\[video\]"):
        Recorder(tmp_path, args, manifest={})


@pytest.mark.parametrize(
    "wrong",
    [{"record_video": True}, {"episode_freq": -1}, {"metric_window": 0}, {"video_fps": 0.0}],
)
def test_options_that_cannot_be_meant_are_refused(wrong):
    with pytest.raises(UsageError, match="--recorder"):
        dataclasses.replace(RecorderArgs(), **wrong)
