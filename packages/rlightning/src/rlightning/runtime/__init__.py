"""What a run is made of outside learning: its folder, its seed, its end."""

from rlightning.runtime.fair_lock import FairLock
from rlightning.runtime.run_context import RunContext, open_run
from rlightning.runtime.stop_signal import StopSignal
from rlightning.runtime.worker_thread import WorkerThread

__all__ = ["FairLock", "RunContext", "StopSignal", "WorkerThread", "open_run"]
