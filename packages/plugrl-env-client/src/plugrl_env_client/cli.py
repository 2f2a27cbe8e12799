"""``plugrl-run-env-client <env> [flags]``: read the command line, and run it."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import pathlib
import signal
import sys
from typing import TYPE_CHECKING, Any

import tyro

import plugrl_env_client.envs  # noqa: F401  # registers the built-in ones
from plugrl_env_client.args import Args, automatic_name
from plugrl_env_client.errors import EnvClientError, UsageError
from plugrl_env_client.utils.registration import (
    REGISTERED_ENV_CONFIGS,
    get_env_config,
    get_env_spec,
    load_entry_points,
)
from plugrl_protocol.console import reader_may_leave

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_env_client.runner.run import Job

__all__ = ["main", "parse"]

PROGRAM = "plugrl-run-env-client"
_log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the client.

    Args:
        argv: the command line without the program; None takes it from the process.

    Returns:
        The exit code: 0 finished, 1 failed, 2 a command line that cannot be meant, 128 + n stopped
        by signal n.
    """
    try:
        return _main(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:  # before the run, or a second one after it
        return 128 + signal.SIGINT


def _main(given: list[str]) -> int:
    with reader_may_leave():
        try:
            job = parse(given)
        except _HelpRequested as help_text:
            sys.stdout.write(f"{help_text}\n")
            return 0
        except EnvClientError as error:
            sys.stderr.write(f"{PROGRAM}: error: {error}\n")
            return 2
    try:
        (job.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.stderr.write(f"{PROGRAM}: error: --runs-dir {job.args.runs_dir}: {error}\n")
        return 2
    return _run(job)


def parse(argv: Sequence[str]) -> Job:
    """Read a command line.

    Raises:
        UsageError: the environment is missing, or a flag cannot be meant.
        UnknownEnvironmentError: there is none of this name.
        SystemExit: raised by tyro, for a flag that does not exist and for help.
    """
    from plugrl_env_client.runner.run import Job

    rest, imports = _import_plug_ins(argv)
    if not rest or rest[0].startswith("-"):
        if "--help" in rest or "-h" in rest:
            raise _HelpRequested(_menu())
        raise UsageError(f"which environment?\n\n{_menu()}")
    uid = get_env_spec(rest[0]).uid
    args = _flags(uid, rest[1:])
    name = args.exp_name or automatic_name(uid, args.num_envs)
    return Job(uid, args, pathlib.Path(args.runs_dir) / name, imports)


class _HelpRequested(Exception):  # noqa: N818  # not an error
    """Somebody asked for help before an environment was named; the text is the argument."""


def _import_plug_ins(argv: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Import what ``--import`` names and what distributions declare; return the rest, and names."""
    rest: list[str] = []
    imports: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        flag, has_value, value = argument.partition("=")
        if flag != "--import":
            rest.append(argument)
            continue
        module = value if has_value else next(arguments, "")
        _import(module)
        imports.append(module)
    try:
        load_entry_points()
    except ImportError as error:
        _log.warning("an installed environment cannot be imported: %s", error)
    return rest, tuple(imports)


def _import(module: str) -> None:
    folder = str(pathlib.Path.cwd())
    if folder not in sys.path:  # a console script does not look where it was started
        sys.path.insert(0, folder)
    try:
        importlib.import_module(module)
    except (ModuleNotFoundError, ValueError) as error:
        missing = getattr(error, "name", None)
        if missing is not None and not f"{module}.".startswith(f"{missing}."):
            raise  # the module exists; something that it needs does not
        raise UsageError(
            f"--import {module}: there is no such module; it must be installed, or lie in the "
            "folder or on the PYTHONPATH that the command starts with"
        ) from error


def _flags(uid: str, rest: list[str]) -> Args:
    """Build the one parser that is needed, and let it read the flags."""
    config = get_env_config(uid)
    own: list[Any] = [
        ("env", type(config), dataclasses.field(default_factory=lambda: config)),
    ]
    chosen = dataclasses.make_dataclass("ChosenArgs", own, bases=(Args,), frozen=True)
    chosen.__doc__ = f"{Args.__doc__ or ''} Here: {uid}."
    parsed: Any = tyro.cli(chosen, args=rest, prog=f"{PROGRAM} {uid.lower()}")
    # A class that other processes can import, unlike the one made here.
    return Args(**{field.name: getattr(parsed, field.name) for field in dataclasses.fields(Args)})


def _menu() -> str:
    names = sorted(name.lower() for name in REGISTERED_ENV_CONFIGS)
    return "\n".join(
        [
            f"usage: {PROGRAM} <env> [flags]",
            "",
            f"environments: {', '.join(names)}",
            "",
            "flags:",
            "  --import MODULE  import a module that registers environments; may be repeated",
            "  --help           after an environment: every flag",
        ]
    )


def _run(job: Job) -> int:
    from plugrl_env_client.recorder import write_json
    from plugrl_env_client.runner.logs import logging_to
    from plugrl_env_client.runner.run import run_guarded, run_multiprocess

    with logging_to(job.run_dir, level=job.args.log_level):
        config = {"uid": job.uid, **dataclasses.asdict(job.args)}
        config.pop("api_key")
        write_json(job.run_dir / "client_config.json", config)
        _log.info("writing to %s", job.run_dir)
        if job.args.num_procs == 1:
            return run_guarded(job)[0]
        return run_multiprocess(job, job.args.num_procs)


if __name__ == "__main__":
    sys.exit(main())
