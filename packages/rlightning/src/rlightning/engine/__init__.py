"""Training loops: where environments, policies and buffers meet."""

from rlightning.engine.async_rl import AsyncRLEngine
from rlightning.engine.async_rsl_rl import AsyncRSLRLEngine
from rlightning.engine.base_engine import BaseEngine
from rlightning.engine.evaluation_engine import EvaluationEngine
from rlightning.engine.rsl_rl import RSLRLEngine
from rlightning.engine.sync_rl import SyncRLEngine
from rlightning.engine.training_engine import TrainingEngine

__all__ = [
    "AsyncRLEngine",
    "AsyncRSLRLEngine",
    "BaseEngine",
    "EvaluationEngine",
    "RSLRLEngine",
    "SyncRLEngine",
    "TrainingEngine",
]
