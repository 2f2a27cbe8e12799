"""The flags of ``plugrl-run-server``, and the names in front of them. Loads no torch."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, NoReturn

import tyro

from plugrl_protocol.console import reader_may_leave
from plugrl_server.algorithm.registration import ALGORITHMS
from plugrl_server.common.ranges import FINITE, UNBOUNDED, Ranges, check_ranges
from plugrl_server.common.registry import load_entry_points
from plugrl_server.errors import UsageError
from plugrl_server.policy.registration import POLICIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_server.common.registry import Registry

__all__ = ["Args", "Choice", "HelpRequested", "TrackArgs", "fail", "is_loopback", "parse", "read"]

PROGRAM = "plugrl-run-server"
RLIGHTNING = "rlightning"
"""UID, as policy and as algorithm, of what an rlightning configuration describes."""
_LEVELS = ("policy", "policy variant", "algorithm", "algorithm variant")


@dataclasses.dataclass
class TrackArgs:
    """Where metrics go, besides the run's ``metrics.jsonl`` and ``metrics.csv``."""

    project_name: str = "PlugRL"
    """The group of runs."""
    entity: str = ""
    """The team, for wandb."""
    tracker: Literal["tensorboard", "wandb", "swanlab", "trackio"] = "tensorboard"
    """Which tracker."""
    mode: str | None = None
    """The tracker's own word for online, offline or disabled; None keeps metrics here."""
    enabled: bool = False
    """Use it."""


@dataclasses.dataclass
class Args:
    """A training server."""

    _ranges: ClassVar[Ranges] = {
        "port": (0, 65535),
        "max_message_mb": (0.001, UNBOUNDED),
        "exp_id": (0, UNBOUNDED),
        "seed": (0, 2**32 - 1),
        "mini_infer_batch_size": (1, UNBOUNDED),
        "batch_deadline_ms": (0, FINITE),
        "inline_limit_ms": (0, UNBOUNDED),
        "busy_poll_us": (0, FINITE),
        "feedback_wait_timeout": (0.001, FINITE),
        "torch_threads": (0, UNBOUNDED),
        "keep": (1, UNBOUNDED),
    }

    track: TrackArgs = dataclasses.field(default_factory=TrackArgs)
    """Metrics."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe message shown."""
    host: str = "127.0.0.1"
    """Address to listen on. Any but a loopback address needs --api-key or --allow-anonymous."""
    port: int = 8000
    """Port to listen on; 0 takes a free one, named in the log."""
    api_key: str | None = None
    """What clients must show; None reads PLUGRL_API_KEY from the environment."""
    allow_anonymous: bool = False
    """Let everybody in who can reach the address."""
    certificate: str | None = None
    """Certificate chain in PEM: the server speaks wss."""
    private_key: str | None = None
    """The certificate's key in PEM; None if it is in the same file."""
    max_message_mb: float = 256.0
    """Largest message taken, in MiB."""
    library: Literal["websockets", "picows"] = "websockets"
    """What carries the frames; picows needs plugrl-protocol[fast]."""
    prefix: str | None = None
    """Put into the run's automatic name."""
    suffix: str | None = None
    """Put at the end of the run's automatic name."""
    exp_name: str | None = None
    """The run's name; None makes one from the time."""
    exp_id: int = 0
    """A number in the run's automatic name."""
    seed: int = 0
    """Seeds python, numpy and torch."""
    overwrite: bool = False
    """Replace an earlier run of the same name."""
    resume: bool = False
    """Continue an earlier run: --exp-name, or the newest of these names."""
    serve_only: str | None = None
    """A checkpoint or a run to serve without learning."""
    learn_mode: Literal["sync", "overlap"] = "sync"
    """Whether requests wait for a learn step, or are answered by the last version meanwhile."""
    mini_infer_batch_size: int | None = None
    """Environments with which a batch goes at once; None waits for every client that is due."""
    batch_deadline_ms: float = 5.0
    """Longest wait of a request for others to join its batch."""
    inline_limit_ms: float = 1.0
    """Forward passes up to this long run on the event loop; 0 never does."""
    busy_poll_us: float = 200.0
    """How long to look for a quick client's next message before sleeping, in microseconds; 0 never
    does. Less time per action, more processor time while clients are that quick."""
    feedback_wait_timeout: float = 60.0
    """Longest wait for a feedback in seconds; learn steps do not count."""
    torch_threads: int = 1
    """Threads of one torch operation; 0 leaves it to torch."""
    show_metric_table: bool = True
    """Show numbers."""
    show_progress_bar: bool = True
    """Show a bar."""
    checkpoint_base_dir: str = "./checkpoints"
    """Where runs go: <base>/<algorithm>/<policy>/<run>/<step>."""
    keep: int | None = None
    """How many of the newest checkpoints stay; None keeps all."""

    def validate(self) -> None:
        """Refuse what cannot be meant.

        Raises:
            UsageError: an address that others reach without saying who may come; two ways to
                start at once; a number outside its range.
        """
        if self.api_key is None:
            self.api_key = os.environ.get("PLUGRL_API_KEY") or None
        if not (is_loopback(self.host) or self.api_key or self.allow_anonymous):
            raise UsageError(
                f"--host {self.host} can be reached by others: set --api-key (or PLUGRL_API_KEY), "
                "or say --allow-anonymous"
            )
        if self.resume and self.overwrite:
            raise UsageError("--resume continues a run and --overwrite replaces it; give one")
        check_ranges(self, "--")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    return host in ("localhost", "::1") or host.startswith("127.")


