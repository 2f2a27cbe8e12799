"""Buffers: rows of environments in, batches of transitions out."""

from rlightning.buffer.data_buffer import DataBuffer
from rlightning.buffer.replay_buffer import ReplayBuffer
from rlightning.buffer.rollout_buffer import RolloutBuffer
from rlightning.config import BufferConfig

__all__ = ["BufferConfig", "DataBuffer", "ReplayBuffer", "RolloutBuffer"]
