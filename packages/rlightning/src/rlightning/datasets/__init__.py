"""Recorded episodes on disk: read and written in the formats that others use.

`open_dataset` reads a folder in the layout of Minari (HDF5) or LeRobot (parquet), episode by
episode, so that a dataset may be larger than memory; `write_minari` and `write_lerobot` write them.
Needs the extra ``datasets``: ``pip install "rlightning[datasets]"``.
"""

from rlightning.datasets.episode import Dataset, Episode
from rlightning.datasets.fit import Fit
from rlightning.datasets.lerobot import LeRobotDataset, write_lerobot
from rlightning.datasets.minari import MinariDataset, write_minari
from rlightning.datasets.opening import open_dataset

__all__ = [
    "Dataset",
    "Episode",
    "Fit",
    "LeRobotDataset",
    "MinariDataset",
    "open_dataset",
    "write_lerobot",
    "write_minari",
]
