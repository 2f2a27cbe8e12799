"""The bookkeeping of a plan in the making: what is asked, and what each node has left.

Strategies (`rlightning.runtime.placement_strategies`) put requests on the board; the board refuses
what does not fit, in words. Cores are shares: they are counted, and divided later. GPUs and
reserved memory are things: what is taken is gone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlightning.errors import PlacementError
from rlightning.runtime.placement_plan import ROLES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rlightning.runtime.placement_plan import Node

__all__ = ["Board", "Request"]

_ROUNDING = 1e-6
_SETTINGS = {
    "train": "cluster.train_each_gpu_num or cluster.train_worker_num",
    "eval": "cluster.eval_each_gpu_num or cluster.eval_worker_num",
    "env": "num_gpus or num_workers of the env entry",
    "buffer": "cluster.buffer_worker_num",
}
_CPU_SETTINGS = {
    "train": "cluster.train_each_cpu_num",
    "eval": "cluster.eval_each_cpu_num",
    "env": "num_cpus of the env entry",
    "buffer": "cluster.buffer_each_cpu_num",
}


@dataclass(slots=True, kw_only=True)
class Request:
    """What one worker asks for, and, once it is on the board, where it stands."""

    role: str
    index: int
    cpus: float
    gpus: float
    """GPUs, or a share of one; 0 where the cluster has none."""
    width: int = 1
    """Indices of a pool that it takes: one, or one for each GPU that the configuration gives it."""
    memory_bytes: int = 0
    node: int | None = None
    gpu_ids: tuple[int, ...] = ()


class Board:
    """The nodes of a cluster and what the placed requests have left of them.

    Args:
        nodes: the cluster.
        requests: everything that will be placed, for the words of an error.
        advice: per role, how its workers could share GPUs, where they could, for an error too.
    """

    def __init__(
        self, nodes: Sequence[Node], requests: Sequence[Request], advice: dict[str, str]
    ) -> None:
        self.nodes = nodes
        self.requests = requests
        self.advice = advice
        self.free_gpus = [[1.0] * node.gpus for node in nodes]
        self.free_memory = [node.memory_bytes for node in nodes]
        self.cpu_demand = [0.0] * len(nodes)

    def by_size(self) -> list[int]:
        """Return the nodes, those with most GPUs first, then most cores, then by name."""
        order = range(len(self.nodes))
        return sorted(order, key=lambda i: (-self.nodes[i].gpus, -self.nodes[i].cpus, i))

    def by_load(self, among: Iterable[int] | None = None) -> list[int]:
        """Return nodes, those whose cores are asked for least first."""
        order = range(len(self.nodes)) if among is None else among
        return sorted(order, key=lambda i: self.cpu_demand[i] / max(self.nodes[i].cpus, _ROUNDING))

    def by_free_gpus(self, among: Iterable[int]) -> list[int]:
        """Return nodes, those with most free GPUs first, and of these the least loaded."""
        return sorted(self.by_load(among), key=lambda i: -sum(self.free_gpus[i]))

    def place(self, request: Request, order: Iterable[int]) -> None:
        """Put `request` on the first node of `order` that has room.

        Raises:
            PlacementError: none has; it says what is missing.
        """
        for node in order:
            gpu_ids = self._room(request, node)
            if gpu_ids is not None:
                self.put(request, node, gpu_ids)
                return
        raise self._shortage(request)

    def put(self, request: Request, node: int, gpu_ids: Iterable[int]) -> None:
        """Put `request` on these GPUs of a node, without asking whether they are free."""
        request.node = node
        request.gpu_ids = tuple(gpu_ids)
        self.cpu_demand[node] += request.cpus
        self.free_memory[node] -= request.memory_bytes
        share = min(request.gpus, 1.0)
        for gpu in request.gpu_ids:
            self.free_gpus[node][gpu] -= share

    def join(self, request: Request, other: Request) -> None:
        """Put `request` where `other` stands, on the same GPUs and without taking more of them."""
        assert other.node is not None
        request.node = other.node
        request.gpu_ids = other.gpu_ids
        self.cpu_demand[other.node] += request.cpus
        self.free_memory[other.node] -= request.memory_bytes

    def _room(self, request: Request, node: int) -> tuple[int, ...] | None:
        if request.cpus > self.nodes[node].cpus + _ROUNDING:
            return None
        if request.memory_bytes and request.memory_bytes > self.free_memory[node]:
            return None
        free = self.free_gpus[node]
        if request.gpus == 0:
            return ()
        if request.gpus < 1:
            fitting = [i for i, left in enumerate(free) if left + _ROUNDING >= request.gpus]
            return (min(fitting, key=lambda i: free[i]),) if fitting else None
        whole = [i for i, left in enumerate(free) if left > 1 - _ROUNDING]
        count = int(request.gpus)
        return tuple(whole[:count]) if len(whole) >= count else None

    def _shortage(self, request: Request) -> PlacementError:
        largest = max(node.cpus for node in self.nodes)
        who = f"{request.role} worker {request.index}"
        if request.cpus > largest + _ROUNDING:
            return PlacementError(
                f"{who} asks for {request.cpus:g} CPUs and no node has more than {largest:g}. "
                f"Lower {_CPU_SETTINGS[request.role]}, or add a larger node",
                role=request.role,
                resource="CPU",
                asked=request.cpus,
                available=largest,
            )
        if request.memory_bytes:  # storages, which have no GPU
            asked = sum(each.memory_bytes for each in self.requests)
            have = sum(node.memory_bytes for node in self.nodes)
            return PlacementError(
                f"{who} reserves {request.memory_bytes / 1e9:g} GB of memory and no node has that "
                f"much left: the run reserves {asked / 1e9:g} GB and the cluster has "
                f"{have / 1e9:g} GB. Lower cluster.buffer_each_memory_gb, or add nodes",
                role=request.role,
                resource="memory",
                asked=asked,
                available=have,
            )
        have_gpus = sum(node.gpus for node in self.nodes)
        asked_gpus = sum(each.gpus for each in self.requests)
        where = ", ".join(f"{node.name} {node.gpus}" for node in self.nodes if node.gpus)
        count = f"{request.gpus:g} GPUs of one node" if request.gpus > 1 else "a GPU"
        count = f"{request.gpus:g} of a GPU" if request.gpus < 1 else count
        advice = self.advice.get(request.role)
        return PlacementError(
            f"{who} asks for {count} and finds none free: the run asks for {asked_gpus:g} GPUs "
            f"({self._asked_by_role()}) and the cluster has {have_gpus} ({where}). Lower "
            f"{_SETTINGS[request.role]},{f' {advice},' if advice else ''} or add nodes",
            role=request.role,
            resource="GPU",
            asked=asked_gpus,
            available=have_gpus,
        )

    def _asked_by_role(self) -> str:
        asked = {
            role: [each.gpus for each in self.requests if each.role == role and each.gpus]
            for role in ROLES
        }
        return ", ".join(
            f"{role} {sum(gpus):g} for {len(gpus)} workers" for role, gpus in asked.items() if gpus
        )
