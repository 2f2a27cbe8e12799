"""Run an environment client: in this process, or in several that live and end together."""

from __future__ import annotations

import dataclasses
import importlib
import logging
import multiprocessing
import os
import signal
import ssl
import threading
import time
from contextlib import ExitStack, closing
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

from plugrl_env_client.agent.websocket_env_client_agent import (
    ServerStopped,
    WebSocketEnvClientAgent,
)
from plugrl_env_client.errors import ActionShapeError, EnvClientError
from plugrl_env_client.recorder import Recorder
from plugrl_env_client.runner.logs import logging_to
from plugrl_env_client.runner.rollout import RolloutLoop, RolloutOptions, RolloutResult
from plugrl_env_client.runner.signals import Interrupted, interruptible
from plugrl_env_client.utils.registration import make_vec
from plugrl_envs import PlugrlEnvsError
from plugrl_protocol import Backoff, WireError

if TYPE_CHECKING:
    import pathlib
    from multiprocessing.process import BaseProcess

    import gymnasium as gym

    from plugrl_env_client.agent.base_agent import BaseAgent
    from plugrl_env_client.args import Args

__all__ = ["Job", "derive_process_seed", "report_server_metadata", "run", "run_multiprocess"]

_JOIN_S = 15.0
"""How long a process may take to close what it holds, before it is killed."""
_SERVER_STOPPED = 75
"""How a process tells its parent that it ended because the run is finished."""
_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Job:
    """A command line, and where it writes. What a process needs to know of a run."""

    uid: str
    args: Args
    run_dir: pathlib.Path
    imports: tuple[str, ...] = ()
    """Modules that register environments."""


def derive_process_seed(seed: int | None, process_id: int, num_envs: int) -> int | None:
    """Return the seed of a process's first row: its row i has this seed plus i.

    So no two rows of a run share a seed: process p has ``seed + p * num_envs`` and the following.
    """
    return None if seed is None else seed + process_id * num_envs


def run(job: Job, process_id: int = 0, env_lock: Any = None) -> RolloutResult:
    """Roll out in this process.

    Args:
        job: what to run.
        process_id: which process of the run this is.
        env_lock: held while the environment is made; None needs no lock.

    Returns:
        What happened; the recorder's ``summary.json`` holds the same.

    Raises:
        WireError: the connection ended in a way that a new one would not mend.
        EnvClientError: the command line, the environment and the server do not fit together.
        PlugrlEnvsError: the simulator cannot be made, or broke.
    """
    args = job.args
    with ExitStack() as stack:
        agent = stack.enter_context(closing(_make_agent(args)))
        env = stack.enter_context(closing(_make_env(job, process_id, env_lock)))
        recorder = _make_recorder(job, process_id, env)
        result, finished = RolloutResult(), False
        try:
            horizon = report_server_metadata(agent, env, args)
            options = RolloutOptions(
                num_episodes=args.num_episodes,
                replan_steps=args.runner.replan_steps,
                seed=derive_process_seed(args.runner.seed, process_id, args.num_envs),
                fps=args.runner.fps,
                action_horizon=horizon,
            )
            loop = RolloutLoop(env, agent, options, recorder)
            result = loop.result
            loop.run()
            finished = True
        except ServerStopped:
            result.server_stopped = finished = True
        finally:
            if recorder is not None:
                recorder.close({**result.summary(), "finished": finished})
        return result


def _make_agent(args: Args) -> WebSocketEnvClientAgent:
    context = None
    if args.ca_file is not None:
        try:
            context = ssl.create_default_context(cafile=args.ca_file)
        except OSError as error:
            raise EnvClientError(f"--ca-file {args.ca_file} cannot be used: {error}") from error
    return WebSocketEnvClientAgent(
        args.server_host,
        args.server_port,
        args.key,
        args.reconnect_on_server_stop,
        args.reuse_feedback_obs,
        backoff=Backoff(limit_s=args.give_up_after),
        ssl_context=context,
        library=args.library,
    )


def _make_env(job: Job, process_id: int, env_lock: Any) -> gym.vector.VectorEnv[Any, Any, Any]:
    args = job.args
    told = args.runner.pass_proc_id
    with ExitStack() as stack:
        if env_lock is not None:
            stack.enter_context(env_lock)
        return make_vec(
            job.uid,
            args.num_envs,
            config=args.env,
            max_episode_steps=args.runner.max_episode_steps,
            process_id=process_id if told else None,
            total_processes=args.num_procs if told else None,
        )


