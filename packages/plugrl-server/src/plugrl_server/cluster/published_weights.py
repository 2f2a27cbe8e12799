"""`PublishedWeights`: the newest weights, for workers of this machine and of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from rlightning.runtime.base import Done, Future
from rlightning.weights import CPUWeightBuffer

if TYPE_CHECKING:
    from rlightning.runtime.base import Handle

__all__ = ["PublishedWeights"]


@final
class PublishedWeights:
    """In shared memory of this machine, which workers on it write and read themselves.

    Workers of other machines send and are sent one packed copy.
    """

    def __init__(self) -> None:
        self._buffer = CPUWeightBuffer()
        self._shares: dict[Handle, tuple[int, bool]] = {}

    @property
    def version(self) -> int:
        """The newest version; -1 before the first."""
        return self._buffer.version

    def publish(self, policy: Any) -> None:
        """Publish the weights of a policy of this process as the next version."""
        self._buffer.publish(self.version + 1, dict(policy.state_dict()))

    def publish_from(self, learner: Handle) -> None:
        """Publish what a learner has, as the next version."""
        version = self.version + 1
        if self._shares_memory(learner):
            learner.call("publish", version).result()
        else:
            self._buffer.publish(version, learner.call("packed_weights").result().unpack())

    def load_into(self, policy: Any) -> None:
        """Load the newest version into a policy of this process."""
        with self._buffer.read() as (_, weights):
            policy.load_state_dict(weights)

    def begin_load(self, worker: Handle) -> Future:
        """Let a worker act with the newest version."""
        if self.version < 0:
            return Done(None)
        if self._shares_memory(worker):
            return worker.call("load_published")
        return worker.call("load_packed", self._buffer.pack()[1])

    def _shares_memory(self, worker: Handle) -> bool:
        """Return whether a worker is on this machine; asked once per process."""
        pid, shares = self._shares.get(worker, (None, False))
        if pid != worker.pid:
            shares = bool(worker.call("open_weights", self._buffer.address).result())
            self._shares[worker] = worker.pid, shares
        return shares

    def close(self) -> None:
        """Remove them."""
        self._buffer.close()
