"""Training loops: where environments, policies and buffers meet."""

from rlightning.engine.base_engine import BaseEngine
from rlightning.engine.sync_rl import SyncRLEngine

__all__ = ["BaseEngine", "SyncRLEngine"]
