"""The flags of ``plugrl-run-env-client``. A field is a flag; its docstring is the help text."""

from __future__ import annotations

import dataclasses
import os
import time
import uuid
from typing import Literal

from plugrl_env_client.envs.base_env import BaseEnvConfig
from plugrl_env_client.errors import UsageError

__all__ = ["Args", "RecorderArgs", "RunnerArgs"]


@dataclasses.dataclass(frozen=True)
class RunnerArgs:
    """How environments are run."""

    pass_proc_id: bool = False
    """Tell the environment its process and how many there are."""
    use_env_lock: bool = False
    """Make environments one process after another."""
    start_method: Literal["spawn", "fork", "forkserver"] = "spawn"
    """How processes start."""
    replan_steps: int | None = None
    """Use at most so many steps of a chunk of actions; None uses all."""
    max_episode_steps: int | None = None
    """Truncate episodes after so many steps; goes before --env.max-episode-steps."""
    seed: int | None = None
    """Seeds every process and row differently; None is different in every run."""
    fps: float | None = None
    """Steps per second of a real-time environment; None steps as fast as it can."""
    action_dim: int | None = None
    """Width of an action, for a server that does not declare it."""
    action_horizon: int | None = None
    """Steps of a chunk, for a server that does not declare it."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant.

        Raises:
            UsageError: a number below 1, or a negative seed.
        """
        for name in ("replan_steps", "max_episode_steps", "action_dim", "action_horizon"):
            _at_least_one(getattr(self, name), f"--runner.{name.replace('_', '-')}")
        if self.fps is not None and not self.fps > 0:
            raise UsageError(f"--runner.fps is {self.fps}; expected a number above 0")
        if self.seed is not None and self.seed < 0:
            raise UsageError(f"--runner.seed is {self.seed}; expected a number >= 0")


@dataclasses.dataclass(frozen=True)
class RecorderArgs:
    """What is written to disk."""

    episode_freq: int = 0
    """Keep every n-th episode of row 0; 0 keeps none."""
    thread0_only: bool = True
    """Record in process 0 alone."""
    record_video: bool = False
    """Write the images of kept episodes as videos, too; needs the extra "video"."""
    video_fps: float = 30.0
    """Frames per second of videos."""
    record_full_rollout: bool = False
    """Put images into kept episodes, too, besides states, actions and rewards."""
    record_obs_stats: bool = True
    """Write mean, spread and range of every state."""
    record_episode_metrics: bool = True
    """Write a line per episode."""
    metric_window: int = 100
    """Episodes that means are over."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant.

        Raises:
            UsageError: a negative frequency, or a number below 1.
        """
        if self.episode_freq < 0:
            raise UsageError(f"--recorder.episode-freq is {self.episode_freq}; expected >= 0")
        if not self.video_fps > 0:
            raise UsageError(f"--recorder.video-fps is {self.video_fps}; expected above 0")
        _at_least_one(self.metric_window, "--recorder.metric-window")
        if self.record_video and not self.episode_freq:
            raise UsageError(
                "--recorder.record-video writes the episodes that --recorder.episode-freq keeps; "
                "set it to 1 or more"
            )


@dataclasses.dataclass(frozen=True)
class Args:
    """An environment client. It steps environments, and asks a training server what to do."""

    env: BaseEnvConfig = dataclasses.field(default_factory=BaseEnvConfig)
    """The environment."""
    num_envs: int = 1
    """Rows that each process steps together."""
    num_procs: int = 1
    """Processes, each with a connection of its own."""
    num_episodes: int = 1
    """Episodes that each process finishes, spread evenly over its rows."""
    runner: RunnerArgs = dataclasses.field(default_factory=RunnerArgs)
    """How environments are run."""
    recorder: RecorderArgs = dataclasses.field(default_factory=RecorderArgs)
    """What is written to disk."""
    exp_name: str | None = None
    """The run's name; None makes one."""
    runs_dir: str = "runs"
    """Where runs go: <runs-dir>/<exp-name>/."""
    server_host: str = "127.0.0.1"
    """Address of the server, or its whole URL (ws://... or wss://...)."""
    server_port: int = 8000
    """Port of the server."""
    api_key: str | None = None
    """What the server asks for; None reads PLUGRL_API_KEY from the environment."""
    ca_file: str | None = None
    """Certificates to trust, in PEM: the client speaks wss."""
    library: Literal["websockets", "picows"] = "websockets"
    """What carries the frames; picows needs plugrl-env-client[fast]."""
    give_up_after: float | None = 300.0
    """Longest search for a server in seconds; None never gives up."""
    reconnect_on_server_stop: bool = False
    """When the run is finished, wait for the next one."""
    reuse_feedback_obs: bool = True
    """Leave out observations that the server has."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe message shown."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant.

        Raises:
            UsageError: a number below 1, no port, or a negative time.
        """
        for name in ("num_envs", "num_procs", "num_episodes"):
            _at_least_one(getattr(self, name), f"--{name.replace('_', '-')}")
        if not 1 <= self.server_port <= 65535:
            raise UsageError(f"--server-port is {self.server_port}; expected 1 to 65535")
        if self.give_up_after is not None and not self.give_up_after >= 0:
            raise UsageError(f"--give-up-after is {self.give_up_after}; expected at least 0")

    @property
    def key(self) -> str | None:
        """The API key, from the flag or the environment."""
        return self.api_key or os.environ.get("PLUGRL_API_KEY") or None


def automatic_name(uid: str, num_envs: int) -> str:
    """Return a run's name: ``<uid>-nenv<n>-<time>-<8 hex digits>``."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return f"{uid.lower()}-nenv{num_envs}-{stamp}-{uuid.uuid4().hex[:8]}"


def _at_least_one(value: int | None, flag: str) -> None:
    if value is not None and value < 1:
        raise UsageError(f"{flag} is {value}; expected at least 1")
