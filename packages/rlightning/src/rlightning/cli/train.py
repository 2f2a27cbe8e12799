"""``rlightning train``: run a configuration, then say what came of it and what to do next."""

from __future__ import annotations

import pathlib
import re
import shlex
import shutil
import sys
from typing import TYPE_CHECKING

from rlightning.checkpoint import find_checkpoint, list_checkpoints
from rlightning.config import compose_main
from rlightning.config.compose import CONFIGS
from rlightning.launch import print_config, run_main, train_main
from rlightning.utils.logger.files import read_rows
from rlightning.utils.progress import get_console
from rlightning.utils.registry import ENVS

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.console import Console

    from rlightning.config import MainConfig

__all__ = ["find_config", "read_config", "train"]

_MEASURES = (
    ("environment steps", "env_step", 0),
    ("seconds", "wall_s", 1),
    ("evaluation episodes", "eval/episodes", 0),
    ("mean return", "eval/episode_return", 1),
    ("standard deviation", "eval/episode_return_std", 1),
    ("mean length", "eval/episode_length", 1),
    ("success", "eval/success", 2),
)
_OF_A_TASK = re.compile("eval/([^/]+)/episode_return")


def find_config(name: str) -> tuple[pathlib.Path, str]:
    """Return the folder and the stem of a shipped configuration, or of a YAML file."""
    path = pathlib.Path(name)
    is_file = path.suffix in (".yaml", ".yml")
    return (path.parent, path.stem) if is_file else (CONFIGS, name)


def read_config(name: str, overrides: Sequence[str] = ()) -> MainConfig:
    """Return a shipped configuration, or that of a YAML file."""
    return compose_main(*find_config(name), overrides)


def train(arguments: argparse.Namespace) -> None:
    """Run the command."""
    folder, name = find_config(arguments.config)
    if arguments.cfg:
        print_config(folder, name, arguments.overrides)
        return
    config = compose_main(folder, name, arguments.overrides)
    run_main(train_main, config, resume=arguments.resume, overwrite=arguments.overwrite)
    _print_summary(config, arguments.config, arguments.overrides)


def _print_summary(config: MainConfig, name: str, overrides: Sequence[str]) -> None:
    from rich.table import Table

    run_dir, console = config.run.run_dir, get_console()
    program = "rlightning" if shutil.which("rlightning") else sys.argv[0]

    def command(*words: object) -> str:
        return "  " + shlex.join(map(str, (program, *words)))

    if config.run.stop.requested:
        if list_checkpoints(config.run.checkpoint_dir):
            again = command("train", name, *overrides, "--resume", run_dir)
            _print_lines(console, "stopped; to go on:", again)
        return
    latest: dict[str, float] = {}
    for row in read_rows(run_dir / "metrics.jsonl"):
        latest |= row
    made = ", ".join(dict.fromkeys(entry.task for entry in config.env))
    table = Table("measured", "value", title=f"{made}, {config.policy.type}")
    found = filter(None, map(_OF_A_TASK.fullmatch, latest))
    tasks = [(f"mean return, {match[1]}", match[0], 1) for match in found]
    for label, key, digits in (*_MEASURES, *tasks):
        if key in latest:
            table.add_row(label, f"{latest[key]:,.{digits}f}")
    console.print(table)
    if not list_checkpoints(config.run.checkpoint_dir):
        return  # an evaluation: it has trained nothing to go on with
    checkpoint = find_checkpoint(config.run.checkpoint_dir)
    seed = config.run.seed + 1
    kept = [item for item in overrides if not item.startswith(("train.seed=", "log.name="))]
    other = [*kept, f"train.seed={seed}", f"log.name=seed-{seed}"]
    following = [command("eval", checkpoint), command("train", name, *other)]
    if all(ENVS.get(entry.backend).makes_frames() for entry in config.env):
        following.insert(1, command("play", checkpoint, "--video", run_dir / "play.mp4"))
    _print_lines(console, f"learning curve  {run_dir / 'curve.png'}", "next:", *following)


def _print_lines(console: Console, *lines: str) -> None:
    console.print("\n".join(lines), soft_wrap=True, highlight=False, markup=False)
