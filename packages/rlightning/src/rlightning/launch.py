"""`launch`: from a command line to a running user function, and the end of a run.

Reads ``--config-name`` and Hydra overrides, opens the run, and calls the function with its
configuration. Stopping by Ctrl-C or SIGTERM saves and returns normally.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import re
import select
import shlex
import signal
import sys
import threading
from typing import TYPE_CHECKING, TextIO

from rlightning.config import MainConfig, compose, compose_main
from rlightning.config.compose import NO_SWEEP
from rlightning.errors import USER_ERRORS, CheckpointError, ConfigError, StopRequested
from rlightning.utils.logger import close_logger, get_logger
from rlightning.utils.registry import load_modules_from_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = [
    "add_run_options",
    "exit_on_user_error",
    "launch",
    "print_config",
    "reader_may_leave",
    "run_main",
    "stopping_quietly",
    "train_main",
]

_log = get_logger("launch")
_RUNNING = threading.Lock()
_EXIT_CODE_OF_A_MISTAKE = 2
_EXIT_CODE_OF_A_LEFT_PIPE = 141  # what a shell says of a program that such a pipe has ended


def launch(
    main_func: Callable[[MainConfig], None],
    config_path: str | pathlib.Path,
    argv: Sequence[str] | None = None,
) -> None:
    """Run `main_func` with the configuration that the command line names.

    The command line is ``--config-name NAME [group=option] [a.b=c] [+new=val] [~key]``, further
    ``--resume [CHECKPOINT]``, ``--overwrite`` and ``--cfg job`` (print the configuration only).
    A wrong configuration ends the process with exit code 2 and a message.

    Args:
        main_func: builds and runs the parts; see the tutorial for the usual five lines.
        config_path: the folder of YAML files; relative to the file of `main_func`.
        argv: the arguments; by default the process's.
    """
    folder = pathlib.Path(config_path)
    if not folder.is_absolute():
        source = getattr(sys.modules[main_func.__module__], "__file__", None)
        folder = pathlib.Path(source).resolve().parent / folder if source else folder.resolve()
    with reader_may_leave(), stopping_quietly(), exit_on_user_error():
        arguments = _parse(list(sys.argv[1:] if argv is None else argv))
        if arguments.cfg:
            print_config(folder, arguments.config_name, arguments.overrides)
            return
        config = compose_main(folder, arguments.config_name, arguments.overrides)
        run_main(main_func, config, resume=arguments.resume, overwrite=arguments.overwrite)


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """End the process with exit code 2 and a message where a command or configuration is wrong.

    Other errors pass with their traceback.
    """
    try:
        yield
    except USER_ERRORS as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(_EXIT_CODE_OF_A_MISTAKE) from error


@contextlib.contextmanager
def stopping_quietly(exit_code: int = 0) -> Iterator[None]:
    """End the process with one line where Ctrl-C or SIGTERM comes before or after a run.

    While it trains, the run itself listens to them. Beside that there is nothing to save.
    """
    listens = threading.current_thread() is threading.main_thread()
    if listens:
        previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("stopped; nothing was under way that could be saved\n")
        raise SystemExit(exit_code) from None
    finally:
        if listens:
            signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the process without a message where nobody reads on, as behind ``| head -1``.

    A broken pipe to anybody else passes with its traceback.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _is_left(sys.stdout):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at the end
        raise SystemExit(_EXIT_CODE_OF_A_LEFT_PIPE) from None


def _is_left(stream: TextIO) -> bool:
    """Whether the other end of the pipe that `stream` writes to is closed."""
    poll = select.poll()
    try:
        poll.register(stream.fileno(), 0)  # closed ends are told in any case
    except OSError:  # it is no file
        return False
    return bool(poll.poll(0))


def run_main(
    main_func: Callable[[MainConfig], None],
    config: MainConfig,
    *,
    resume: str | None = None,
    overwrite: bool = False,
) -> None:
    """Open the run that `config` describes and call `main_func`; see `launch`.

    Args:
        main_func: called with `config`.
        config: the run.
        resume: a checkpoint, or a folder that holds some, to continue from, in the folder of the
            run that wrote it; an empty string means the newest of the run that `config` names.
        overwrite: whether an earlier run in the same folder may be written over.

    Raises:
        ConfigError: another run is under way in this process, or `config` cannot work.
    """
    if not _RUNNING.acquire(blocking=False):
        raise ConfigError(
            "another run is under way in this process, and runs share its log files and random "
            "numbers: wait until it ends, or start this one in a process of its own"
        )
    try:
        _run(main_func, config, resume=resume, overwrite=overwrite)
    finally:
        _RUNNING.release()


def _run(
    main_func: Callable[[MainConfig], None],
    config: MainConfig,
    *,
    resume: str | None,
    overwrite: bool,
) -> None:
    _apply_environment(config)
    load_modules_from_config(config)
    from rlightning.build import check_config, open_cluster
    from rlightning.checkpoint import find_checkpoint
    from rlightning.runtime import open_run
    from rlightning.utils.logger.curve import write_curve

    check_config(config)
    resume_from = None
    if resume is not None:
        resume_from = find_checkpoint(pathlib.Path(resume) if resume else _own_folder(config))
    context = open_run(config, resume_from=resume_from, overwrite=overwrite)
    try:
        with open_cluster(config), context.stop:  # in this order: joining a cluster takes signals
            main_func(config)
        curve = write_curve(context.run_dir)
        if curve is not None:
            _log.info("learning curve %s", curve)
    except StopRequested:
        _log.warning("stopped before training began; nothing to save")
        context.give_up()
    except (*USER_ERRORS, KeyboardInterrupt):
        context.give_up()  # the corrected command may take the same name; whoever calls says why
        raise
    except Exception as error:
        _log.error("the run failed: %s. Its folder is %s", error, context.run_dir)
        raise
    finally:
        close_logger()


def _own_folder(config: MainConfig) -> pathlib.Path:
    """Return where the run that `config` names keeps its checkpoints."""
    if config.train.save_dir:
        return pathlib.Path(config.train.save_dir)
    project = pathlib.Path(config.log.log_dir) / config.log.project
    own = project / config.log.name
    if "name" not in config.log.model_fields_set:
        # Runs without a name of their own are numbered: NAME, NAME-2, ...; the last one is meant.
        return _newest_run(project, rf"{re.escape(own.name)}(-\d+)?") or own
    newest = None if own.exists() else _newest_run(project, ".*")
    if newest is not None:  # a name made of the time is another one at each start
        raise CheckpointError(
            f"there is no run {own} to continue. The newest of its project is {newest}; if it is "
            f"meant: --resume {shlex.quote(str(newest))}"
        )
    return own


def _newest_run(project: pathlib.Path, names: str) -> pathlib.Path | None:
    """Return the folder of the run that began last, of those whose names match, or None."""
    folders = project.iterdir() if project.is_dir() else ()
    started = [path / "config.yaml" for path in folders if re.fullmatch(names, path.name)]
    runs = [path for path in started if path.exists()]
    return max(runs, key=lambda path: path.stat().st_mtime_ns).parent if runs else None


def train_main(config: MainConfig) -> None:
    """Build the parts of a run and run it: what a user's ``main`` usually is."""
    from rlightning.build import (
        build_data_buffer,
        build_engine,
        build_env_group,
        build_policy_group,
    )

    env_group = build_env_group(config.env)
    policy_group = build_policy_group(config.policy.type, config.policy, config.cluster)
    buffer = build_data_buffer(config.buffer.type, config.buffer, seed=config.train.seed)
    build_engine(config, env_group, policy_group, buffer).run()


