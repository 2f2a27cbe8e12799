"""`RunContext`: one run's folder, seed and stop request, opened once and passed along.

The folder holds the resolved configuration with the commit it ran at, logs, metrics and
checkpoints. Knows nothing about engines, policies or environments.
"""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import platform
import secrets
import shutil
import subprocess
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
import yaml

from rlightning.errors import RunDirectoryError
from rlightning.runtime.stop_signal import StopSignal
from rlightning.utils.logger import get_logger, setup_logger
from rlightning.utils.seeding import seed_everything

if TYPE_CHECKING:
    from rlightning.config import MainConfig

__all__ = ["RunContext", "open_run"]

_log = get_logger("runtime.run")
_CONFIG = "config.yaml"
_CHECKPOINTS = "checkpoints"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunContext:
    """Where a run writes, and what it was started with."""

    run_dir: pathlib.Path
    """The run's folder."""
    checkpoint_dir: pathlib.Path
    """Where checkpoints go."""
    seed: int
    """Seeds everything in the run."""
    resume_from: pathlib.Path | None = None
    """The checkpoint to continue from."""
    stop: StopSignal = dataclasses.field(default_factory=StopSignal)
    """Whether somebody asked the run to stop."""

    def record_config(self, config: MainConfig) -> None:
        """Write the run's configuration into its folder, with the commit it runs at.

        A resumed run does so once its checkpoint has proven to fit, and no earlier: until then the
        file belongs to the run that wrote the checkpoint.
        """
        _write_config(config, self.run_dir)

    def give_up(self) -> None:
        """Free the folder's name again where the run ended before it had any result."""
        if not _holds_results(self.run_dir):
            (self.run_dir / _CONFIG).unlink(missing_ok=True)


def open_run(
    config: MainConfig,
    *,
    resume_from: pathlib.Path | None = None,
    overwrite: bool = False,
) -> RunContext:
    """Open the run's folder, start its logs, seed everything, and attach it to `config`.

    Args:
        config: the run; ``config.train.seed`` is drawn where it is unset.
        resume_from: a checkpoint of this folder to continue from.
        overwrite: whether an earlier run in the same folder may be written over; its checkpoints
            wait in ``checkpoints-1``.

    Raises:
        RunDirectoryError: the folder holds an earlier run, and neither was asked for; or it cannot
            be made.
    """
    run_dir = _choose_folder(config, resume_from=resume_from, overwrite=overwrite)
    changed = _take_over(config, resume_from) if resume_from is not None else []
    if config.train.seed is None:
        config.train.seed = secrets.randbelow(2**31)
    try:
        if resume_from is None and config.train.save_dir is None:
            _set_aside(run_dir / _CHECKPOINTS)
        run_dir.mkdir(parents=True, exist_ok=True)
        setup_logger(config.log, run_dir=run_dir)
    except OSError as error:
        raise RunDirectoryError(
            f"the run directory {run_dir} cannot be made, or not be written to: {error}"
        ) from error
    checkpoint_dir = pathlib.Path(config.train.save_dir or run_dir / _CHECKPOINTS)
    config.train.save_dir = str(checkpoint_dir)
    if config.train.torch_threads is not None:
        torch.set_num_threads(config.train.torch_threads)
    seed_everything(config.train.seed)
    context = RunContext(
        run_dir=run_dir,
        checkpoint_dir=checkpoint_dir,
        seed=config.train.seed,
        resume_from=resume_from,
    )
    config.attach_run(context)
    if resume_from is None:
        context.record_config(config)
    _log.info("run directory %s, seed %d", run_dir, config.train.seed)
    if torch.cuda.is_available():
        _log.info(
            "the same seed gives the same numbers on this machine's CPU; what a GPU computes may "
            "differ in the last digits from run to run, and so whole runs"
        )
    for line in changed:
        _log.warning("since the checkpoint the configuration changed: %s", line)
    return context


def _choose_folder(
    config: MainConfig, *, resume_from: pathlib.Path | None, overwrite: bool
) -> pathlib.Path:
    project = pathlib.Path(config.log.log_dir) / config.log.project
    run_dir = project / config.log.name
    if resume_from is not None:
        return next((path for path in resume_from.parents if _holds_a_run(path)), run_dir)
    if overwrite or not _holds_a_run(run_dir):
        return run_dir
    if "name" not in config.log.model_fields_set:
        return next(
            candidate
            for number in itertools.count(2)
            if not _holds_a_run(candidate := project / f"{config.log.name}-{number}")
        )
    raise RunDirectoryError(
        f"{run_dir} holds an earlier run, which stays as it is. Continue it with --resume, choose "
        "another name with log.name=NAME, or write over it with --overwrite"
    )


def _take_over(config: MainConfig, checkpoint: pathlib.Path) -> list[str]:
    """Take the seed from the checkpoint's configuration where `config` has none.

    Returns:
        What differs otherwise, one line per key; where logs go and how long to train may.
    """
    saved = yaml.safe_load((checkpoint / "config.yaml").read_text(encoding="utf-8")) or {}
    if config.train.seed is None:
        config.train.seed = saved.get("train", {}).get("seed")
    before, now = _flatten(saved), _flatten(config.model_dump(mode="json"))
    free = ("log.", "train.max_epochs", "train.save_dir", "verbose", "debug")
    return [
        f"{key} was {before.get(key)!r}, is {now.get(key)!r}"
        for key in sorted(before.keys() | now.keys())
        if before.get(key) != now.get(key) and not key.startswith(free)
    ]


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict):
        items: Any = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    else:
        return {prefix: tree}
    flat: dict[str, Any] = {}
    for key, value in items:
        flat |= _flatten(value, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _holds_a_run(run_dir: pathlib.Path) -> bool:
    return (run_dir / _CONFIG).exists() or _holds_results(run_dir)


def _holds_results(run_dir: pathlib.Path) -> bool:
    """Return whether a folder has something to lose: a number, or a checkpoint."""
    metrics = run_dir / "metrics.jsonl"
    measured = metrics.is_file() and metrics.stat().st_size > 0
    return measured or any((run_dir / _CHECKPOINTS).glob("*/manifest.json"))


def _set_aside(checkpoints: pathlib.Path) -> None:
    """Keep what a run that is written over has saved, where no resume takes it for the new one's.

    What an even earlier run had saved gives way to it.
    """
    if checkpoints.is_dir():
        aside = checkpoints.with_name(f"{_CHECKPOINTS}-1")
        shutil.rmtree(aside, ignore_errors=True)
        checkpoints.rename(aside)


def _write_config(config: MainConfig, run_dir: pathlib.Path) -> None:
    content = config.model_dump(mode="json")
    header = {
        "rlightning": version("rlightning"),
        "torch": version("torch"),
        "python": platform.python_version(),
        "commit": _git_commit(),
    }
    text = "".join(f"# {key}: {value}\n" for key, value in header.items())
    text += yaml.safe_dump(content, sort_keys=False)
    (run_dir / _CONFIG).write_text(text, encoding="utf-8")


def _git_commit() -> str:
    """Return the commit of the working directory, with a mark where files differ from it."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "not under git"
    return described.stdout.strip()
