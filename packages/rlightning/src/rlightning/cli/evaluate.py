"""``rlightning eval`` and ``play``: a saved policy, in numbers or to look at."""

from __future__ import annotations

import pathlib
import sys
from typing import TYPE_CHECKING

import yaml

from rlightning.build import build_env_group, build_policy_group, check_config
from rlightning.checkpoint import find_checkpoint, load_weights
from rlightning.config import MainConfig
from rlightning.engine.evaluation import evaluate_episodes, summarise
from rlightning.engine.recording import record_episodes, show_episodes
from rlightning.utils.registry import load_modules_from_config
from rlightning.utils.seeding import derive_seed, seed_everything

if TYPE_CHECKING:
    from rlightning.env import EnvGroup
    from rlightning.policy import PolicyGroup

__all__ = ["evaluate", "play"]


def evaluate(checkpoint: str, *, episodes: int, seed: int) -> None:
    """Play episodes without exploration and print what came of them."""
    path, config = _open(checkpoint, seed)
    group = build_env_group(config.env)
    env_group = group.for_evaluation()
    group.close()
    try:
        env_seed = derive_seed(seed, "eval", "env")
        policy_group = _load(path, config, env_group, env_seed)
        tally = evaluate_episodes(env_group, policy_group, episodes=episodes, seed=env_seed)
    finally:
        env_group.close()
    for key, value in summarise(tally).items():
        sys.stdout.write(f"{key:24} {value:.3f}\n")


def play(checkpoint: str, *, episodes: int, seed: int, video: str | None) -> None:
    """Show episodes in a window, or write them to a video."""
    path, config = _open(checkpoint, seed)
    group = build_env_group(config.env)
    env_group = group.for_recording("human" if video is None else "rgb_array")
    group.close()
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


def _open(checkpoint: str, seed: int) -> tuple[pathlib.Path, MainConfig]:
    path = find_checkpoint(pathlib.Path(checkpoint))
    text = (path / "config.yaml").read_text(encoding="utf-8")
    config = MainConfig.from_dict(yaml.safe_load(text))
    load_modules_from_config(config)
    check_config(config)
    seed_everything(seed)
    return path, config


def _load(path: pathlib.Path, config: MainConfig, env_group: EnvGroup, seed: int) -> PolicyGroup:
    metas = env_group.init(seed=seed)
    policy_group = build_policy_group(config.policy.type, config.policy)
    policy_group.init_eval(env_meta=metas[0])
    policy_group.load_weights(load_weights(path))
    return policy_group