class Choice(NamedTuple):
    """What a command line chose.

    Attributes:
        policy_uid: and `algo_uid`: as registered.
        args: the flags, with the fields ``policy`` and ``algo`` besides those of `Args`.
        config: of an rlightning policy, an `rlightning.config.MainConfig`; None for any other.
    """

    policy_uid: str
    algo_uid: str
    args: Any
    config: Any = None


class HelpRequested(Exception):  # noqa: N818  # not an error
    """Somebody asked for help; the text is the argument."""


def parse(argv: Sequence[str], kind: type[Args] = Args, program: str = PROGRAM) -> Choice:
    """Read a command line.

    Args:
        argv: without the program.
        kind: the flags that there are besides those of policy and algorithm.
        program: how messages name it.

    Raises:
        UsageError: a name is unknown or missing, or the flags contradict each other.
        HelpRequested: with the text of a level that is not the last.
        SystemExit: raised by tyro, for a flag that does not exist and for the last level's help.
    """
    import plugrl_server.algorithm
    import plugrl_server.policy  # noqa: F401  # each registers the built-in ones

    rest = _import_plug_ins(list(argv))
    if rest and rest[0].partition("=")[0] == "--rlightning":
        return _parse_rlightning(rest, kind, program)
    names: list[str] = []
    while rest and len(names) < len(_LEVELS) and not rest[0].startswith("-"):
        names.append(rest.pop(0))
    _check_names(names)
    if len(names) < len(_LEVELS):
        if "--help" in rest or "-h" in rest:
            raise HelpRequested(_menu(names, program))
        raise UsageError(f"{_LEVELS[len(names)]} is missing\n\n{_menu(names, program)}")
    policy_uid, policy_variant, algo_uid, algo_variant = names
    policy = dataclasses.replace(POLICIES.configs[policy_uid][policy_variant], algo=algo_uid)
    algo = ALGORITHMS.configs[algo_uid][algo_variant]
    args = _flags(kind, [program, *names], rest, policy=policy, algo=algo)
    args.validate()
    return Choice(policy_uid, algo_uid, args)


def read(argv: Sequence[str], kind: type[Args] = Args, program: str = PROGRAM) -> Choice | None:
    """Read a command line as `parse` does, at the border of the process; None: it was for help.

    Raises:
        SystemExit: with 2 and a message, where the command line cannot be meant.
    """
    with reader_may_leave():
        try:
            return parse(argv, kind, program)
        except HelpRequested as help_text:
            sys.stdout.write(f"{help_text}\n")
        except UsageError as error:
            fail(str(error), program)
    return None


def _parse_rlightning(rest: list[str], kind: type[Args], program: str) -> Choice:
    """Read ``--rlightning CONFIG [a.b=c ...] [flags]``; overrides may stand among the flags."""
    _, has_value, value = rest.pop(0).partition("=")
    while not has_value and rest and not rest[0].startswith("-"):
        value, has_value = rest.pop(0), "="
    if not value:
        if "--help" not in rest and "-h" not in rest:
            raise UsageError(f"--rlightning needs a configuration\n\n{_usage(program)}")
        value = "CONFIG"
    named = f"{program} --rlightning {value}"
    args, overrides = tyro.cli(kind, args=rest, prog=named, return_unknown_args=True)
    if any(item.startswith("-") for item in overrides):
        flags = [item for item in rest if item.startswith("-") or item not in overrides]
        tyro.cli(kind, args=flags, prog=named)  # it names what it does not know
    args.validate()
    from plugrl_server.algorithm.rlightning.parts import load_config

    config = load_config(value, overrides)
    if config.train.seed is None:
        config.train.seed = args.seed
    return Choice(config.policy.type, RLIGHTNING, args, config)


