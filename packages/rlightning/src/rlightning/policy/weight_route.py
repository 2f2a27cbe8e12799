"""`WeightRoute`: how published weights get from the TRAIN to the EVAL instances of a policy.

In one process, through the buffer. Where instances live elsewhere and the buffer is in shared
memory, they use it themselves: learners publish, each its own part where there are parts, and
actors of the same machine read; none of it passes through this process. Actors of other machines
are sent one packed copy.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from rlightning.errors import WorkerLostError
from rlightning.policy.policy_proxy import PolicyProxy
from rlightning.runtime.group import gather

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rlightning.types import WeightStore

__all__ = ["WeightRoute"]


class WeightRoute:
    """The way through one buffer.

    Args:
        buffer: where weights are published.
        learners: the TRAIN instances.
        actors: the EVAL instances.
    """

    def __init__(self, buffer: WeightStore, learners: Sequence[Any], actors: Sequence[Any]) -> None:
        self._buffer: Any = buffer
        self._address = getattr(buffer, "address", None)
        self._learners = list(learners)
        self._actors = list(actors)
        self._publishers: list[tuple[Any, int | None]] | None = None
        self._opened = False

    def publish(self, version: int) -> None:
        """Publish what the first TRAIN instance has learned, as `version`."""
        self._open()
        if self._publishers:
            gather(
                [
                    learner.begin("publish_weights", version, shard)
                    for learner, shard in self._publishers
                ]
            )
        else:
            self._buffer.publish(version, self._learners[0].export_weights())

    @property
    def version(self) -> int:
        """The newest version that is published."""
        version: int = self._buffer.version
        return version

    @contextlib.contextmanager
    def newest(self) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Lend the newest version and its weights; None for weights that actors find themselves."""
        elsewhere = any(isinstance(actor, PolicyProxy) for actor in self._actors)
        if elsewhere and self._address is not None:
            self._open()
            yield self._buffer.version, None
        elif elsewhere:
            yield self._buffer.get()  # an actor that dies later is given them again
        else:
            with self._buffer.read() as lent:
                yield lent

    def _open(self) -> None:
        """Tell instances that live elsewhere where the buffer is, once."""
        if self._opened or self._address is None:
            return
        shards = self._address.shards
        publishing = self._learners[: shards or 1]
        reached = [
            isinstance(learner, PolicyProxy) and learner.share_weights(self._buffer)
            for learner in publishing
        ]
        if all(reached) and len(publishing) == (shards or 1):
            parts = range(shards) if shards else [None]
            self._publishers = list(zip(publishing, parts, strict=True))
        for actor in self._actors:
            if isinstance(actor, PolicyProxy):
                with contextlib.suppress(WorkerLostError):  # its next call finds it dead too
                    actor.share_weights(self._buffer)
        self._opened = True
