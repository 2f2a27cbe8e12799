"""From reports to stored frames: which may be learned from, and how many at a time.

Knows nothing about threads, sockets or when to learn.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from plugrl_server.server.joining import join_frames, usable_frames
from rlightning.runtime.batcher import Session
from rlightning.utils.bounds import LARGEST

if TYPE_CHECKING:
    from plugrl_protocol.endpoint import Connection
    from plugrl_protocol.messages import Episode, Feedback
    from plugrl_server.algorithm.base_algorithm import BaseAlgorithm, FrameBatch
    from plugrl_server.common.metrics import MetricDict
    from plugrl_server.server.client_envs import ClientEnvs
    from plugrl_server.server.inference import Layout
    from plugrl_server.server.runtime_metrics import ClientCounter, RuntimeMetrics

__all__ = ["Client", "FrameStore", "Report"]

_log = logging.getLogger(__name__)

_MOST_WAITING = 32
"""Reports that are stored together at most: it takes a fraction of a millisecond."""


@dataclass(slots=True, eq=False)
class Client:
    """One connection, as the trainer knows it."""

    connection: Connection
    envs: ClientEnvs
    counter: ClientCounter
    session: Session = field(default_factory=Session)
    layout: Layout = ()
    """Of its last request."""
    knows_steps: bool = True
    """Whether it says how many steps its chunks ran, as far as is known."""


class Report(NamedTuple):
    """A feedback with the episodes that it tells of, and the layout of what it observes."""

    client: Client
    feedback: Feedback
    episodes: list[Episode]
    layout: Layout


class FrameStore:
    """Collects reports until they are stored, in the order in which they came.

    Args:
        algorithm: where frames go.
        metrics: where they are counted.
        clients: those that are connected, by serial; kept up to date by the owner.
    """

    def __init__(
        self, algorithm: BaseAlgorithm, metrics: RuntimeMetrics, clients: dict[int, Client]
    ) -> None:
        self._algorithm, self._metrics, self._clients = algorithm, metrics, clients
        self._takes_batches = algorithm.takes_batches
        self._reports: list[tuple[Report, Any]] = []
        self._rows = self._most_rows = 0
        self._holds_images = False

    def __len__(self) -> int:
        """How many reports are not stored yet."""
        return len(self._reports)

    @property
    def is_due(self) -> bool:
        """Whether nothing is gained by waiting for more reports to store together."""
        return self._holds_images or len(self._reports) >= _MOST_WAITING

    def take(self, report: Report) -> bool:
        """Take a report; true if all must be stored now, before anything else happens."""
        feedback = report.feedback
        claim = report.client.envs.claim(feedback)
        if not self._reports:  # only storing changes it
            self._most_rows = self._algorithm.frames_before_control()
        self._reports.append((report, claim))
        self._rows += len(feedback.env_indices)
        if feedback.observation.images:
            self._holds_images = True
        return claim is None or self._rows > self._most_rows

    def store(self, version: int, *, learner_is_busy: bool) -> MetricDict:
        """Give the algorithm what it may learn from.

        Args:
            version: how often the policy has been learned.
            learner_is_busy: what is stored now is learned from one version later.

        Returns:
            Numbers to log.
        """
        reports, self._reports, self._rows = self._reports, [], 0
        self._holds_images = False
        accepted: list[tuple[Any, FrameBatch]] = []
        # The next buffer may be full already while the learner is busy with the last.
        algorithm = self._algorithm
        is_full = learner_is_busy and algorithm.on_policy and algorithm.should_learn()
        version, limit = version + learner_is_busy, algorithm.max_staleness
        for report, claim in reports:
            frames = self._accept(report, claim, version, limit, is_full=is_full)
            accepted += [(report.layout, part) for part in frames]
        logged: MetricDict = {}
        batches = join_frames(accepted) if self._takes_batches else [f for _, f in accepted]
        for batch in batches:
            good = usable_frames(batch)
            whole = batch if good is None else self._leave_out(batch, good)
            if len(whole):
                logged |= self._algorithm.feedback_batch(whole)
                self._metrics.stored_frames += len(whole)
        return logged

    def _accept(
        self, report: Report, claim: Any, version: int, limit: int | None, *, is_full: bool
    ) -> list[FrameBatch]:
        """Turn a report into frames; leave out those more than `limit` older than `version`."""
        client, feedback, algorithm = report.client, report.feedback, self._algorithm
        if feedback.steps is None and client.knows_steps:
            client.knows_steps = False
            _log.info(
                "%r does not say how many steps its chunks ran: gamma and counts are per chunk",
                client.connection,
            )
        if self._takes_batches and report.episodes:
            algorithm.record_episodes(report.episodes)
        accepted = []
        for sampled_by, frames in client.envs.report(feedback, claim):
            staleness = version - sampled_by
            self._metrics.staleness.add(staleness)
            if is_full or (limit is not None and staleness > limit):
                self._discard(frames)
            else:
                accepted.append(frames)
        return accepted

    def _leave_out(self, frames: FrameBatch, good: Any) -> FrameBatch:
        """Drop frames with numbers that cannot be learned from; give the others."""
        bad = (~good).nonzero()[0]
        self._metrics.nonfinite_observations += len(bad)
        for client in self._discard(frames.rows(bad)):
            _log.warning(
                "%r: states or rewards that are NaN or beyond %g; not learned from", client, LARGEST
            )
        return frames.rows(good.nonzero()[0])

    def _discard(self, frames: FrameBatch) -> list[Connection]:
        """Count frames that are not stored, and end their chains; give whose they were."""
        self._metrics.discarded_frames += len(frames)
        if not self._takes_batches:
            self._algorithm.discard_batch(frames)
        for chain in frames.chains.tolist():
            self._algorithm.forget_chain(chain)
        clients = list(self._clients.values())
        return [client.connection for client in clients if client.envs.end_chains(frames.chains)]
