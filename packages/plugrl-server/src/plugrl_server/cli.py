"""``plugrl-run-server``: build what a command line chose, and serve it.

Only the chosen policy and algorithm are imported and built. torch is loaded after the command line
has been understood.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import shlex
import socket
import sys
import time
from typing import TYPE_CHECKING, Any

from plugrl_server.algorithm.registration import ALGORITHMS
from plugrl_server.cli_args import PROGRAM, Args, Choice, fail, read
from plugrl_server.common.logging_utils import configure_logging, get_logger
from plugrl_server.errors import CannotListenError, ServerError
from plugrl_server.policy.registration import POLICIES
from plugrl_server.server.trainer_config import Ending
from rlightning.errors import USER_ERRORS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from plugrl_server.algorithm.base_algorithm import BaseAlgorithm
    from plugrl_server.algorithm.recipe import Recipe
    from plugrl_server.cluster.places import Places
    from plugrl_server.common.checkpoint_manager import CheckpointManager
    from plugrl_server.common.metrics import MetricSink
    from plugrl_server.server.websocket_agent_server import SocketConfig, WebSocketAgentServer
    from rlightning.config import MainConfig
    from rlightning.policy import PolicyGroup

__all__ = ["build_server", "exit_on_known_error", "main", "recipe_of", "serve"]

_log = get_logger("cli")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the server; the program ends with the exit code.

    Args:
        argv: the command line without the program; None takes it from the process.
    """
    with exit_on_known_error(PROGRAM):
        choice = read(sys.argv[1:] if argv is None else argv)
        if choice is None:
            return
        configure_logging(choice.args.log_level)
        serve(build_server(choice))


@contextlib.contextmanager
def exit_on_known_error(program: str) -> Iterator[None]:
    """End the process with a message, instead of a traceback, for mistakes.

    Raises:
        SystemExit: 2 for what cannot be meant or done here, 130 for Ctrl-C before anything is
            served.
    """
    try:
        yield
    except (ServerError, FileNotFoundError, PermissionError, *USER_ERRORS) as error:
        fail(str(error), program)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def serve(server: WebSocketAgentServer) -> None:
    """Run a server until its end; of one that was stopped, say how it goes on.

    Raises:
        SystemExit: with 1, the run failed; the log says why.
    """
    try:
        ending = server.serve_forever()
    except BaseException as error:
        if error is server.trainer.error:
            raise SystemExit(1) from None
        raise
    checkpoints = server.trainer.checkpoints
    if ending is Ending.INTERRUPTED and checkpoints is not None and checkpoints.has_any():
        name = shlex.quote(checkpoints.checkpoint_dir.name)
        _log.info("the same command with --exp-name %s --resume goes on", name)


def build_server(choice: Choice, places: Places | None = None) -> WebSocketAgentServer:
    """Build everything that a command line chose, in the order in which seeds matter.

    Args:
        choice: the command line.
        places: starts workers that act and learn; None: this process does.

    Raises:
        RunExistsError: the run exists, and neither ``--resume`` nor ``--overwrite`` was given.
        FileNotFoundError: there is nothing to resume.
        CannotListenError: the address is taken, or none of this machine.
        ServerError: what was chosen does not fit together.
    """
    import plugrl_server

    args = choice.args
    _log.info("plugrl_server version: %s", plugrl_server.__version__)
    _try_address(args)
    if args.serve_only is not None:
        return _build_serve_only(choice, places)
    run_dir = _run_directory(choice)
    from plugrl_server.common.checkpoint_manager import CheckpointManager, check_run_directory

    check_run_directory(run_dir, overwrite=args.overwrite, resume=args.resume)
    algorithm = _build_algorithm(choice, places)
    # What is overwritten is there until all else has been found right.
    checkpoints = CheckpointManager(
        run_dir,
        config=_plain_config(choice),
        overwrite=args.overwrite,
        resume=args.resume,
        keep=args.keep,
    )
    resumed = checkpoints.load_checkpoint() if args.resume else None
    sink = _open_metrics(choice, run_dir, resumed_at=None if resumed is None else resumed.step)
    server = _make_server(choice, algorithm, checkpoints, sink)
    if resumed is not None:
        server.trainer.restore(resumed)
        _log.info("resumed at step %d", resumed.step)
        if choice.config is None:
            for change in _changes(checkpoints.saved_config(resumed.step), _plain_config(choice)):
                _log.warning("the run goes on with another flag: %s", change)
    return server


