"""The command line's grammar; each command's work stands in a module of its own."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from rlightning import __version__
from rlightning.cli.completion import SHELLS, completion_script
from rlightning.launch import (
    add_run_options,
    exit_on_user_error,
    parse_with_overrides,
    reader_may_leave,
    stopping_quietly,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_EXIT_CODE_OF_CTRL_C = 130  # what a shell says of a program that it has ended


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; a mistake in it ends the process with exit code 2 and a message."""
    parser = _parser()
    with reader_may_leave(), exit_on_user_error():
        arguments = parse_with_overrides(parser, argv)
        if arguments.command == "completion":
            sys.stdout.write(completion_script(parser, arguments.shell))
        else:
            with stopping_quietly(0 if arguments.command == "train" else _EXIT_CODE_OF_CTRL_C):
                _run(arguments)


def _run(arguments: argparse.Namespace) -> None:
    sys.path.insert(
        0, ""
    )  # modules beside the configuration are found, as `python` would find them
    match arguments.command:
        case "train":
            from rlightning.cli.train import train

            train(arguments)
        case "eval":
            from rlightning.cli.evaluate import evaluate

            evaluate(
                arguments.checkpoint,
                episodes=arguments.episodes,
                seed=arguments.seed,
                config_name=arguments.config,
                overrides=arguments.overrides,
            )
        case "play":
            from rlightning.cli.evaluate import play

            play(
                arguments.checkpoint,
                episodes=arguments.episodes,
                seed=arguments.seed,
                video=arguments.video,
                task=arguments.task,
            )
        case "new":
            from rlightning.cli.new import new_project

            new_project(arguments.folder)
        case _:
            from rlightning.cli.listing import list_names

            list_names(arguments.kind)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _seed(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**32:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 2**32)")
    return number


def _mp4(text: str) -> str:
    if not text.endswith(".mp4"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .mp4")
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="rlightning", description="Reinforcement learning for robots and simulated bodies."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(
        title="commands", dest="command", required=True, metavar="COMMAND"
    )

    train = commands.add_parser("train", help="train a policy as a configuration says")
    train.add_argument("config", help="a shipped configuration's name, or a YAML file")
    add_run_options(train)

    evaluate = commands.add_parser("eval", help="measure a trained policy")
    evaluate.add_argument("checkpoint", help="a checkpoint, or a run directory for its newest")
    evaluate.add_argument("--episodes", type=_positive, default=100, help="episodes to play")
    evaluate.add_argument("--seed", type=_seed, default=0, help="seed of the environments")
    evaluate.add_argument(
        "--config", help="configuration for a checkpoint that has none, of the training server"
    )
    evaluate.add_argument("overrides", nargs="*", help="a.b=c: changes of that configuration")

    play = commands.add_parser("play", help="watch a trained policy, in a window or as a video")
    play.add_argument("checkpoint", help="a checkpoint, or a run directory for its newest")
    play.add_argument("--episodes", type=_positive, default=1, help="episodes to play")
    play.add_argument("--seed", type=_seed, default=0, help="seed of the environment")
    play.add_argument(
        "--video", type=_mp4, metavar="FILE.mp4", help="write a video instead of a window"
    )
    play.add_argument("--task", help="which task of several, by its name in metrics; the first")

    new = commands.add_parser("new", help="start a project with a policy of your own that works")
    new.add_argument("folder", help="a folder that does not exist yet")

    listing = commands.add_parser("list", help="show what can be named in a configuration")
    kinds = ["policies", "envs", "buffers", "engines", "configs"]
    listing.add_argument("kind", nargs="?", choices=kinds, help="only these")

    completion = commands.add_parser("completion", help="print a completion script for a shell")
    completion.add_argument("shell", choices=SHELLS)
    return parser