def print_config(folder: pathlib.Path, name: str, overrides: Sequence[str]) -> None:
    """Write the composed configuration to standard output."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        text = OmegaConf.to_yaml(compose(folder, name, overrides), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"cannot resolve {name}: {error}") from error
    sys.stdout.write(text)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train as a configuration says.")
    parser.add_argument("--config-name", required=True, help="YAML file below the config folder")
    add_run_options(parser)
    return parse_with_overrides(parser, argv)


def parse_with_overrides(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> argparse.Namespace:
    """Parse a command line whose overrides may stand before, between and after its options."""
    arguments, rest = parser.parse_known_args(argv)
    wrong = [item for item in rest if item.startswith("-") or "overrides" not in arguments]
    if wrong:
        sweeps = {"-m", "--multirun"}.intersection(wrong)
        parser.error(f"unrecognized arguments: {' '.join(wrong)}" + f"; {NO_SWEEP}" * bool(sweeps))
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    if _is_override(getattr(arguments, "resume", None)):  # `--resume a.b=c`: no value was meant
        arguments.overrides = [arguments.resume, *arguments.overrides]
        arguments.resume = ""
    return arguments


def _is_override(text: str | None) -> bool:
    if not text or pathlib.Path(text).exists():
        return False
    return "=" in text or text.startswith("~")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that every command that runs a configuration takes."""
    parser.add_argument("--cfg", choices=["job"], help="print the configuration and end")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="CHECKPOINT",
        help="continue from a checkpoint; without a value, this run's newest",
    )
    parser.add_argument("--overwrite", action="store_true", help="write over an earlier run")
    parser.add_argument("overrides", nargs="*", help="group=option, a.b=c, +new=val, ~key")


def _apply_environment(config: MainConfig) -> None:
    """Take RLIGHTNING_DEBUG and RLIGHTNING_VERBOSE as defaults; the configuration wins."""
    for name in ("debug", "verbose"):
        value = os.environ.get(f"RLIGHTNING_{name.upper()}")
        if value is not None and name not in config.model_fields_set:
            if value not in ("0", "1"):
                raise ConfigError(f"RLIGHTNING_{name.upper()} is {value!r}; expected 0 or 1")
            setattr(config, name, value == "1")