def _changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Name what a run learns by, and was saved with other values."""
    changes = []
    for group in ("policy", "algo"):
        was, found = saved.get(group), now.get(group)
        if isinstance(was, dict) and isinstance(found, dict):
            for name in sorted(was.keys() & found.keys()):
                if was[name] != found[name]:
                    flag = f"--{group}.{name.replace('_', '-')}"
                    changes.append(f"{flag} {found[name]} (it was {was[name]})")
    return changes


def _try_address(args: Args) -> None:
    """Find out before a run begins whether it can be served; see `build_server`."""
    stream, passive = socket.SOCK_STREAM, socket.AI_PASSIVE
    try:
        found = socket.getaddrinfo(args.host, args.port, type=stream, flags=passive)
        family, _, _, _, address = found[0]
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        raise CannotListenError(args.host, args.port, error) from error
    _socket_config(args).ssl_context()


def recipe_of(choice: Choice) -> Recipe:
    """Give what an algorithm is built from; of a policy that is not rlightning's."""
    from plugrl_server.algorithm.eval.eval_config import EvalConfig
    from plugrl_server.algorithm.recipe import Recipe

    args, algo_uid = choice.args, choice.algo_uid
    algo_config = args.algo
    if args.serve_only is not None:
        algo_uid, algo_config = "eval", EvalConfig(policy_checkpoint_path=args.serve_only)
    return Recipe(
        policy=POLICIES.get(choice.policy_uid),
        policy_config=args.policy,
        algo=ALGORITHMS.get(algo_uid),
        algo_config=algo_config,
        seed=args.seed,
        torch_threads=args.torch_threads,
        overlaps=args.learn_mode == "overlap",
    )


def _build_serve_only(choice: Choice, places: Places | None) -> WebSocketAgentServer:
    from plugrl_server.common.metrics import NoOpMetricSink

    algorithm = _build_algorithm(choice, places)
    if choice.config is not None:
        from plugrl_server.common.checkpoint_manager import load_checkpoint_from_path

        algorithm.load_checkpoint(load_checkpoint_from_path(pathlib.Path(choice.args.serve_only)))
    return _make_server(choice, algorithm, None, NoOpMetricSink())


def _build_algorithm(choice: Choice, places: Places | None = None) -> BaseAlgorithm:
    if choice.config is not None:
        return _serve_rlightning(choice, places)
    recipe = recipe_of(choice)
    if places is None:
        return recipe.build()
    from plugrl_server.cluster.building import build_spread

    return build_spread(places, recipe)


def _serve_rlightning(choice: Choice, places: Places | None) -> BaseAlgorithm:
    import torch

    from plugrl_server.algorithm.rlightning.parts import build_policies
    from plugrl_server.algorithm.rlightning.rlightning_algorithm import (
        RLightningAlgorithm,
        RLightningConfig,
    )
    from plugrl_server.algorithm.rlightning.served_policy import ServedPolicy
    from rlightning.utils.seeding import seed_everything

    config = choice.config
    threads = config.train.torch_threads or choice.args.torch_threads
    if threads:
        torch.set_num_threads(threads)
    seed_everything(config.train.seed)
    build: Callable[[MainConfig], PolicyGroup] = build_policies
    if places is not None:
        from plugrl_server.cluster.served_policies import policies_builder

        build = policies_builder(places)
    served = ServedPolicy(config, build)
    _log.info("Policy created: %s", served.name)
    learns = choice.args.serve_only is None
    algorithm = RLightningAlgorithm(RLightningConfig(learns=learns), served)
    if choice.args.learn_mode == "overlap":
        algorithm.separate_learner()
    return algorithm


