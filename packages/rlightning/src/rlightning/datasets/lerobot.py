"""LeRobot's layout, versions 2.x and 3.0: parquet tables of frames, described by ``meta/``.

A frame is an observation and the action chosen from it; what followed the last action of an episode
is not kept. So an episode that did not terminate is one step shorter for learning values than it
has frames, see `Episode.transitions`.

Ends are read from ``next.terminated`` and ``next.truncated`` where a dataset has them (those
written here do), else from ``next.success`` at the last frame; an episode without either was cut
off.

Images are PNG in the cells of a column, or files that the cells or LeRobot's layout
(``images/<feature>/episode_<n>/frame_<n>.png``) name. Videos are left out.
"""

from __future__ import annotations

import itertools
import json
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.datasets.episode import Dataset, Episode, Field, leaves
from rlightning.datasets.pictures import decode, encode, is_picture, picture_field, read_cell
from rlightning.datasets.requirements import require
from rlightning.errors import ConfigError, ContractError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

__all__ = ["LeRobotDataset", "write_lerobot"]

_OBSERVATION, _STATE, _ACTION = "observation.", "observation.state", "action"
_IMAGE, _VIDEO = "image", "video"
_CHUNK = 1000
_DATA_PATHS = {
    "v2.1": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "v3.0": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
}
_FRAME_FEATURES = {
    "timestamp": "float32",
    "frame_index": "int64",
    "episode_index": "int64",
    "index": "int64",
    "task_index": "int64",
}


