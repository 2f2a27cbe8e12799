"""Reinforcement learning for robots: one policy class, from one process to a cluster."""

__version__ = "0.1.0"

__all__ = ["__version__"]
