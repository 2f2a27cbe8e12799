"""`WeightBuffer`: the newest published weights, always whole, with their version."""

from __future__ import annotations

import threading
from typing import Any

from rlightning.types import is_tensor, map_leaves

__all__ = ["WeightBuffer"]


class WeightBuffer:
    """Holds a snapshot of one version of the weights.

    Publishing copies the tensors first and then swaps one reference, so a reader sees the old
    version or the new one, never a mixture, and the learner may change its tensors at once.
    """

    def __init__(self) -> None:
        self._published: tuple[int, dict[str, Any]] | None = None
        self._changed = threading.Condition()

    @property
    def version(self) -> int:
        """The newest version, or -1 before the first."""
        return -1 if self._published is None else self._published[0]

    def publish(self, version: int, weights: dict[str, Any]) -> None:
        """Make a copy of `weights` visible as `version`.

        Raises:
            ValueError: `version` is not newer than the published one.
        """
        if version <= self.version:
            raise ValueError(f"version {version} was published after version {self.version}")
        snapshot = map_leaves(
            lambda leaf: leaf.detach().clone() if is_tensor(leaf) else leaf, weights
        )
        with self._changed:
            self._published = (version, snapshot)
            self._changed.notify_all()

    def get(self) -> tuple[int, dict[str, Any]]:
        """Return the newest version and its weights; the tensors are the buffer's own.

        Raises:
            RuntimeError: nothing has been published.
        """
        if self._published is None:
            raise RuntimeError("no weights have been published; call publish first")
        return self._published

    def wait_for(self, version: int, timeout_s: float) -> bool:
        """Wait until at least `version` is visible; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.version >= version, timeout_s)
