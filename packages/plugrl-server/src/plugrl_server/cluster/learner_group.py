"""`LearnerGroup`: workers that learn together, each on its part of every batch.

Where one dies, what it has learned since the last checkpoint may be gone, and the others wait for
it in vain: all are started again and go on from that checkpoint.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, final

from rlightning.errors import WorkerLostError
from rlightning.runtime.group import gather
from rlightning.utils.seeding import derive_seed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from plugrl_server.algorithm.base_algorithm import Checkpoint, MetricDict
    from plugrl_server.cluster.published_weights import PublishedWeights
    from plugrl_server.cluster.random_stream import RandomStream
    from rlightning.runtime.base import Future, Handle

__all__ = ["LEARN_TIMEOUT_S", "LearnerGroup"]

_log = logging.getLogger(__name__)

LEARN_TIMEOUT_S = 1800.0
"""Longest wait for one learn step, and for what learners exchange meanwhile."""
_LOOK_FOR_DEATHS_S = 10.0
"""Longest wait for a death to show that others complain of."""


@final
class LearnerGroup:
    """Workers that learn.

    Args:
        spawn: starts the worker of a number, which has an `AlgorithmWorker`.
        count: how many there are.
        meeting: ``host:port`` where they meet; a part that is empty is chosen.
        stream: of random numbers.
        seed: of the workers' own streams, where they are several.
        max_restarts: how often they may be started again.

    Attributes:
        restarts: how often they were started again.
    """

    def __init__(
        self,
        spawn: Callable[[int], Handle],
        count: int,
        *,
        meeting: tuple[str, int],
        stream: RandomStream,
        seed: int,
        max_restarts: int,
    ) -> None:
        self._spawn, self._count, self._meeting = spawn, count, meeting
        self._stream, self._seed, self._max_restarts = stream, seed, max_restarts
        self._workers: Sequence[Handle] = []
        self._last: Checkpoint | None = None
        self._given_up: WorkerLostError | None = None
        self.restarts = 0

    # ---- life ----------------------------------------------------------------------------------

    def start(self, checkpoint: Checkpoint) -> None:
        """Start the workers, or let them begin anew, from what `learner_checkpoint` gave.

        Raises:
            WorkerLostError: one cannot start.
        """
        if not self._workers:
            self._workers = [self._spawn(number) for number in range(self._count)]
            if self._count > 1:
                self._join_ranks()
        self._last = checkpoint
        gather([worker.call("load_learner", checkpoint) for worker in self._workers])
        if self._count > 1:
            for number, worker in enumerate(self._workers):
                seed = derive_seed(self._seed, "learner", self.restarts, number)
                worker.call("reseed", seed).result()

    def _join_ranks(self) -> None:
        first, (host, port) = self._first, self._meeting
        gather([worker.call("is_ready") for worker in self._workers])
        on_one_machine = len({worker.address for worker in self._workers}) == 1
        host = host or ("127.0.0.1" if on_one_machine else first.address)
        address = f"{host}:{port}" if port else first.call("rank_address", host).result()
        gather(
            [
                worker.call("join_ranks", number, self._count, address, LEARN_TIMEOUT_S)
                for number, worker in enumerate(self._workers)
            ]
        )

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.stop()
        self._workers = []

    # ---- learning ------------------------------------------------------------------------------

    def learn(self, step: int, collected: Any) -> tuple[MetricDict, dict[str, Any]]:
        """Take a learn step; see `AlgorithmWorker.learn`.

        Where a worker dies, what was collected is dropped, and all go on from the last checkpoint.

        Raises:
            WorkerLostError: they were started again too often.
            Exception: what learning raised.
        """
        try:
            self._stream.hand_to(self._first)
            begun = [worker.call("learn", step, collected) for worker in self._workers]
            metrics, meta = self._gathered(begun)[0]
        except WorkerLostError as error:
            checkpoint = self._restart(error)
            return {"learn": {"restarts": self.restarts}}, checkpoint.meta
        return metrics, meta

    def checkpoint(self) -> Checkpoint:
        """Copy what the first learner has learned; after a death, give the last checkpoint.

        Raises:
            WorkerLostError: they were started again too often.
        """
        try:
            self._last = self._first.call("learner_checkpoint").result()
        except WorkerLostError as error:
            return self._restart(error)
        assert self._last is not None  # just set
        return self._last

    def publish(self, weights: PublishedWeights) -> Checkpoint | None:
        """Publish what the first learner has learned.

        Returns:
            The checkpoint that they went back to, where one had died.

        Raises:
            WorkerLostError: they were started again too often.
        """
        try:
            weights.publish_from(self._first)
        except WorkerLostError as error:
            checkpoint = self._restart(error)
            weights.publish_from(self._first)
            return checkpoint
        return None

    @property
    def _first(self) -> Handle:
        if self._given_up is not None:
            raise self._given_up
        return self._workers[0]

    @staticmethod
    def _gathered(begun: Sequence[Future]) -> list[Any]:
        """Return all answers; where one died, others complain of it first, in other words."""
        try:
            return gather(begun)
        except WorkerLostError:
            raise
        except Exception:
            for future in begun if len(begun) > 1 else ():
                try:
                    if future.poll(_LOOK_FOR_DEATHS_S):
                        future.result()
                except WorkerLostError:
                    raise
                except Exception as complaint:  # noqa: BLE001  # the first one is raised below
                    _log.debug("another learner failed too: %s", complaint)
            raise

    def _restart(self, error: WorkerLostError) -> Checkpoint:
        """Start all workers again from the last checkpoint, which is returned."""
        assert self._last is not None  # of `start`, at least
        if self._given_up is not None:
            raise self._given_up
        self.close()
        self._stream.is_here()
        while self.restarts < self._max_restarts:
            self.restarts += 1
            _log.warning(
                "%s; learning goes on from the weights of step %d, what was collected since the "
                "last learn step is dropped (restart %d of %d)",
                error,
                self._last.step,
                self.restarts,
                self._max_restarts,
            )
            try:
                self.start(self._last)
            except WorkerLostError as again:
                self.close()
                error = again
                continue
            return self._last
        self._given_up = error
        raise error