def _make_recorder(
    job: Job, process_id: int, env: gym.vector.VectorEnv[Any, Any, Any]
) -> Recorder | None:
    if process_id > 0 and job.args.recorder.thread0_only:
        return None
    manifest = {
        "uid": job.uid,
        "process_id": process_id,
        "num_procs": job.args.num_procs,
        "num_envs": job.args.num_envs,
        "seed": derive_process_seed(job.args.runner.seed, process_id, job.args.num_envs),
        "action_space": str(env.single_action_space),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    folder = job.run_dir / "rollout" / f"proc_{process_id:03d}"
    return Recorder(folder, job.args.recorder, manifest=manifest)


def report_server_metadata(
    agent: BaseAgent, env: gym.vector.VectorEnv[Any, Any, Any], args: Args
) -> int | None:
    """Connect, log what the server says, and refuse it early if that cannot work.

    Returns:
        How many steps a chunk has, as the server or ``--runner.action-horizon`` says.

    Raises:
        ActionShapeError: the width of an action, or the steps to use of a chunk, do not fit.
    """
    metadata = agent.get_server_metadata()
    shown = {key: value for key, value in metadata.items() if len(str(value)) <= 200}
    _log.info("connected; the server says: %s", shown)
    try:
        return _chunk_steps(metadata, env, args)
    except ActionShapeError as error:
        agent.refuse(str(error))
        raise


def _chunk_steps(
    metadata: dict[str, Any], env: gym.vector.VectorEnv[Any, Any, Any], args: Args
) -> int | None:
    width = _declared(metadata, "action_dim", args.runner.action_dim)
    space = env.single_action_space
    takes = 1
    for length in space.shape or ():
        takes *= length
    if width is not None and space.shape and width != takes:
        raise ActionShapeError(
            f"the server's actions have {width} entries, the environment takes {takes}: {space}"
        )
    horizon = _declared(metadata, "action_horizon", args.runner.action_horizon)
    replan_steps = args.runner.replan_steps
    if horizon is not None and replan_steps is not None and replan_steps > horizon:
        raise ActionShapeError(
            f"--runner.replan-steps is {replan_steps}; the server's chunks have {horizon} steps"
        )
    return horizon


def _declared(metadata: dict[str, Any], key: str, flag: int | None) -> int | None:
    said = metadata.get(key)
    if not isinstance(said, int) or said < 1:
        return flag
    if flag is not None and flag != said:
        raise ActionShapeError(
            f"--runner.{key.replace('_', '-')} is {flag}; the server says {said}"
        )
    return said


# ------------------------------------------------------------------------------------- processes


def run_guarded(job: Job, process_id: int = 0, env_lock: Any = None) -> tuple[int, bool]:
    """Roll out at the border of a process: log what goes wrong.

    Returns:
        The exit code (0: finished, or the server said so; 1: failed, the log says why; 130, 143:
        stopped by a signal), and whether the server said that the run is finished.
    """
    try:
        with interruptible():
            return 0, run(job, process_id, env_lock).server_stopped
    except Interrupted as stopped:
        _log.warning("%s", stopped)
        return stopped.exit_code, False
    except (WireError, EnvClientError, PlugrlEnvsError) as error:
        _log.error("%s", error, exc_info=_log.isEnabledFor(logging.DEBUG))
    except Exception:  # noqa: BLE001  # whatever a simulator raises: the border of the process
        _log.exception("the environment client failed")
    return 1, False


def run_multiprocess(job: Job, num_procs: int) -> int:
    """Roll out in several processes; when one fails, the others are ended.

    When the server tells one that the run is finished, the others have a moment to hear it, too:
    one that was just looking for the server would not find it any more.

    Returns:
        The exit code: 0 if every process returned 0, that of the first that failed, or that of the
        signal that stopped all.
    """
    context: Any = multiprocessing.get_context(job.args.runner.start_method)
    lock = context.Lock() if job.args.runner.use_env_lock else None
    processes: list[BaseProcess] = [
        context.Process(target=_process_main, args=(job, number, lock), name=f"process {number}")
        for number in range(num_procs)
    ]
    try:
        with interruptible():  # also while they end, so that a second signal changes nothing
            try:
                for process in processes:
                    process.start()
                return _wait_for_all(processes)
            finally:
                _end([process for process in processes if process.pid is not None])
    except Interrupted as stopped:
        _log.warning("%s", stopped)
        return stopped.exit_code


def _wait_for_all(processes: list[BaseProcess]) -> int:
    running: dict[Any, BaseProcess] = {process.sentinel: process for process in processes}
    deadline_s: float | None = None
    while running:
        left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        ready = wait(list(running), left_s)
        if not ready:
            _log.info("the run is finished; ending who did not hear of it: %s", _names(running))
            return 0
        for sentinel in ready:
            ended = running.pop(sentinel)
            ended.join()
            if ended.exitcode == _SERVER_STOPPED and deadline_s is None:
                deadline_s = time.monotonic() + _JOIN_S
            elif ended.exitcode not in (0, _SERVER_STOPPED):
                _log.error("%s %s", ended.name, _how_it_ended(ended.exitcode))
                if running:
                    _log.error("ending its siblings: %s", _names(running))
                return 1 if ended.exitcode is None or ended.exitcode < 0 else ended.exitcode
    return 0


def _names(processes: dict[Any, BaseProcess]) -> str:
    return ", ".join(process.name for process in processes.values())


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        hint = " (out of memory?)" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"
    return f"failed with exit code {code}"


def _end(processes: list[BaseProcess]) -> None:
    """Ask processes to stop, and kill those that do not."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline_s = time.monotonic() + _JOIN_S
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
        if process.is_alive():
            _log.error("%s did not end within %g s and is killed", process.name, _JOIN_S)
            process.kill()
            process.join()


def _process_main(job: Job, process_id: int, env_lock: Any) -> None:
    try:
        raise SystemExit(_work(job, process_id, env_lock))
    except KeyboardInterrupt:  # before `interruptible`, or a second one after it
        raise SystemExit(128 + signal.SIGINT) from None


def _work(job: Job, process_id: int, env_lock: Any) -> int:
    with logging_to(job.run_dir, level=job.args.log_level, process_id=process_id):
        _end_with_parent()
        for module in job.imports:
            importlib.import_module(module)
        code, server_stopped = run_guarded(job, process_id, env_lock)
    if server_stopped and not job.args.reconnect_on_server_stop:
        code = _SERVER_STOPPED
    return code


def _end_with_parent() -> None:
    """Stop this process when its parent is gone, however that ended."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
