"""What a process writes about its rollout: metrics, statistics, kept episodes, videos.

Every line is complete when it is written, and every other file appears under its name when it is
complete, so that a crash costs at most the running episode. Knows nothing of servers.
"""

from __future__ import annotations

import collections
import json
import os
import time
from collections import deque
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from plugrl_env_client.video import VideoWriter, require_video

if TYPE_CHECKING:
    import pathlib

    import numpy.typing as npt

    from plugrl_env_client.args import RecorderArgs
    from plugrl_env_client.envs.base_env import Observation

__all__ = ["Recorder"]


class Recorder:
    """Writes into one process's folder.

    Args:
        folder: ``.../rollout/proc_<number>``; made if need be.
        args: what to write.
        manifest: plain facts about the run, for ``manifest.json``.

    Raises:
        MissingVideoExtraError: videos are asked for and cannot be written.
    """

    def __init__(
        self, folder: pathlib.Path, args: RecorderArgs, *, manifest: dict[str, Any]
    ) -> None:
        if args.record_video:
            require_video()
        self.folder = folder
        self._args = args
        self._started_s = time.monotonic()
        (folder / "metrics").mkdir(parents=True, exist_ok=True)
        write_json(folder / "manifest.json", manifest)
        self._episodes = _lines(folder / "metrics" / "episode_metrics.jsonl",
                                wanted=args.record_episode_metrics)  # fmt: skip
        self._stats_lines = _lines(folder / "metrics" / "obs_stats.jsonl",
                                   wanted=args.record_obs_stats)  # fmt: skip
        self._stats = _ObservationStats()
        self._returns: deque[float] = deque(maxlen=args.metric_window)
        self._successes: deque[bool] = deque(maxlen=args.metric_window)
        self._finished = 0
        self._row0_episode = 0
        self._kept: _KeptEpisode | None = None

    def begin(self, obs: Observation) -> None:
        """See the first observation of the rollout."""
        self._begin_episode(obs)

    def step(
        self,
        actions: npt.NDArray[Any],
        rewards: npt.NDArray[Any],
        terminated: npt.NDArray[np.bool_],
        truncated: npt.NDArray[np.bool_],
        obs: Observation,
    ) -> None:
        """See one step of all rows; `obs` shows the last observation of rows that ended."""
        if self._stats_lines is not None:
            self._stats.add(obs)
        if self._kept is not None:
            self._kept.add(actions[0], rewards[0], terminated[0], truncated[0])
            self._kept.see(obs)
            if terminated[0] or truncated[0]:
                self._kept.close(keep=True)
                self._kept = None

    def episodes(
        self,
        rows: npt.NDArray[np.int64],
        episode: dict[str, npt.NDArray[Any]],
        counts: npt.NDArray[np.bool_],
    ) -> None:
        """See episodes end.

        Args:
            rows: whose.
            episode: `VectorEpisodeStatsWrapper`'s columns.
            counts: bool ``[N]``: which count towards the number that was asked for.
        """
        for row in rows.tolist():
            self._finished += 1
            self._returns.append(float(episode["r"][row]))
            line: dict[str, Any] = {
                "episode": self._finished,
                "env": row,
                "return": self._returns[-1],
                "length": int(episode["l"][row]),
                "counted": bool(counts[row]),
                "time_s": round(time.monotonic() - self._started_s, 3),
                "mean_return": float(np.mean(self._returns)),
            }
            if "s" in episode:
                self._successes.append(bool(episode["s"][row]))
                line["success"] = self._successes[-1]
                line["success_rate"] = float(np.mean(self._successes))
            _write_line(self._episodes, line)
            if self._finished % self._args.metric_window == 0:
                self.flush()

    def restart(self, rows: npt.NDArray[np.int64], obs: Observation) -> None:
        """See the first observations of new episodes; `obs` shows all rows."""
        if 0 in rows:
            self._row0_episode += 1
            self._begin_episode(obs)

    def _begin_episode(self, obs: Observation) -> None:
        freq = self._args.episode_freq
        if freq and self._row0_episode % freq == 0:
            self._kept = _KeptEpisode(self.folder, self._row0_episode, self._args)
            self._kept.see(obs)

    def flush(self) -> None:
        """Write a line of observation statistics."""
        if self._stats_lines is not None and self._stats.count:
            _write_line(
                self._stats_lines, {"episodes": self._finished, "states": self._stats.as_dict()}
            )

    def close(self, summary: dict[str, Any] | None) -> None:
        """Finish; a running episode is not kept.

        Args:
            summary: of the rollout, for ``summary.json``; None where it broke.
        """
        if self._kept is not None:
            self._kept.close(keep=False)
            self._kept = None
        self.flush()
        for stream in (self._episodes, self._stats_lines):
            if stream is not None:
                stream.close()
        if summary is not None:
            write_json(self.folder / "summary.json", summary)