def _flags(kind: type[Args], names: list[str], rest: list[str], *, policy: Any, algo: Any) -> Any:
    """Build the one parser that is needed, and let it read the flags."""
    fields: list[Any] = [
        ("policy", type(policy), dataclasses.field(default_factory=lambda: policy)),
        ("algo", type(algo), dataclasses.field(default_factory=lambda: algo)),
    ]
    chosen = dataclasses.make_dataclass("ChosenArgs", fields, bases=(kind,))
    chosen.__doc__ = f"{names[1]} trained by {names[3]}."
    return tyro.cli(chosen, args=rest, prog=" ".join(names))


def _import_plug_ins(argv: list[str]) -> list[str]:
    """Import what ``--import`` names and what installed distributions declare; give the rest."""
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        flag, has_value, value = argument.partition("=")
        if flag != "--import":
            rest.append(argument)
            continue
        module = value if has_value else next(arguments, "")
        if os.getcwd() not in sys.path:
            # A console script does not look where it was started; `python -c` does.
            sys.path.append(os.getcwd())
        try:
            importlib.import_module(module)
        except (ModuleNotFoundError, ValueError) as error:
            name = getattr(error, "name", None)
            if name is not None and not module.startswith(name):
                raise
            raise UsageError(
                f"--import {module}: there is no such module; it must be installed, or lie in the "
                "directory or on the PYTHONPATH that the command starts with"
            ) from error
    try:
        load_entry_points()
    except ImportError as error:
        logging.getLogger(__name__).warning("an installed plug-in cannot be imported: %s", error)
    return rest


def _check_names(names: list[str]) -> None:
    """Put names into the form in which they are registered."""
    levels = zip(names, _LEVELS, (POLICIES, POLICIES, ALGORITHMS, ALGORITHMS), strict=False)
    for position, (name, level, registry) in enumerate(levels):
        is_uid = position % 2 == 0
        known = registry.uids() if is_uid else list(registry.configs[names[position - 1]])
        if name in known:
            continue
        spelled = name.replace("_", "-")
        if spelled in known:
            names[position] = spelled
            continue
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        if is_uid:
            hint += " A plug-in is listed once its module is imported: --import my_pkg.module."
        raise UsageError(f"{name!r} is no {level}.{hint} Known: {', '.join(known)}.")


def _usage(program: str) -> str:
    return (
        f"usage: {program} <policy> <variant> <algorithm> <variant> [flags]\n"
        f"       {program} --rlightning CONFIG [a.b=c ...] [flags]"
    )


def _menu(names: list[str], program: str) -> str:
    """Describe what can follow the names given so far."""
    lines = [_usage(program), ""]
    if not names:
        lines += [*_listed("policies", POLICIES), "", *_listed("algorithms", ALGORITHMS)]
        lines += ["", "flags:", "  --import MODULE  import a plug-in first; may be repeated"]
        lines += ["  --rlightning CONFIG  instead of names: a policy of rlightning, see its docs"]
        lines += ["  --help           after all four names: every flag"]
    elif len(names) == 1:
        lines += [f"variants of {names[0]}: {', '.join(POLICIES.configs[names[0]])}"]
    elif len(names) == 2:
        lines += _listed("algorithms", ALGORITHMS)
    else:
        lines += [f"variants of {names[2]}: {', '.join(ALGORITHMS.configs[names[2]])}"]
    return "\n".join(lines)


def _listed(title: str, registry: Registry) -> list[str]:
    lines = [f"{title}:"]
    for uid in registry.uids():
        variants = ", ".join(registry.configs[uid])
        text = _summary(type(next(iter(registry.configs[uid].values()))))
        missing = registry.specs[uid].missing_extra
        note = f"  (not installed: {missing})" if missing else ""
        lines.append(f"  {uid:20} {variants:24} {text}{note}")
    return lines


def _summary(config: type[Any]) -> str:
    """Give the first line of what a configuration says about itself; dataclasses make up more."""
    text = config.__doc__ or ""
    return "" if text.startswith(f"{config.__name__}(") else text.split("\n")[0]


def fail(message: str, program: str = PROGRAM) -> NoReturn:
    """End the program as command lines do: the message on standard error, exit code 2."""
    sys.stderr.write(f"{program}: {message}\n")
    raise SystemExit(2)
