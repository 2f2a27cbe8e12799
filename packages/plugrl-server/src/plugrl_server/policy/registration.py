"""Policies by UID: registered when their module is imported, made when they are chosen.

Needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from plugrl_server.common.registry import Kind, Registry
from plugrl_server.common.registry import Spec as PolicySpec
from plugrl_server.policy.base_policy import BasePolicy

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "REGISTERED_POLICIES",
    "REGISTERED_POLICY_CONFIGS",
    "PolicySpec",
    "make_policy",
    "register_builtin_policy",
    "register_policy",
    "register_policy_config",
]

_C = TypeVar("_C", bound=type[Any])

POLICIES = Registry(Kind("Policy", lambda: BasePolicy))
REGISTERED_POLICIES = POLICIES.specs
"""UID to `PolicySpec`."""
REGISTERED_POLICY_CONFIGS = POLICIES.configs
"""UID to variant to configuration."""


def register_policy(
    uid: str,
    override: bool = False,  # noqa: FBT001, FBT002  # the documented signature
    **default_kwargs: Any,
) -> Callable[[_C], _C]:
    """Register a policy class, as a decorator.

    Args:
        uid: its name on the command line.
        override: whether it may take the UID of another class.
        **default_kwargs: keyword arguments of every construction.

    Raises:
        KeyError: the UID is taken.
        TypeError: the class is no `BasePolicy`.
    """
    decorator: Callable[[_C], _C] = POLICIES.register(uid, override=override, **default_kwargs)
    return decorator


def register_policy_config(uid: str, variant: str = "default") -> Callable[[_C], _C]:
    """Register a configuration class, as a decorator. Every field needs a default.

    Raises:
        KeyError: the pair is taken.
    """
    decorator: Callable[[_C], _C] = POLICIES.register_config(uid, variant)
    return decorator


def register_builtin_policy(uid: str, target: str, *, extra: str = "", requires: str = "") -> None:
    """Register ``"module:Class"``, imported when it is chosen.

    Args:
        uid: its name on the command line.
        target: where the class is.
        extra: the extra of this distribution that it needs.
        requires: a module of that extra.
    """
    POLICIES.register_lazy(uid, target, extra=extra, requires=requires)


def make_policy(uid: str, config: Any) -> BasePolicy:
    """Construct the policy called `uid`.

    Raises:
        KeyError: ``Policy <uid> is not registered.``
        MissingExtraError: an optional dependency of it is not installed.
    """
    policy: BasePolicy = POLICIES.get(uid).create(config)
    return policy
