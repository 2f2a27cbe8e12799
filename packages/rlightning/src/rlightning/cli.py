"""The command ``rlightning``: train, eval, list. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import pathlib
import sys
from typing import TYPE_CHECKING

from rlightning import __version__
from rlightning.errors import RLightningError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlightning.config import MainConfig

__all__ = ["main"]

CONFIGS = pathlib.Path(__file__).parent / "configs"
"""The configurations that ship with the package."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; a mistake in it ends the process with exit code 2 and a message."""
    arguments = _parser().parse_args(argv)
    try:
        arguments.run(arguments)
    except RLightningError as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from error


def _parser() -> argparse.ArgumentParser:
    from rlightning.launch import add_run_options

    parser = argparse.ArgumentParser(
        prog="rlightning", description="Reinforcement learning for robots and simulated bodies."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    train = commands.add_parser("train", help="train a policy as a configuration says")
    train.add_argument("config", help="a shipped configuration's name, or a YAML file")
    add_run_options(train)
    train.set_defaults(run=_train)

    evaluate = commands.add_parser("eval", help="measure a trained policy")
    evaluate.add_argument("checkpoint", help="a checkpoint, or a run directory for its newest")
    evaluate.add_argument("--episodes", type=int, default=100, help="episodes to play")
    evaluate.add_argument("--seed", type=int, default=0, help="seed of the environments")
    evaluate.set_defaults(run=_evaluate)

    listing = commands.add_parser("list", help="show what can be named in a configuration")
    kinds = ["policies", "envs", "buffers", "engines", "configs"]
    listing.add_argument("kind", nargs="?", choices=kinds, help="only these")
    listing.set_defaults(run=_list)
    return parser


def _train(arguments: argparse.Namespace) -> None:
    from rlightning.config import compose, compose_main
    from rlightning.launch import run_main, train_main

    folder, name = _find_config(arguments.config)
    if arguments.cfg:
        from omegaconf import OmegaConf

        composed = compose(folder, name, arguments.overrides)
        sys.stdout.write(OmegaConf.to_yaml(composed, resolve=True))
        return
    config = compose_main(folder, name, arguments.overrides)
    run_main(train_main, config, resume=arguments.resume, overwrite=arguments.overwrite)
    _print_summary(config)


def _find_config(name: str) -> tuple[pathlib.Path, str]:
    path = pathlib.Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path.parent, path.stem
    return CONFIGS, name


def _print_summary(config: MainConfig) -> None:
    from rich.table import Table

    from rlightning.checkpoint import find_checkpoint
    from rlightning.utils.logger.files import read_rows
    from rlightning.utils.progress import get_console

    run_dir = config.run.run_dir
    rows = read_rows(run_dir / "metrics.jsonl")
    latest: dict[str, float] = {}
    for row in rows:
        latest |= row
    table = Table(title=f"{config.env[0].task}, {config.policy.type}")
    table.add_column("measured")
    table.add_column("value", justify="right")
    for label, key in (
        ("environment steps", "env_step"),
        ("seconds", "wall_s"),
        ("evaluation episodes", "eval/episodes"),
        ("mean return", "eval/episode_return"),
        ("standard deviation", "eval/episode_return_std"),
        ("mean length", "eval/episode_length"),
        ("success", "eval/success"),
    ):
        if key in latest:
            table.add_row(label, f"{latest[key]:,.1f}")
    console = get_console()
    console.print(table)
    checkpoint = find_checkpoint(config.run.checkpoint_dir)
    console.print(f"learning curve  {run_dir / 'curve.png'}", soft_wrap=True)
    console.print("next:")
    for command in (
        f"rlightning eval {checkpoint}",
        f"rlightning train {sys.argv[2] if len(sys.argv) > 2 else 'CONFIG'} train.seed=1",
        f"tensorboard --logdir {run_dir}",
    ):
        console.print(f"  {command}", soft_wrap=True)


def _evaluate(arguments: argparse.Namespace) -> None:
    import yaml

    from rlightning.build import build_env_group, build_policy_group, check_config
    from rlightning.checkpoint import find_checkpoint, load_weights
    from rlightning.config import MainConfig
    from rlightning.engine.evaluation import evaluate_episodes, summarise
    from rlightning.utils.registry import load_modules_from_config
    from rlightning.utils.seeding import derive_seed, seed_everything

    path = find_checkpoint(pathlib.Path(arguments.checkpoint))
    config = MainConfig.from_dict(
        yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    )
    load_modules_from_config(config)
    check_config(config)
    seed_everything(arguments.seed)
    seed = derive_seed(arguments.seed, "eval", "env")
    env_group = build_env_group(config.env).for_evaluation()
    try:
        metas = env_group.init(seed=seed)
        policy_group = build_policy_group(config.policy.type, config.policy)
        policy_group.init_eval(env_meta=metas[0])
        policy_group.load_weights(load_weights(path))
        tally = evaluate_episodes(env_group, policy_group, episodes=arguments.episodes, seed=seed)
    finally:
        env_group.close()
    for key, value in summarise(tally).items():
        sys.stdout.write(f"{key:22} {value:.3f}\n")


def _list(arguments: argparse.Namespace) -> None:
    from rlightning.utils.registry import BUFFERS, ENGINE, ENVS, POLICIES

    names = {
        "policies": POLICIES.names(),
        "envs": ENVS.names(),
        "buffers": BUFFERS.names(),
        "engines": ENGINE.names(),
        "configs": sorted(path.stem for path in CONFIGS.glob("*.yaml")),
    }
    for kind, known in names.items():
        if arguments.kind in (None, kind):
            sys.stdout.write(f"{kind}\n" + "".join(f"  {name}\n" for name in known))
