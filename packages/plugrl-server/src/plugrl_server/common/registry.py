"""One registry for a kind of plug-in: classes by UID, and their configurations by variant.

Built-ins are registered as ``"module:Class"`` and imported when they are chosen, so that a menu of
everything costs nothing. Plug-ins of other distributions are found through entry points. Knows
nothing about policies, algorithms or torch.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections import defaultdict
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, TypeVar

from plugrl_server.errors import MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Kind", "Registry", "Spec", "load_entry_points"]

_C = TypeVar("_C", bound=type[Any])

ENTRY_POINT_GROUP: Final = "plugrl_server.plugins"
"""Entry points of this group are modules that register policies and algorithms when imported."""


@dataclass(slots=True)
class Spec:
    """A registered class.

    Attributes:
        uid: its name on the command line.
        target: the class, or ``"module:Class"`` of one that is not imported yet.
        default_kwargs: keyword arguments of every construction.
        extra: the distribution extra that a built-in needs, for the message when it is missing.
        requires: a module of that extra.
    """

    uid: str
    target: type[Any] | str
    default_kwargs: dict[str, Any] = field(default_factory=dict)
    extra: str = ""
    requires: str = ""

    @property
    def missing_extra(self) -> str:
        """How to install what is missing; empty if nothing is."""
        if not self.requires or importlib.util.find_spec(self.requires) is not None:
            return ""
        return f"pip install 'plugrl-server[{self.extra}]'"

    @property
    def cls(self) -> type[Any]:
        """The class, imported if need be.

        Raises:
            MissingExtraError: something of its extra is not installed.
            ModuleNotFoundError: something else is not there.
        """
        if isinstance(self.target, str):
            module_name, _, attribute = self.target.partition(":")
            try:
                self.target = getattr(importlib.import_module(module_name), attribute)
            except ModuleNotFoundError as error:
                if not self.extra:
                    raise
                command = f"pip install 'plugrl-server[{self.extra}]'"
                raise MissingExtraError(
                    self.uid, missing=str(error.name), command=command
                ) from error
        if isinstance(self.target, str):
            raise TypeError(f"{self.target} of {self.uid!r} is not a class")
        return self.target

    def create(self, *args: Any, **kwargs: Any) -> Any:
        """Construct the class; `kwargs` win over the registered ones."""
        return self.cls(*args, **{**self.default_kwargs, **kwargs})

    def is_same(self, cls: type[Any]) -> bool:
        """Whether `cls` is what this spec names, imported or not."""
        return self.target in (cls, f"{cls.__module__}:{cls.__qualname__}")


@dataclass(frozen=True, slots=True)
class Kind:
    """How messages name a kind of plug-in, and what its classes must be."""

    title: str
    """For example ``"Policy"``."""
    base: Callable[[], type[Any]]
    """Gives the base class that registered classes must have."""


class Registry:
    """Classes and configurations of one kind.

    Attributes:
        specs: by UID.
        configs: by UID, then by variant: an instance of the variant's configuration.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.specs: dict[str, Spec] = {}
        self.configs: defaultdict[str, dict[str, Any]] = defaultdict(dict)

    def register(
        self,
        uid: str,
        override: bool = False,  # noqa: FBT001, FBT002  # the documented signature
        **default_kwargs: Any,
    ) -> Callable[[_C], _C]:
        """Register a class, as a decorator.

        Args:
            uid: its name on the command line.
            override: whether it may take the UID of another class.
            **default_kwargs: keyword arguments of every construction.

        Raises:
            KeyError: the UID is taken.
            TypeError: the class has not the base that its kind must have.
        """

        def decorate(cls: _C) -> _C:
            base = self.kind.base()
            if not (isinstance(cls, type) and issubclass(cls, base)):
                raise TypeError(
                    f"{self.kind.title} {uid} is {cls!r}, which is no subclass of {base.__name__}"
                )
            known = self.specs.get(uid)
            if known is not None and not override and not known.is_same(cls):
                raise KeyError(f"{self.kind.title} {uid} is already registered.")
            self.specs[uid] = Spec(uid, cls, default_kwargs)
            return cls

        return decorate

    def register_builtin(
        self, uid: str, target: str, *, extra: str = "", requires: str = ""
    ) -> None:
        """Register ``"module:Class"``, imported when it is chosen.

        Args:
            uid: its name on the command line.
            target: where the class is.
            extra: the extra of this distribution that it needs.
            requires: a module of that extra.
        """
        self.specs.setdefault(uid, Spec(uid, target, {}, extra, requires))

    def register_config(self, uid: str, variant: str = "default") -> Callable[[_C], _C]:
        """Register a configuration class, as a decorator. Every field needs a default.

        It is constructed at once, from the defaults.

        Raises:
            KeyError: the pair is taken.
        """

        def decorate(cls: _C) -> _C:
            if variant in self.configs[uid]:
                raise KeyError(f"{self.kind.title} config {uid} {variant} is already registered.")
            self.configs[uid][variant] = cls()
            return cls

        return decorate

    def get(self, uid: str) -> Spec:
        """Look a class up.

        Raises:
            KeyError: nothing is registered under `uid`.
        """
        try:
            return self.specs[uid]
        except KeyError:
            raise KeyError(f"{self.kind.title} {uid} is not registered.") from None

    def uids(self) -> list[str]:
        """List the UIDs that can be chosen: those with a configuration and a class."""
        return [uid for uid in self.configs if self.configs[uid] and uid in self.specs]


def load_entry_points() -> list[str]:
    """Import every plug-in that an installed distribution declares; give the names of the modules.

    A distribution declares one in its ``pyproject.toml``, under
    ``[project.entry-points."plugrl_server.plugins"]``, as ``name = "package.module"``.
    """
    names = []
    for point in entry_points(group=ENTRY_POINT_GROUP):
        point.load()
        names.append(point.value)
    return names
