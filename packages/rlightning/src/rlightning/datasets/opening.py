"""Find out which format a folder is in, and open it."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Literal

from rlightning.datasets.lerobot import LeRobotDataset
from rlightning.datasets.minari import MinariDataset
from rlightning.errors import ConfigError

if TYPE_CHECKING:
    from rlightning.datasets.episode import Dataset

__all__ = ["open_dataset"]


def open_dataset(
    path: str | pathlib.Path, kind: Literal["auto", "minari", "lerobot"] = "auto"
) -> Dataset:
    """Open a dataset; episodes are read when they are asked for.

    Args:
        path: its folder.
        kind: its format; ``auto`` looks.

    Raises:
        ConfigError: there is none of a format that is known, or the extra ``datasets`` is missing.
    """
    folder = pathlib.Path(path).expanduser()
    if kind == "minari" or (kind == "auto" and MinariDataset.is_at(folder)):
        return MinariDataset(folder)
    if kind == "lerobot" or (kind == "auto" and LeRobotDataset.is_at(folder)):
        return LeRobotDataset(folder)
    raise ConfigError(
        f"there is no dataset in {folder}; expected a folder in the layout of Minari "
        "(data/metadata.json beside data/main_data.hdf5) or LeRobot (meta/info.json)"
    )
