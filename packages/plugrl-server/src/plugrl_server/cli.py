"""``plugrl-run-server``: build what a command line chose, and serve it.

Only the chosen policy and algorithm are imported and built. torch is loaded after the command line
has been understood.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import time
from typing import TYPE_CHECKING, Any

from plugrl_server.cli_args import Choice, HelpRequested, fail, parse
from plugrl_server.common.logging_utils import configure_logging, get_logger
from plugrl_server.errors import RunExistsError, ServerError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_server.algorithm.base_algorithm import BaseAlgorithm
    from plugrl_server.common.checkpoint_manager import CheckpointManager
    from plugrl_server.common.metrics import MetricSink
    from plugrl_server.server.websocket_agent_server import WebSocketAgentServer

__all__ = ["build_server", "main"]

_log = get_logger("cli")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the server; the program ends with the exit code.

    Args:
        argv: the command line without the program; None takes it from the process.
    """
    try:
        choice = parse(sys.argv[1:] if argv is None else argv)
    except HelpRequested as help_text:
        sys.stdout.write(f"{help_text}\n")
        return
    except UsageError as error:
        fail(str(error))
    configure_logging(choice.args.log_level)
    try:
        server = build_server(choice)
    except (RunExistsError, FileNotFoundError, ServerError) as error:
        fail(str(error))
    server.serve_forever()


def build_server(choice: Choice) -> WebSocketAgentServer:
    """Build everything that a command line chose, in the order in which seeds matter.

    Raises:
        RunExistsError: the run exists, and neither ``--resume`` nor ``--overwrite`` was given.
        FileNotFoundError: there is nothing to resume.
        ServerError: what was chosen does not fit together.
    """
    import plugrl_server

    args = choice.args
    _log.info("plugrl_server version: %s", plugrl_server.__version__)
    if args.serve_only is not None:
        return _build_serve_only(choice)
    run_dir = _run_directory(choice)
    from plugrl_server.common.checkpoint_manager import CheckpointManager

    checkpoints = CheckpointManager(
        run_dir,
        config=_plain_config(choice),
        overwrite=args.overwrite,
        resume=args.resume,
        keep=args.keep,
    )
    algorithm = _build_algorithm(choice)
    resumed = checkpoints.load_checkpoint() if args.resume else None
    sink = _open_metrics(choice, run_dir, resumed_at=None if resumed is None else resumed.step)
    server = _make_server(choice, algorithm, checkpoints, sink)
    if resumed is not None:
        server.trainer.restore(resumed)
        _log.info("resumed at step %d", resumed.step)
    return server


def _build_serve_only(choice: Choice) -> WebSocketAgentServer:
    from plugrl_server.algorithm.registration import make_algo
    from plugrl_server.common.metrics import NoOpMetricSink

    policy = _build_policy(choice)
    if choice.config is not None:
        from plugrl_server.common.checkpoint_manager import load_checkpoint_from_path

        served = _serve_rlightning(policy, learns=False)
        served.load_checkpoint(load_checkpoint_from_path(pathlib.Path(choice.args.serve_only)))
        return _make_server(choice, served, None, NoOpMetricSink())
    from plugrl_server.algorithm.eval.eval_config import EvalConfig

    config = EvalConfig(policy_checkpoint_path=choice.args.serve_only)
    algorithm = make_algo("eval", policy, config=config)
    return _make_server(choice, algorithm, None, NoOpMetricSink())


def _serve_rlightning(policy: Any, *, learns: bool) -> BaseAlgorithm:
    from plugrl_server.algorithm.rlightning.rlightning_algorithm import (
        RLightningAlgorithm,
        RLightningConfig,
    )

    return RLightningAlgorithm(RLightningConfig(learns=learns), policy)


def _build_policy(choice: Choice) -> Any:
    import torch

    from plugrl_server.policy.registration import make_policy
    from rlightning.utils.seeding import seed_everything

    threads, seed, config = choice.args.torch_threads, choice.args.seed, choice.config
    if config is not None:
        threads, seed = config.train.torch_threads or threads, config.train.seed
    if threads:
        torch.set_num_threads(threads)
    seed_everything(seed)
    if config is not None:
        from plugrl_server.algorithm.rlightning.served_policy import ServedPolicy

        served = ServedPolicy(config)
        _log.info("Policy created: %s", served.name)
        return served
    policy = make_policy(choice.policy_uid, choice.args.policy)
    _log.info("Policy created: %s", type(policy).__name__)
    return policy


def _build_algorithm(choice: Choice) -> BaseAlgorithm:
    from plugrl_server.algorithm.registration import make_algo

    policy = _build_policy(choice)
    if choice.config is not None:
        algorithm = _serve_rlightning(policy, learns=True)
    else:
        algorithm = make_algo(choice.algo_uid, policy, config=choice.args.algo)
    if choice.args.learn_mode == "overlap":
        try:
            algorithm.separate_learner()
        except NotImplementedError as error:
            raise UsageError(str(error)) from error
    algorithm.init_optimizers()
    return algorithm


def _make_server(
    choice: Choice,
    algorithm: BaseAlgorithm,
    checkpoints: CheckpointManager | None,
    sink: MetricSink,
) -> WebSocketAgentServer:
    from plugrl_server.server.trainer import TrainerConfig
    from plugrl_server.server.websocket_agent_server import SocketConfig, WebSocketAgentServer

    args = choice.args
    return WebSocketAgentServer(
        algorithm,
        checkpoints,
        sink,
        show_metric_table=args.show_metric_table,
        show_progress_bar=args.show_progress_bar,
        host=args.host,
        port=args.port,
        metadata=None if choice.config is None else {"policy": choice.policy_uid},
        feedback_wait_timeout=args.feedback_wait_timeout,
        trainer_config=TrainerConfig(
            learn_mode=args.learn_mode,
            mini_infer_batch_size=args.mini_infer_batch_size,
            batch_deadline_ms=args.batch_deadline_ms,
            inline_limit_ms=args.inline_limit_ms,
        ),
        socket_config=SocketConfig(
            api_key=args.api_key,
            certificate=args.certificate,
            private_key=args.private_key,
            max_message_mb=args.max_message_mb,
            library=args.library,
        ),
    )


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
