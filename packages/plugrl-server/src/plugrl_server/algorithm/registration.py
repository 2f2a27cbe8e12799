"""Algorithms by UID: registered when their module is imported, made when they are chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from plugrl_server.algorithm.base_algorithm import BaseAlgorithm
from plugrl_server.common.registry import Kind, Registry
from plugrl_server.common.registry import Spec as AlgoSpec

if TYPE_CHECKING:
    from collections.abc import Callable

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

_C = TypeVar("_C", bound=type[Any])

ALGORITHMS = Registry(Kind("Algorithm", lambda: BaseAlgorithm))
REGISTERED_ALGORITHMS = ALGORITHMS.specs
"""UID to `AlgoSpec`."""
REGISTERED_ALGO_CONFIGS = ALGORITHMS.configs
"""UID to variant to configuration."""


def register_algo(
    uid: str,
    override: bool = False,  # noqa: FBT001, FBT002  # the documented signature
    **default_kwargs: Any,
) -> Callable[[_C], _C]:
    """Register an algorithm class, as a decorator; see `register_policy`.

    Raises:
        KeyError: the UID is taken.
        TypeError: the class is no `BaseAlgorithm`.
    """
    decorator: Callable[[_C], _C] = ALGORITHMS.register(uid, override=override, **default_kwargs)
    return decorator


def register_algo_config(uid: str, variant: str = "default") -> Callable[[_C], _C]:
    """Register a configuration class, as a decorator. Every field needs a default.

    Raises:
        KeyError: the pair is taken.
    """
    decorator: Callable[[_C], _C] = ALGORITHMS.register_config(uid, variant)
    return decorator


def register_builtin_algo(uid: str, target: str, *, extra: str = "", requires: str = "") -> None:
    """Register ``"module:Class"``, imported when it is chosen.

    Args:
        uid: its name on the command line.
        target: where the class is.
        extra: the extra of this distribution that it needs.
        requires: a module of that extra.
    """
    ALGORITHMS.register_lazy(uid, target, extra=extra, requires=requires)


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
