"""Rollouts, and the processes that they run in."""

from plugrl_env_client.runner.rollout import RolloutOptions, RolloutResult, rollout
from plugrl_env_client.runner.run import (
    Job,
    derive_process_seed,
    report_server_metadata,
    run,
    run_multiprocess,
)
from plugrl_env_client.runner.timing import RolloutTiming

__all__ = [
    "Job",
    "RolloutOptions",
    "RolloutResult",
    "RolloutTiming",
    "derive_process_seed",
    "report_server_metadata",
    "rollout",
    "run",
    "run_multiprocess",
]