class _KeptEpisode:
    """An episode of row 0 that goes to disk."""

    def __init__(self, folder: pathlib.Path, number: int, args: RecorderArgs) -> None:
        name = f"episode_{number:06d}"
        self._path = folder / "sampled" / f"{name}.npz"
        self._path.parent.mkdir(exist_ok=True)
        self._with_images = args.record_full_rollout
        self._observations: dict[str, list[npt.NDArray[Any]]] = {}
        self._steps: dict[str, list[Any]] = {
            "action": [], "reward": [], "terminated": [], "truncated": []
        }  # fmt: skip
        self._text = ""
        self._videos: dict[str, VideoWriter] | None = {} if args.record_video else None
        self._video_path = folder / "videos" / name
        self._fps = args.video_fps

    def see(self, obs: Observation) -> None:
        self._text = str(obs.text[0])
        for name, state in obs.states.items():
            self._observations.setdefault(f"state.{name}", []).append(np.array(state[0]))
        for name, image in obs.images.items():
            if self._with_images:
                self._observations.setdefault(f"image.{name}", []).append(np.array(image[0]))
            if self._videos is not None:
                if name not in self._videos:
                    self._video_path.parent.mkdir(exist_ok=True)
                    safe = name.replace("/", "_").replace(os.sep, "_")
                    path = self._video_path.with_name(f"{self._video_path.name}-{safe}.mp4")
                    self._videos[name] = VideoWriter(path, self._fps)
                self._videos[name].add(image[0])

    def add(self, action: Any, reward: Any, terminated: Any, truncated: Any) -> None:
        values = (np.array(action), float(reward), bool(terminated), bool(truncated))
        for column, value in zip(self._steps.values(), values, strict=True):
            column.append(value)

    def close(self, *, keep: bool) -> None:
        for video in (self._videos or {}).values():
            video.close(keep=keep)
        if not keep:
            return
        columns = {**self._observations, **self._steps}
        arrays = {name: np.stack([np.asarray(value) for value in column])
                  for name, column in columns.items()}  # fmt: skip
        partial = self._path.with_name(f".{self._path.name}")
        with partial.open("wb") as stream:
            np.savez_compressed(stream, text=np.array(self._text), **arrays)  # type: ignore[arg-type]  # numpy types only the positional form
        os.replace(partial, self._path)


class _ObservationStats:
    """Mean, spread and range per entry of every state, over all rows seen that are finite."""

    def __init__(self) -> None:
        self.count = 0
        self._counts: collections.Counter[str] = collections.Counter()
        self._sums: dict[str, list[npt.NDArray[np.float64]]] = {}

    def add(self, obs: Observation) -> None:
        self.count += len(obs)
        for name, state in obs.states.items():
            wide = state.astype(np.float64)
            wide = wide[np.isfinite(wide).all(axis=1)]  # one that blew up says nothing of the rest
            if not len(wide):
                continue
            self._counts[name] += len(wide)
            sums = self._sums.get(name)
            if sums is None:
                # Moments around the first row: no cancellation for states far from 0.
                zeros = np.zeros(wide.shape[1])
                sums = [wide[0].copy(), zeros, zeros.copy(), wide[0].copy(), wide[0].copy()]
                self._sums[name] = sums
            shifted = wide - sums[0]
            sums[1] += shifted.sum(axis=0)
            sums[2] += np.square(shifted).sum(axis=0)
            np.minimum(sums[3], wide.min(axis=0), out=sums[3])
            np.maximum(sums[4], wide.max(axis=0), out=sums[4])

    def as_dict(self) -> dict[str, Any]:
        found = {}
        for name, (shift, first, second, low, high) in self._sums.items():
            count = self._counts[name]
            mean = first / count
            spread = np.sqrt(np.maximum(second / count - mean**2, 0.0))
            found[name] = {
                "count": count,
                "mean": _plain(mean + shift),
                "std": _plain(spread),
                "min": _plain(low),
                "max": _plain(high),
            }
        return found


def _plain(array: npt.NDArray[Any]) -> list[float | None]:
    """Give numbers that JSON can say: what is not finite becomes null."""
    return [value if np.isfinite(value) else None for value in array.tolist()]


def _lines(path: pathlib.Path, *, wanted: bool) -> IO[str] | None:
    return path.open("a", encoding="utf-8") if wanted else None


def _write_line(stream: IO[str] | None, line: dict[str, Any]) -> None:
    if stream is not None:
        stream.write(json.dumps(line) + "\n")
        stream.flush()


def write_json(path: pathlib.Path, value: Any) -> None:
    """Write a JSON file that appears whole or not at all."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, path)
