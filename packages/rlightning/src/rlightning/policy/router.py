"""Which eval worker answers which environment worker: a decision over plain values.

Two routers, by ``policy.router_type``. `SimpleRouter` gives each request to the worker with least
to do. `NodeAffinityRouter` does the same among the workers on the environment's own node, so that
observations stay on it, and looks further only where that node has none alive. Both are sticky on
request: an environment then stays with its worker while that is alive, for policies that keep state
between steps. Dead workers get nothing.

Deterministic, without a clock or randomness; not thread-safe. Knows nothing about policies,
environments or how a request travels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from rlightning.errors import WorkerLostError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["NodeAffinityRouter", "Router", "SimpleRouter", "build_router"]


class Router(ABC):
    """Assigns requests of environments to eval workers.

    Args:
        worker_nodes: the node of each eval worker, by its index; None where it is not known.
        env_nodes: the node of each environment worker, by its id; may lack some.
        sticky: whether an environment stays with its worker.
    """

    def __init__(
        self,
        worker_nodes: Sequence[str | None],
        env_nodes: Mapping[str, str | None] | None = None,
        *,
        sticky: bool = False,
    ) -> None:
        self.worker_nodes = list(worker_nodes)
        self.env_nodes = dict(env_nodes or {})
        self.sticky = sticky
        self._alive = [True] * len(self.worker_nodes)
        self._assigned: dict[str, int] = {}

    @property
    def alive(self) -> list[int]:
        """The indices of the workers that get requests."""
        return [index for index, alive in enumerate(self._alive) if alive]

    def assign(
        self, requests: Mapping[str, int], loads: Sequence[float] | None = None
    ) -> dict[str, int]:
        """Return the worker of each request, in the order of the requests.

        Args:
            requests: rows to answer, by environment id.
            loads: rows that each worker is busy with already, by its index; nothing where unset.

        Raises:
            WorkerLostError: no worker is alive.
        """
        busy = list(loads) if loads is not None else [0.0] * len(self._alive)
        if self.sticky and loads is None:
            for owner in self._assigned.values():
                busy[owner] += 1e-6  # of idle workers, the one with fewest environments
        chosen: dict[str, int] = {}
        for env_id, rows in requests.items():
            worker = self._assigned.get(env_id)
            if worker is None:
                worker = min(self._candidates(env_id), key=lambda index: (busy[index], index))
                if self.sticky:
                    self._assigned[env_id] = worker
            busy[worker] += rows
            chosen[env_id] = worker
        return chosen

    @abstractmethod
    def _candidates(self, env_id: str) -> list[int]:
        """Return the workers that may answer an environment; at least one.

        Raises:
            WorkerLostError: there is none.
        """

    def mark_dead(self, worker: int) -> list[str]:
        """Give `worker` nothing from now on; return the environments that had stuck to it.

        Their state is lost with it: what a policy remembered of their episodes is gone.
        """
        self._alive[worker] = False
        orphans = [env_id for env_id, owner in self._assigned.items() if owner == worker]
        self.release(orphans)
        return orphans

    def mark_alive(self, worker: int, node: str | None = None) -> None:
        """Give `worker` requests again; environments that stick elsewhere stay there.

        Args:
            worker: its index.
            node: where it runs now, where that is known to have changed.
        """
        self._alive[worker] = True
        if node is not None:
            self.worker_nodes[worker] = node

    def move(self, env_id: str, node: str | None) -> None:
        """Take note that an environment runs on `node` now, and let it stick anew."""
        self.env_nodes[env_id] = node
        self.release([env_id])

    def release(self, env_ids: Iterable[str]) -> None:
        """Forget which workers these environments stick to."""
        for env_id in env_ids:
            self._assigned.pop(env_id, None)

    def _anyone(self) -> list[int]:
        alive = self.alive
        if not alive:
            count = len(self._alive)
            raise WorkerLostError("eval", reason=f"none of {count} eval workers is alive")
        return alive


class SimpleRouter(Router):
    """Whoever has least to do, then whoever comes first."""

    def _candidates(self, env_id: str) -> list[int]:
        del env_id  # all are alike
        return self._anyone()


class NodeAffinityRouter(Router):
    """Whoever has least to do on the environment's node; elsewhere only where nobody is there."""

    def _candidates(self, env_id: str) -> list[int]:
        alive = self._anyone()
        node = self.env_nodes.get(env_id)
        near = [index for index in alive if node is not None and self.worker_nodes[index] == node]
        return near or alive


def build_router(
    router_type: str,
    worker_nodes: Sequence[str | None],
    env_nodes: Mapping[str, str | None] | None = None,
    *,
    sticky: bool = False,
) -> Router:
    """Return the router that ``policy.router_type`` names: ``simple`` or ``node_affinity``."""
    kinds: dict[str, type[Router]] = {"simple": SimpleRouter, "node_affinity": NodeAffinityRouter}
    return kinds[router_type](worker_nodes, env_nodes, sticky=sticky)
