"""`InferGroup`: workers that act; the rows of every batch are spread over them.

One that dies is started again with the newest weights; its rows are asked of the others, who answer
alone meanwhile. A single one is waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from plugrl_server.cluster.algorithm_worker import like_example, without_text
from plugrl_server.common.trees import concatenate, num_rows, take
from rlightning.errors import WorkerLostError
from rlightning.runtime.base import Failed, Future
from rlightning.runtime.group import gather
from rlightning.runtime.supervision import Restart
from rlightning.utils.seeding import derive_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_server.cluster.published_weights import PublishedWeights
    from plugrl_server.cluster.random_stream import RandomStream
    from rlightning.runtime.base import Handle
    from rlightning.runtime.supervision import Supervised

__all__ = ["InferGroup"]

BUILD_TIMEOUT_S = 1800.0
"""Longest wait for a policy to be built, its weights loaded included."""

Part = tuple[int, slice]
"""A worker, by its index, and the rows that it answers."""


class _Asked(NamedTuple):
    """A part on its way; `life` says how often its worker had been replaced."""

    worker: int
    rows: slice
    life: int
    future: Future


@final
class InferGroup:
    """Workers that act.

    Args:
        workers: each has an `AlgorithmWorker`.
        example_state: a runtime state of the policy's classes.
        weights: where they find the newest; None for a policy without weights.
        stream: of random numbers.
        seed: of the workers' own streams, where they are several.
    """

    def __init__(
        self,
        workers: Sequence[Supervised],
        *,
        example_state: Any,
        weights: PublishedWeights | None,
        stream: RandomStream,
        seed: int,
    ) -> None:
        self._workers = list(workers)
        self._example = example_state
        self._weights, self._stream, self._seed = weights, stream, seed
        self._restarts: dict[int, Restart] = {}
        self._lives = [0] * len(self._workers)
        self._turn = 0
        self._seeds_drawn = 0

    def start(self) -> None:
        """Wait until all are ready, with the newest weights.

        Raises:
            WorkerLostError: one cannot start.
        """
        gather([worker.call("build", timeout_s=BUILD_TIMEOUT_S) for worker in self._workers])
        for worker in self._workers:
            self._prepare(worker)

    def infer(self, step: int, version: int, obs: dict[str, Any]) -> tuple[Any, Any]:
        """Act on a batch; see `AlgorithmWorker.infer`.

        Raises:
            WorkerLostError: too many have died.
            Exception: what the policy raised.
        """
        self._take_back()
        answers: dict[int, Any] = {}
        waiting = [self._begin(part, step, version, obs) for part in self._parts(0, num_rows(obs))]
        while waiting:
            index, rows, life, future = waiting.pop(0)
            try:
                answers[rows.start] = future.result()
            except WorkerLostError as error:
                if life == self._lives[index]:
                    self._replace(index, error)
                parts = self._parts(rows.start, rows.stop)
                waiting += [self._begin(part, step, version, obs) for part in parts]
        actions, states = zip(*(answers[start] for start in sorted(answers)), strict=True)
        if len(actions) == 1:
            return actions[0], like_example(states[0], self._example)
        state = concatenate([like_example(state, self._example) for state in states])
        return np.concatenate(actions), state

    def _parts(self, start: int, stop: int) -> list[Part]:
        """Share rows out evenly over the workers that are alive, another one first each time."""
        alive = [index for index in range(len(self._workers)) if index not in self._restarts]
        self._turn += 1
        first = self._turn % len(alive)
        chosen = (alive[first:] + alive[:first])[: stop - start]
        edges = np.linspace(start, stop, len(chosen) + 1).astype(int).tolist()
        return [(w, slice(a, b)) for w, a, b in zip(chosen, edges[:-1], edges[1:], strict=True)]

    def _begin(self, part: Part, step: int, version: int, obs: dict[str, Any]) -> _Asked:
        index, rows = part
        worker, life = self._workers[index], self._lives[index]
        try:
            self._stream.hand_to(worker)
        except WorkerLostError as error:
            return _Asked(index, rows, life, Failed(error))
        future = worker.call("infer", step, version, without_text(take(obs, rows)))
        return _Asked(index, rows, life, future)

    # ---- weights -------------------------------------------------------------------------------

    def load_weights(self) -> None:
        """Let all have the newest weights; returns when they do.

        Raises:
            WorkerLostError: too many have died.
        """
        if self._weights is None:
            return
        begun = []
        for index, worker in enumerate(self._workers):
            if index not in self._restarts:
                try:
                    begun.append((index, self._weights.begin_load(worker)))
                except WorkerLostError as error:
                    begun.append((index, Failed(error)))
        for index, future in begun:
            try:
                future.result()
            except WorkerLostError as error:
                self._replace(index, error)

    # ---- deaths --------------------------------------------------------------------------------

    def _prepare(self, worker: Handle) -> None:
        worker.call("build", timeout_s=BUILD_TIMEOUT_S).result()
        if len(self._workers) > 1:
            self._seeds_drawn += 1
            worker.call("reseed", derive_seed(self._seed, "infer", self._seeds_drawn)).result()
        if self._weights is not None:
            self._weights.begin_load(worker).result()

    def _replace(self, index: int, error: WorkerLostError) -> None:
        """Start a worker again: aside, where another one is alive, and else at once."""
        worker = self._workers[index]
        self._lives[index] += 1
        self._stream.is_here()
        if len(self._restarts) + 1 < len(self._workers):
            self._restarts[index] = Restart(worker, lambda: worker.restore(error, self._prepare))
        else:
            worker.restore(error, self._prepare)

    def _take_back(self) -> None:
        """Let workers that have started again act with the others."""
        for index in [i for i, restart in self._restarts.items() if restart.is_done]:
            self._restarts.pop(index).finish()
            if self._weights is not None:  # there may be newer ones than when it started
                try:
                    self._weights.begin_load(self._workers[index]).result()
                except WorkerLostError as error:
                    self._replace(index, error)

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.stop()
        for restart in self._restarts.values():
            restart.abandon()
        self._restarts.clear()
