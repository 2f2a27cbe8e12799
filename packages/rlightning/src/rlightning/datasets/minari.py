"""Minari's layout: ``data/main_data.hdf5`` with a group per episode, ``data/metadata.json`` beside.

An episode has one observation more than actions: the last is what followed the last action. Of Dict
and Tuple spaces every part is an array of its own, tuple entries under ``_index_0`` and so on.
"""

from __future__ import annotations

import json
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.datasets.episode import Dataset, Episode, leaves
from rlightning.datasets.fit import space_fields
from rlightning.datasets.requirements import require
from rlightning.datasets.space_json import space_from_json, space_to_json
from rlightning.errors import ConfigError, ContractError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gymnasium import spaces

__all__ = ["MinariDataset", "write_minari"]

_DATA, _METADATA = "main_data.hdf5", "metadata.json"
_INDEX = "_index_"


class MinariDataset(Dataset):
    """Episodes in Minari's HDF5 layout.

    Args:
        path: the folder of the dataset, or its ``data`` folder.

    Attributes:
        metadata: what ``metadata.json`` says.
        observation_space: of the recorded environment.
        action_space: of the recorded environment.

    Raises:
        ConfigError: there is none, it is in Minari's other format, or h5py is missing.
    """

    def __init__(self, path: str | pathlib.Path) -> None:
        self._h5py = require("h5py", "Minari")
        self.path = pathlib.Path(path).expanduser()
        folder = _data_folder(self.path)
        if folder is None:
            raise ConfigError(
                f"{self.path} is no Minari dataset: data/{_METADATA} and data/{_DATA} are missing"
            )
        self.metadata: dict[str, Any] = json.loads((folder / _METADATA).read_text())
        if self.metadata.get("data_format", "hdf5") != "hdf5" or not (folder / _DATA).exists():
            raise ConfigError(
                f"{self.path} is in Minari's format {self.metadata.get('data_format')!r}; expected "
                "'hdf5'"
            )
        self._file = folder / _DATA
        missing = [n for n in ("observation_space", "action_space") if n not in self.metadata]
        if missing:
            raise ConfigError(
                f"{self.path} does not describe its {' and '.join(missing)}; record it with a "
                "current version of Minari"
            )
        self.observation_space = space_from_json(self.metadata["observation_space"])
        self.action_space = space_from_json(self.metadata["action_space"])
        self.observation_fields = dict(space_fields(self.observation_space))
        actions = dict(space_fields(self.action_space))
        if set(actions) != {()}:
            raise ConfigError(f"{self.path} has actions of several parts: {self.action_space}")
        self.action_field = actions[()]
        with self._h5py.File(self._file, "r") as file:
            self._names = sorted(
                (name for name in file if name.startswith("episode_")),
                key=lambda name: int(name.rpartition("_")[2]),
            )
            self.n_steps = sum(len(file[name]["rewards"]) for name in self._names)
        self.n_episodes = len(self._names)

    @staticmethod
    def is_at(path: pathlib.Path) -> bool:
        """Return whether a folder looks like one."""
        return _data_folder(path) is not None

    def __iter__(self) -> Iterator[Episode]:
        for name in self._names:
            with self._h5py.File(self._file, "r") as file:
                group = file[name]
                arrays = [group[key][()] for key in ("rewards", "terminations", "truncations")]
                observations = _read(group["observations"])
                try:
                    episode = Episode(observations, group["actions"][()], *arrays)
                except ContractError as error:
                    raise ContractError(f"{self.path}, {name}: {error}") from error
            yield episode


def write_minari(
    path: str | pathlib.Path,
    episodes: Iterable[Episode],
    *,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    **metadata: Any,
) -> MinariDataset:
    """Write episodes in Minari's HDF5 layout, one at a time.

    Args:
        path: a new folder.
        episodes: with the observation after their last action.
        observation_space: of one environment.
        action_space: of one environment.
        **metadata: further entries of ``metadata.json``, such as ``dataset_id``, ``env_spec``,
            ``author``, ``algorithm_name``.

    Raises:
        ConfigError: the folder holds a dataset already.
        ContractError: an episode lacks its last observation, or does not fit the spaces.
    """
    h5py = require("h5py", "Minari")
    root = pathlib.Path(path).expanduser()
    if _data_folder(root) is not None:
        raise ConfigError(f"{root} holds a dataset already; give a new folder")
    folder = root / "data"
    folder.mkdir(parents=True, exist_ok=True)
    n_steps = n_episodes = 0
    with h5py.File(folder / _DATA, "w", track_order=True) as file:
        for number, episode in enumerate(episodes):
            _check(episode, observation_space, number)
            group = file.create_group(f"episode_{number}")
            group.attrs["id"], group.attrs["total_steps"] = number, len(episode)
            _write(group, "observations", episode.observations)
            group.create_dataset("actions", data=episode.actions)
            group.create_dataset("rewards", data=episode.rewards)
            group.create_dataset("terminations", data=episode.terminated)
            group.create_dataset("truncations", data=episode.truncated)
            n_steps, n_episodes = n_steps + len(episode), number + 1
    size = (folder / _DATA).stat().st_size
    described = {
        "total_episodes": n_episodes,
        "total_steps": n_steps,
        "data_format": "hdf5",
        "observation_space": space_to_json(observation_space),
        "action_space": space_to_json(action_space),
        "dataset_size": round(size / 1e6, 1),
        **metadata,
    }
    (folder / _METADATA).write_text(json.dumps(described))
    return MinariDataset(root)


def _check(episode: Episode, space: spaces.Space[Any], number: int) -> None:
    if not episode.knows_the_last_observation:
        raise ContractError(
            f"episode {number} has {len(episode)} observations for {len(episode)} actions; Minari "
            "keeps one more, what followed the last action"
        )
    have = {path: tuple(np.shape(leaf)[1:]) for path, leaf in leaves(episode.observations)}
    wanted = {path: field.shape for path, field in space_fields(space)}
    if have != wanted:
        raise ContractError(
            f"episode {number} observes {have}; the observation space {space} says {wanted}"
        )


def _data_folder(path: pathlib.Path) -> pathlib.Path | None:
    for folder in (path / "data", path):
        if (folder / _METADATA).exists():
            return folder
    return None


def _read(item: Any) -> Any:
    if not hasattr(item, "keys"):
        return item[()]
    parts = {key: _read(item[key]) for key in item}
    if parts and all(key.startswith(_INDEX) for key in parts):
        return tuple(parts[f"{_INDEX}{index}"] for index in range(len(parts)))
    return parts


def _write(group: Any, name: str, tree: Any) -> None:
    if isinstance(tree, tuple):
        tree = {f"{_INDEX}{index}": part for index, part in enumerate(tree)}
    if isinstance(tree, dict):
        below = group.create_group(name)
        for key, part in tree.items():
            _write(below, key, part)
    else:
        group.create_dataset(name, data=np.asarray(tree))