def _make_server(
    choice: Choice,
    algorithm: BaseAlgorithm,
    checkpoints: CheckpointManager | None,
    sink: MetricSink,
) -> WebSocketAgentServer:
    from plugrl_server.server.trainer import TrainerConfig
    from plugrl_server.server.websocket_agent_server import WebSocketAgentServer

    args = choice.args
    return WebSocketAgentServer(
        algorithm,
        checkpoints,
        sink,
        show_metric_table=args.show_metric_table,
        show_progress_bar=args.show_progress_bar,
        host=args.host,
        port=args.port,
        metadata=_metadata(choice),
        feedback_wait_timeout=args.feedback_wait_timeout,
        trainer_config=TrainerConfig(
            learn_mode=args.learn_mode,
            mini_infer_batch_size=args.mini_infer_batch_size,
            batch_deadline_ms=args.batch_deadline_ms,
            inline_limit_ms=args.inline_limit_ms,
        ),
        socket_config=_socket_config(args),
    )


def _socket_config(args: Args) -> SocketConfig:
    from plugrl_server.server.websocket_agent_server import SocketConfig

    return SocketConfig(
        api_key=args.api_key,
        certificate=args.certificate,
        private_key=args.private_key,
        max_message_mb=args.max_message_mb,
        library=args.library,
        busy_poll_us=args.busy_poll_us,
    )


def _metadata(choice: Choice) -> dict[str, Any]:
    """Name what clients hear of, whatever stands in front of it."""
    if choice.config is not None:
        return {"policy": choice.policy_uid}
    return {"algorithm": recipe_of(choice).algo.cls.__name__}


def _run_directory(choice: Choice) -> pathlib.Path:
    """Name the run's directory: ``<base>/<algorithm>/<policy>/<run>``."""
    args = choice.args
    folder = pathlib.Path(args.checkpoint_base_dir) / choice.algo_uid / choice.policy_uid
    if args.exp_name is not None:
        return folder / str(args.exp_name)
    if args.resume:
        from plugrl_server.common.checkpoint_manager import get_latest_checkpoint_step

        runs = sorted(folder.iterdir(), key=lambda p: p.stat().st_mtime) if folder.is_dir() else []
        for run in reversed(runs):
            if get_latest_checkpoint_step(run) is not None:
                return run
        raise FileNotFoundError(f"there is no run with a checkpoint in {folder} to resume")
    parts = [time.strftime("%Y_%m_%d_%H_%M_%S"), args.prefix]
    parts += [f"{args.exp_id:04d}--s-{args.seed}", args.suffix]
    return folder / "_".join(part for part in parts if part)


def _plain_config(choice: Choice) -> dict[str, Any]:
    """Give the command line as plain data, for the checkpoint; secrets stay out."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)

    if choice.config is not None:  # `rlightning eval` reads it from the checkpoint
        described: dict[str, Any] = choice.config.model_dump(mode="json")
        return described
    config: dict[str, Any] = plain(dataclasses.asdict(choice.args))
    config.pop("api_key", None)
    return {"policy_uid": choice.policy_uid, "algo_uid": choice.algo_uid, **config}


def _open_metrics(choice: Choice, run_dir: pathlib.Path, *, resumed_at: int | None) -> MetricSink:
    from plugrl_server.common.metrics import RunMetricSink
    from rlightning.utils.logger import MetricsLogger
    from rlightning.utils.logger.backends import BackendOptions

    track = choice.args.track
    if track.entity:
        os.environ.setdefault("WANDB_ENTITY", track.entity)
    options = BackendOptions(
        project=track.project_name, name=run_dir.name, run_dir=run_dir, mode=track.mode
    )
    backend = track.tracker if track.enabled else "tensorboard"
    logger = MetricsLogger(get_logger("metrics"), options, backend=backend)
    if resumed_at is not None:
        logger.resume(env_step=resumed_at, epoch=0)
    return RunMetricSink(logger)


if __name__ == "__main__":
    main()
