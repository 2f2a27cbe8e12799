"""The seams between stages, as structural types: who gives weights, who takes them, who saves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

__all__ = ["Saveable", "WeightSink", "WeightSource", "WeightStore"]


class WeightSource(Protocol):
    """Something that holds published weights; a version is visible only when it is complete."""

    @property
    def version(self) -> int:
        """The newest complete version; -1 before the first."""

    def get(self) -> tuple[int, dict[str, Any]]:
        """Return the newest version and its weights, never half of one, to keep."""

    def read(self) -> AbstractContextManager[tuple[int, dict[str, Any]]]:
        """Lend the newest version and its weights, for the length of a ``with`` block."""


class WeightSink(Protocol):
    """Something that weights can be published to."""

    def publish(self, version: int, weights: dict[str, Any]) -> None:
        """Make `weights` visible as `version`, whole."""


class WeightStore(WeightSource, WeightSink, Protocol):
    """Something that weights are published to and read from."""


class Saveable(Protocol):
    """Something whose state goes into a checkpoint as plain data and tensors."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
