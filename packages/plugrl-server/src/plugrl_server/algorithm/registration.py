"""Algorithms by UID: registered when their module is imported, made when they are chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugrl_server.algorithm.base_algorithm import BaseAlgorithm
from plugrl_server.common.registry import Kind, Registry
from plugrl_server.common.registry import Spec as AlgoSpec

if TYPE_CHECKING:
    from plugrl_server.policy.base_policy import BasePolicy

__all__ = [
    "REGISTERED_ALGORITHMS",
    "REGISTERED_ALGO_CONFIGS",
    "AlgoSpec",
    "make_algo",
    "register_algo",
    "register_algo_config",
    "register_builtin_algo",
]

ALGORITHMS = Registry(Kind("Algorithm", lambda: BaseAlgorithm))
REGISTERED_ALGORITHMS = ALGORITHMS.specs
"""UID to `AlgoSpec`."""
REGISTERED_ALGO_CONFIGS = ALGORITHMS.configs
"""UID to variant to configuration."""

register_algo = ALGORITHMS.register
register_algo_config = ALGORITHMS.register_config
register_builtin_algo = ALGORITHMS.register_builtin


def make_algo(uid: str, policy: BasePolicy, **kwargs: Any) -> BaseAlgorithm:
    """Construct the algorithm called `uid`.

    Args:
        uid: its name.
        policy: what acts.
        **kwargs: ``config=...`` and whatever else its constructor takes.

    Raises:
        KeyError: ``Algorithm <uid> is not registered.``
    """
    algorithm: BaseAlgorithm = ALGORITHMS.get(uid).create(policy=policy, **kwargs)
    return algorithm
