"""`WeightBuffer`: the newest published weights inside one process, always whole, with a version.

Each version is one contiguous copy, on the device of the weights. Knows nothing about other
processes; `rlightning.weights.shared` does the same for those.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch

from rlightning.weights.layout import Layout, copy_into, memory_for

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["WeightBuffer"]


class _Snapshot:
    """One version: its memory, its tensors there, and who reads them."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.views = layout.views(memory_for(layout, device))
        self.version = -1
        self.readers = 0
        self.kept = False  # somebody holds its tensors for good


class WeightBuffer:
    """Holds a snapshot of one version of the weights.

    Publishing copies the tensors first and then swaps one reference, so a reader sees the old
    version or the new one, never a mixture, and the learner may change its tensors at once. The
    memory of a version that nobody reads any more serves a later one.
    """

    def __init__(self) -> None:
        self._newest: _Snapshot | None = None
        self._spare: _Snapshot | None = None
        self._publishing = threading.Lock()
        self._changed = threading.Condition()

    @property
    def version(self) -> int:
        """The newest version, or -1 before the first."""
        return -1 if self._newest is None else self._newest.version

    def staleness(self, version: int) -> int:
        """Return by how many versions `version` is older than the newest."""
        return self.version - version

    def publish(self, version: int, weights: dict[str, Any]) -> None:
        """Make a copy of `weights` visible as `version`.

        Raises:
            ValueError: `version` is not newer than the published one.
            ContractError: `weights` holds something that is not copied, such as a sparse tensor.
        """
        with self._publishing:
            if version <= self.version:
                raise ValueError(f"version {version} was published after version {self.version}")
            layout, tensors = Layout.of(weights)
            snapshot = self._memory(layout, tensors[0].device if tensors else torch.device("cpu"))
            copy_into(snapshot.views, tensors)
            snapshot.version = version
            with self._changed:
                former, self._newest = self._newest, snapshot
                self._retire(former)
                self._changed.notify_all()

    def get(self) -> tuple[int, dict[str, Any]]:
        """Return the newest version and its weights; the tensors stay as they are for good.

        `read` is cheaper where the weights are copied on at once.

        Raises:
            RuntimeError: nothing has been published.
        """
        with self._changed:
            snapshot = self._published()
            snapshot.kept = True
        return snapshot.version, snapshot.layout.build(snapshot.views)

    @contextlib.contextmanager
    def read(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Lend the newest version and its weights, for the length of a ``with`` block.

        Raises:
            RuntimeError: nothing has been published.
        """
        with self._changed:
            snapshot = self._published()
            snapshot.readers += 1
        try:
            yield snapshot.version, snapshot.layout.build(snapshot.views)
        finally:
            with self._changed:
                snapshot.readers -= 1
                if snapshot is not self._newest:
                    self._retire(snapshot)

    def wait_for(self, version: int, timeout_s: float) -> bool:
        """Wait until at least `version` is visible; return whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self.version >= version, timeout_s)

    def close(self) -> None:
        """Let go of all memory; nothing is published then."""
        with self._changed:
            self._newest = self._spare = None

    def _published(self) -> _Snapshot:
        if self._newest is None:
            raise RuntimeError("no weights have been published; call publish first")
        return self._newest

    def _memory(self, layout: Layout, device: torch.device) -> _Snapshot:
        """Return memory for the next version: what an earlier one left, where that fits."""
        with self._changed:
            spare, self._spare = self._spare, None
        if spare is not None and spare.layout.entries == layout.entries and spare.device == device:
            spare.layout = layout  # its plain values may have changed
            return spare
        return _Snapshot(layout, device)

    def _retire(self, snapshot: _Snapshot | None) -> None:
        if snapshot is not None and snapshot.readers == 0 and not snapshot.kept:
            self._spare = snapshot