class LeRobotDataset(Dataset):
    """Episodes in LeRobot's layout.

    Args:
        path: the folder of the dataset.

    Attributes:
        info: what ``meta/info.json`` says.
        left_out: names of observations that are videos.

    Raises:
        ConfigError: there is none, of an unknown version, without numeric actions, or pyarrow is
            missing.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self._parquet = require("pyarrow.parquet", "LeRobot")
        self.path = pathlib.Path(path).expanduser()
        if not self.is_at(self.path):
            raise ConfigError(f"{self.path} is no LeRobot dataset: meta/info.json is missing")
        self.info: dict[str, Any] = json.loads((self.path / "meta" / "info.json").read_text())
        version = str(self.info.get("codebase_version"))
        if not version.startswith(("v2.", "v3.")):
            raise ConfigError(f"{self.path} is of version {version}; expected v2.x or v3.x")
        features = self.info["features"]
        if _ACTION not in features:
            raise ConfigError(f"{self.path} has no feature 'action', only {', '.join(features)}")
        self.action_field = _field(features[_ACTION])
        names = [name for name in features if name.startswith(_OBSERVATION)]
        self.left_out = [n for n in names if features[n]["dtype"] == _VIDEO]
        self._observations = {
            tuple(name.removeprefix(_OBSERVATION).split(".")): name
            for name in names
            if name not in self.left_out
        }
        self.observation_fields = {
            path: _field(features[name]) for path, name in self._observations.items()
        }
        self.n_episodes = int(self.info["total_episodes"])
        self.n_steps = int(self.info["total_frames"])

    @staticmethod
    def is_at(path: pathlib.Path) -> bool:
        """Return whether a folder looks like one."""
        return (path / "meta" / "info.json").exists()

    def __iter__(self) -> Iterator[Episode]:
        return self.reading(self._observations)

    def reading(self, paths: Collection[tuple[str, ...]]) -> Iterator[Episode]:
        """Read one episode after the other; see `Dataset.reading`. Decodes no other pictures."""
        wanted = {path: name for path, name in self._observations.items() if path in paths}
        for frames in self._tables(list(wanted.values())):
            number = int(frames["episode_index"][0].as_py())
            try:
                yield self._episode(frames, wanted)
            except ContractError as error:
                raise ContractError(f"{self.path}, episode {number}: {error}") from error

    def _tables(self, observations: list[str]) -> Iterator[Any]:
        """Yield one table of frames per episode; no more than one row group is in memory."""
        files = sorted((self.path / "data").glob("**/*.parquet"))
        if not files:
            raise ConfigError(f"{self.path} has no parquet file under data/")
        columns = [*observations, _ACTION, "episode_index"]
        columns += [name for name in self.info["features"] if name.startswith("next.")]
        arrow = require("pyarrow", "LeRobot")
        open_part: Any = None  # an episode may go on in the next row group, or file
        for file in files:
            with self._parquet.ParquetFile(file) as source:
                there = [name for name in columns if name in source.schema_arrow.names]
                for group in range(source.num_row_groups):
                    table = source.read_row_group(group, columns=there)
                    if open_part is not None:
                        table = arrow.concat_tables([open_part, table])
                    numbers = table["episode_index"].to_numpy()
                    borders = np.flatnonzero(np.diff(numbers)) + 1
                    starts = [0, *borders.tolist()]
                    for start, stop in itertools.pairwise(starts):
                        yield table.slice(start, stop - start)
                    open_part = table.slice(starts[-1])
        if open_part is not None and len(open_part):
            yield open_part

    def _episode(self, frames: Any, wanted: Mapping[tuple[str, ...], str]) -> Episode:
        features, steps = self.info["features"], len(frames)

        def column(name: str) -> np.ndarray[Any, Any]:
            field = _field(features[name])
            if features[name]["dtype"] == _IMAGE:
                return self._pictures(name, field, frames)
            flat = frames[name].combine_chunks()
            while hasattr(flat, "flatten") and hasattr(flat.type, "value_type"):
                flat = flat.flatten()
            values = flat.to_numpy(zero_copy_only=False).astype(field.dtype, copy=False)
            if values.size != steps * int(np.prod(field.shape, dtype=int)):
                raise ContractError(
                    f"{name} holds {values.size} numbers in {steps} frames; meta/info.json says "
                    f"{field} each"
                )
            return np.array(values).reshape(steps, *field.shape)  # pyarrow's is read-only

        def flags(name: str) -> np.ndarray[Any, Any]:
            if name not in features:
                return np.zeros(steps, bool)
            return column(name).reshape(steps).astype(bool)

        terminated = flags("next.terminated")
        if "next.terminated" not in features:
            terminated[-1] = flags("next.success")[-1]
        rewards = np.zeros(steps, np.float32)
        if "next.reward" in features:
            rewards = column("next.reward").reshape(steps)
        observations: Any = {}
        for path, name in wanted.items():
            below = observations
            for key in path[:-1]:
                below = below.setdefault(key, {})
            below[path[-1]] = column(name)
        return Episode(observations, column(_ACTION), rewards, terminated, flags("next.truncated"))

    def _pictures(self, name: str, field: Field, frames: Any) -> np.ndarray[Any, Any]:
        """Return the pictures of an episode, ``[T, h, w, c]``."""
        number = int(frames["episode_index"][0].as_py())
        folder = self.path / "images" / name / f"episode_{number:06d}"
        if name in frames.column_names:
            cells = frames[name].to_pylist()
        else:
            cells = [f"frame_{frame:06d}.png" for frame in range(len(frames))]
        pictures = np.empty((len(cells), *field.shape), np.uint8)
        for frame, cell in enumerate(cells):
            try:
                pictures[frame] = decode(read_cell(cell, (self.path, folder)), field)
            except ContractError as error:
                raise ContractError(f"{name}, frame {frame}: {error}") from error
        return pictures


def write_lerobot(
    path: str | pathlib.Path,
    episodes: Iterable[Episode],
    *,
    fps: int,
    task: str,
    version: str = "v3.0",
    robot_type: str = "unknown",
) -> LeRobotDataset:
    """Write episodes in LeRobot's layout, one at a time.

    Args:
        path: a new folder.
        episodes: observations become ``observation.state`` where they are one array, else
            ``observation.<name>``; uint8 arrays ``[T, h, w, c]`` become pictures, and a single one
            ``observation.image``. The observation after the last action is not kept.
        fps: control steps per second.
        task: what was to be done, in words.
        version: ``v2.1``, one file per episode, or ``v3.0``, many episodes per file.
        robot_type: kept in ``meta/info.json``.

    Raises:
        ConfigError: the folder holds a dataset already, or the version is another.
        ContractError: episodes differ in their fields.
    """
    if version not in _DATA_PATHS:
        raise ConfigError(f"version {version!r}; expected one of {', '.join(_DATA_PATHS)}")
    root = pathlib.Path(path).expanduser()
    if LeRobotDataset.is_at(root):
        raise ConfigError(f"{root} holds a dataset already; give a new folder")
    writer = _Writer(root, fps=fps, version=version)
    for episode in episodes:
        writer.add(episode)
    writer.close(task=task, robot_type=robot_type)
    return LeRobotDataset(root)


class _Writer:
    """Frames into parquet files, and what they add up to into ``meta/``."""

    def __init__(self, root: pathlib.Path, *, fps: int, version: str) -> None:
        self._arrow, self._parquet = (require(m, "LeRobot") for m in ("pyarrow", "pyarrow.parquet"))
        self._root, self._fps, self._version = root, fps, version
        self._fields: dict[str, Field] = {}
        self._file: Any = None
        self._lengths: list[int] = []
        self._sums: list[dict[str, Any]] = []

    def add(self, episode: Episode) -> None:
        """Write the frames of one episode."""
        steps, number = len(episode), len(self._lengths)
        arrays: dict[str, np.ndarray[Any, Any]] = {}
        for path, leaf in leaves(episode.observations):
            array = np.asarray(leaf)[:steps]
            only = "image" if is_picture(Field(array.shape[1:], array.dtype)) else "state"
            arrays[f"{_OBSERVATION}{'.'.join(path) or only}"] = array
        arrays[_ACTION] = np.asarray(episode.actions)
        arrays |= {
            "next.reward": episode.rewards,
            "next.done": episode.terminated | episode.truncated,
            "next.terminated": episode.terminated,
            "next.truncated": episode.truncated,
        }
        fields = {
            name: Field(array.shape[1:] or (1,), array.dtype) for name, array in arrays.items()
        }
        if self._fields and fields != self._fields:
            raise ContractError(
                f"episode {number} has the fields {_listed(fields)}; those before have "
                f"{_listed(self._fields)}"
            )
        self._fields = fields
        start = sum(self._lengths)
        frame = np.arange(steps)
        arrays |= {
            "timestamp": (frame / self._fps).astype(np.float32),
            "frame_index": frame,
            "episode_index": np.full(steps, number),
            "index": start + frame,
            "task_index": np.zeros(steps, np.int64),
        }
        self._write(self._arrow.table({k: self._column(v) for k, v in arrays.items()}), number)
        self._lengths.append(steps)
        self._sums.append({name: _statistics(array) for name, array in arrays.items()})

    def _column(self, array: np.ndarray[Any, Any]) -> Any:
        if array.ndim == 1:
            return self._arrow.array(array)
        if is_picture(Field(array.shape[1:], array.dtype)):
            cells = [{"bytes": png, "path": None} for png in encode(array)]
            kinds = {"bytes": self._arrow.binary(), "path": self._arrow.string()}
            return self._arrow.array(cells, self._arrow.struct(list(kinds.items())))
        column = self._arrow.array(np.ascontiguousarray(array).reshape(-1))
        for size in reversed(array.shape[1:]):
            column = self._arrow.FixedSizeListArray.from_arrays(column, int(size))
        return column

    def _write(self, table: Any, number: int) -> None:
        name = _DATA_PATHS[self._version].format(
            episode_chunk=number // _CHUNK, episode_index=number, chunk_index=0, file_index=0
        )
        if self._file is None:
            target = self._root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._parquet.ParquetWriter(target, table.schema)
        self._file.write_table(table)
        if self._version == "v2.1":
            self._file.close()
            self._file = None

    def close(self, *, task: str, robot_type: str) -> None:
        """Finish the files and write ``meta/``."""
        if not self._lengths:
            raise ContractError("there are no episodes to write")
        if self._file is not None:
            self._file.close()
        meta = self._root / "meta"
        meta.mkdir(parents=True, exist_ok=True)
        n_episodes = len(self._lengths)
        features = {name: _feature(field) for name, field in self._fields.items()}
        features |= {
            name: {"dtype": dtype, "shape": [1], "names": None}
            for name, dtype in _FRAME_FEATURES.items()
        }
        info = {
            "codebase_version": self._version,
            "robot_type": robot_type,
            "total_episodes": n_episodes,
            "total_frames": sum(self._lengths),
            "total_tasks": 1,
            "chunks_size": _CHUNK,
            "fps": self._fps,
            "splits": {"train": f"0:{n_episodes}"},
            "data_path": _DATA_PATHS[self._version],
            "video_path": None,
            "features": features,
        }
        (meta / "info.json").write_text(json.dumps(info, indent=4))
        (self._describe_v2 if self._version == "v2.1" else self._describe_v3)(meta, task)

    def _describe_v2(self, meta: pathlib.Path, task: str) -> None:
        lengths = enumerate(self._lengths)
        lines = [{"episode_index": i, "tasks": [task], "length": n} for i, n in lengths]
        _write_lines(meta / "episodes.jsonl", lines)
        _write_lines(meta / "tasks.jsonl", [{"task_index": 0, "task": task}])
        stats = [{"episode_index": i, "stats": _plain(s)} for i, s in enumerate(self._sums)]
        _write_lines(meta / "episodes_stats.jsonl", stats)

    def _describe_v3(self, meta: pathlib.Path, task: str) -> None:
        stops = np.cumsum(self._lengths)
        table = {
            "episode_index": np.arange(len(stops)),
            "tasks": [[task]] * len(stops),
            "length": np.array(self._lengths),
            "data/chunk_index": np.zeros(len(stops), np.int64),
            "data/file_index": np.zeros(len(stops), np.int64),
            "dataset_from_index": stops - self._lengths,
            "dataset_to_index": stops,
        }
        target = meta / "episodes" / "chunk-000" / "file-000.parquet"
        target.parent.mkdir(parents=True, exist_ok=True)
        self._parquet.write_table(self._arrow.table(table), target)
        tasks = {"task_index": np.array([0]), "task": [task]}
        self._parquet.write_table(self._arrow.table(tasks), meta / "tasks.parquet")
        merged = {name: _merge([s[name] for s in self._sums]) for name in self._sums[0]}
        (meta / "stats.json").write_text(json.dumps(_plain(merged), indent=4))


def _field(feature: dict[str, Any]) -> Field:
    """Return a feature's shape and dtype."""
    if feature["dtype"] == _IMAGE:
        return picture_field(feature["shape"])
    return Field(tuple(feature["shape"]), np.dtype(feature["dtype"]))


