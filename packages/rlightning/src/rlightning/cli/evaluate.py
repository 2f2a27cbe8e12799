"""``rlightning eval`` and ``play``: a saved policy, in numbers or to look at."""

from __future__ import annotations

import contextlib
import pathlib
import sys
from typing import TYPE_CHECKING

import yaml

from rlightning.build import build_env_group, build_policy_group, check_config
from rlightning.checkpoint import find_checkpoint, load_weights
from rlightning.cli.train import read_config
from rlightning.config import MainConfig
from rlightning.engine.evaluation import evaluate_episodes, summarise
from rlightning.engine.recording import record_episodes, show_episodes
from rlightning.errors import CheckpointError, ConfigError
from rlightning.utils.registry import ENVS, load_modules_from_config
from rlightning.utils.seeding import derive_seed, seed_everything

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlightning.env import EnvGroup
    from rlightning.policy import PolicyGroup

__all__ = ["evaluate", "play"]


def evaluate(
    checkpoint: str,
    *,
    episodes: int,
    seed: int,
    config_name: str | None = None,
    overrides: Sequence[str] = (),
) -> None:
    """Play episodes without exploration and print what came of them.

    Args:
        checkpoint: a checkpoint, or a folder of some.
        episodes: how many.
        seed: of the environments.
        config_name: a shipped configuration or a YAML file, for a checkpoint that brings none: one
            of a policy of the training server's own.
        overrides: of that configuration.
    """
    path, config = _open(checkpoint, seed, config_name, overrides)
    with contextlib.closing(build_env_group(config.env)) as group:
        env_group = group.for_evaluation()
    try:
        env_seed = derive_seed(seed, "eval", "env")
        policy_group = _load(path, config, env_group, env_seed)
        tally = evaluate_episodes(env_group, policy_group, episodes=episodes, seed=env_seed)
    finally:
        env_group.close()
    for key, value in summarise(tally).items():
        sys.stdout.write(f"{key:24} {value:.3f}\n")


def play(
    checkpoint: str, *, episodes: int, seed: int, video: str | None, task: str | None = None
) -> None:
    """Show episodes in a window, or write them to a video; of a task's name, or of the first."""
    path, config = _open(checkpoint, seed)
    for entry in config.env if video is not None else ():
        ENVS.get(entry.backend).check_frames("--video")
    with contextlib.closing(build_env_group(config.env)) as group:
        env_group = group.for_recording("human" if video is None else "rgb_array", task)
    try:
        env_seed = derive_seed(seed, "eval", "env")
        policy_group = _load(path, config, env_group, env_seed)
        if video is None:
            returns = show_episodes(env_group, policy_group, episodes=episodes, seed=env_seed)
        else:
            target = pathlib.Path(video)
            returns = record_episodes(
                env_group, policy_group, target, episodes=episodes, seed=env_seed
            )
            sys.stdout.write(f"{target}\n")
    finally:
        env_group.close()
    for number, value in enumerate(returns, start=1):
        sys.stdout.write(f"episode {number}: return {value:.1f}\n")


def _open(
    checkpoint: str, seed: int, config_name: str | None = None, overrides: Sequence[str] = ()
) -> tuple[pathlib.Path, MainConfig]:
    if overrides and config_name is None:
        raise ConfigError(
            f"unrecognized arguments: {' '.join(overrides)}; they change the configuration that "
            "--config names"
        )
    path = find_checkpoint(pathlib.Path(checkpoint))
    config = _saved_config(path) if config_name is None else read_config(config_name, overrides)
    load_modules_from_config(config)
    check_config(config)
    seed_everything(seed)
    return path, config


def _saved_config(path: pathlib.Path) -> MainConfig:
    saved = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8")) or {}
    if "policy_uid" in saved:
        raise CheckpointError(
            f"{path} was saved by the training server's policy {saved['policy_uid']!r}, which does "
            "not say in which environment to evaluate it: give a configuration with --config, for "
            "example --config pendulum_ppo policy.model_cfg.normalize_observations=true"
        )
    return MainConfig.from_dict(saved)


def _load(path: pathlib.Path, config: MainConfig, env_group: EnvGroup, seed: int) -> PolicyGroup:
    metas = env_group.init(seed=seed)
    policy_group = build_policy_group(config.policy.type, config.policy)
    policy_group.init_eval(env_meta=metas[0])
    policy_group.load_weights(load_weights(path))
    return policy_group
