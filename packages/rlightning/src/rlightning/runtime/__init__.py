"""What a run is made of outside learning: its folder, its seed, its end, its workers.

Names are loaded when they are first used: a worker that only steps environments loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlightning.runtime.fair_lock import FairLock
    from rlightning.runtime.run_context import RunContext, open_run
    from rlightning.runtime.stop_signal import StopSignal
    from rlightning.runtime.worker_thread import WorkerThread

__all__ = ["FairLock", "RunContext", "StopSignal", "WorkerThread", "open_run"]

_MODULES = {
    "FairLock": "fair_lock",
    "RunContext": "run_context",
    "StopSignal": "stop_signal",
    "WorkerThread": "worker_thread",
    "open_run": "run_context",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