def _feature(field: Field) -> dict[str, Any]:
    """Describe a feature in ``meta/info.json``."""
    if is_picture(field):
        names = ["height", "width", "channels"]
        return {"dtype": _IMAGE, "shape": list(field.shape), "names": names}
    return {"dtype": str(field.dtype), "shape": list(field.shape), "names": None}


def _listed(fields: dict[str, Field]) -> str:
    return ", ".join(f"{name} ({field})" for name, field in fields.items())


def _statistics(array: np.ndarray[Any, Any]) -> dict[str, Any]:
    """Return statistics of each number; of pictures, of each channel's brightness from 0 to 1."""
    rows = array.reshape(len(array), -1)
    shape: tuple[int, ...] = (-1,)
    if is_picture(Field(array.shape[1:], array.dtype)):
        rows, shape = array.reshape(-1, array.shape[-1]) / 255.0, (-1, 1, 1)
    rows = rows.astype(np.float64)
    found = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    return {name: value.reshape(shape) for name, value in found.items()} | {
        "count": np.array([len(array)])
    }


def _merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the statistics of all rows from those of parts."""
    means = np.stack([part["mean"] for part in parts])
    count = np.array([part["count"][0] for part in parts], np.float64)
    count = count.reshape(-1, *[1] * (means.ndim - 1))
    mean = (means * count).sum(0) / count.sum()
    variances = np.stack([part["std"] for part in parts]) ** 2 + (means - mean) ** 2
    return {
        "min": np.min([part["min"] for part in parts], 0),
        "max": np.max([part["max"] for part in parts], 0),
        "mean": mean,
        "std": np.sqrt((variances * count).sum(0) / count.sum()),
        "count": np.array([int(count.sum())]),
    }


def _plain(stats: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {k: v.tolist() for k, v in entry.items()} for name, entry in stats.items()}


def _write_lines(file: pathlib.Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
