"""What a run is made of outside learning: its folder, its seed, its end."""

from rlightning.runtime.run_context import RunContext, open_run
from rlightning.runtime.stop_signal import StopSignal

__all__ = ["RunContext", "StopSignal", "open_run"]
