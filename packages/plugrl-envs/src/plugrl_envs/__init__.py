"""Simulator families as Gymnasium vector environments with one reset semantics."""

from plugrl_envs.actions import ActionBorder
from plugrl_envs.errors import (
    AutoresetError,
    EnvTimeoutError,
    EnvWorkerError,
    InvalidActionError,
    MissingExtraError,
    PlugrlEnvsError,
    RenderingError,
    UnknownEnvError,
    UnsupportedSpaceError,
)
from plugrl_envs.frames import FrameTap
from plugrl_envs.make import Vectorization, WorkerOptions, make_vec
from plugrl_envs.seeding import derive_seeds, row_seeds
from plugrl_envs.snapshot import get_state, set_state
from plugrl_envs.statistics import EpisodeStatistics, FinishedEpisodes
from plugrl_envs.vector import CanonicalVectorEnv

__version__ = "0.1.0"

__all__ = [
    "ActionBorder",
    "AutoresetError",
    "CanonicalVectorEnv",
    "EnvTimeoutError",
    "EnvWorkerError",
    "EpisodeStatistics",
    "FinishedEpisodes",
    "FrameTap",
    "InvalidActionError",
    "MissingExtraError",
    "PlugrlEnvsError",
    "RenderingError",
    "UnknownEnvError",
    "UnsupportedSpaceError",
    "Vectorization",
    "WorkerOptions",
    "__version__",
    "derive_seeds",
    "get_state",
    "make_vec",
    "row_seeds",
    "set_state",
]
