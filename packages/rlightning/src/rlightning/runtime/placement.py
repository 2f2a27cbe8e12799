"""`plan`: where the remote workers of a run go, decided before any of them starts.

A pure function from the configuration and the nodes of a cluster to a `Plan`: no clock, no
network, no Ray. What cannot work is refused here, in words, instead of hanging later. Where a
cluster has no GPU at all, GPU requests become 0; where workers ask for more cores than there are,
they share them (``cluster.share_cpus``): both are said in `Plan.notes`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rlightning.errors import PlacementError
from rlightning.runtime.placement_board import Board, Request
from rlightning.runtime.placement_plan import ROLES, Bundle, Node, Plan, Worker
from rlightning.runtime.placement_strategies import (
    place_anywhere,
    place_apart,
    place_as_told,
    place_together,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlightning.config import ClusterConfig, EnvConfig

__all__ = ["Bundle", "Node", "Plan", "Worker", "plan"]

_STRATEGIES = {
    "default": place_anywhere,
    "disaggregate": place_apart,
    "colocate": place_together,
    "manual": place_as_told,
}
_UNITS = 10_000  # schedulers count shares of a core or a GPU in ten-thousandths


def plan(cluster: ClusterConfig, envs: Sequence[EnvConfig], nodes: Sequence[Node]) -> Plan:
    """Return where each remote worker goes and what it asks the scheduler for.

    Args:
        cluster: the ``cluster`` section.
        envs: the entries of the ``env`` section; each has `num_workers` workers.
        nodes: the cluster's machines; their order does not matter.

    Raises:
        PlacementError: the cluster lacks what the run asks for.
    """
    nodes = sorted(nodes, key=lambda node: node.name)
    requests = _requests(cluster, envs, nodes)
    if requests and not nodes:
        raise PlacementError(
            "the cluster has no nodes; start one with `ray start --head`, or set "
            "cluster.ray_address: local",
            role=requests[0].role,
            resource="node",
            asked=1,
            available=0,
        )
    notes = _without_gpus(requests, nodes)
    if cluster.strategy != "manual" and cluster.resource_pool:
        notes.append("resource_pool is not used: cluster.placement.mode is auto")
    if cluster.strategy == "default" and cluster.placement.env_strategy != "default":
        notes.append("env_strategy is not used: cluster.placement.strategy is default")
    board = Board(nodes, requests, _how_to_share(cluster))
    _STRATEGIES[cluster.strategy](board, cluster)
    pinned = cluster.strategy != "default"
    cpus = _shared_cpus(board, cluster, notes, pinned=pinned)
    bundles, members, gpus = _bundled(board, cpus, notes) if pinned else ([], {}, {})
    workers = []
    for position, request in enumerate(requests):
        own, extra = _divided(request.role, gpus.get(position, request.gpus))
        workers.append(
            Worker(
                role=request.role,
                index=request.index,
                node=nodes[request.node].name if pinned and request.node is not None else None,
                bundle=members.get(position),
                cpus=cpus[position],
                gpus=own,
                memory_bytes=request.memory_bytes,
                extra_gpus=extra,
            )
        )
    if any(worker.role == "env" and worker.gpus > 1 for worker in workers):
        notes.append("environments with several GPUs are evaluated and recorded without one")
    return Plan(
        strategy=cluster.strategy,
        nodes=tuple(nodes),
        workers=tuple(workers),
        bundles=tuple(bundles),
        notes=tuple(notes),
    )


def _requests(
    cluster: ClusterConfig, envs: Sequence[EnvConfig], nodes: Sequence[Node]
) -> list[Request]:
    """Return what the remote workers ask for, by role and index."""
    train = (cluster.train_each_cpu_num, cluster.train_each_gpu_num, 0)
    evals = (cluster.eval_each_cpu_num, cluster.eval_each_gpu_num, 0)
    storage = (cluster.buffer_each_cpu_num, 0.0, int(cluster.buffer_each_memory_gb * 1e9))
    asked = {
        "train": [train] * cluster.train_worker_num,
        "eval": [evals] * cluster.eval_worker_num,
        "env": [(env.num_cpus, env.num_gpus, 0) for env in envs for _ in range(env.num_workers)],
        "buffer": [storage] * _number_of_storages(cluster, nodes),
    }
    return [
        Request(
            role=role,
            index=index,
            cpus=cpus,
            gpus=gpus,
            width=max(1, math.ceil(gpus)),
            memory_bytes=memory_bytes,
        )
        for role in ROLES
        if cluster.is_remote(role)
        for index, (cpus, gpus, memory_bytes) in enumerate(asked[role])
    ]


def _number_of_storages(cluster: ClusterConfig, nodes: Sequence[Node]) -> int:
    """Return how many storages there are; ``auto`` is one per node that train workers fill."""
    if isinstance(cluster.buffer_worker_num, int):
        return cluster.buffer_worker_num
    largest = max((node.gpus for node in nodes), default=0)
    if not largest or not cluster.train_each_gpu_num:
        return 1
    return math.ceil(cluster.train_worker_num * cluster.train_each_gpu_num / largest)


def _without_gpus(requests: Sequence[Request], nodes: Sequence[Node]) -> list[str]:
    """Where the cluster has no GPU, ask for none, and say so in one line."""
    wanting = [request for request in requests if request.gpus]
    if not wanting or any(node.gpus for node in nodes):
        return []
    roles = [role for role in ROLES if any(request.role == role for request in wanting)]
    asked = sum(request.gpus for request in wanting)
    for request in wanting:
        request.gpus = 0.0
    return [
        f"the cluster has no GPU: {' and '.join(roles)} workers, which ask for {asked:g}, use CPUs"
    ]


def _how_to_share(cluster: ClusterConfig) -> dict[str, str]:
    """Return per role the setting that would let its workers share GPUs."""
    advice: dict[str, str] = {}
    if cluster.strategy in ("default", "disaggregate"):
        colocate = "let train and eval share GPUs (cluster.placement.strategy: colocate)"
        advice |= {"train": colocate, "eval": colocate}
    if cluster.strategy in ("disaggregate", "colocate"):
        advice["env"] = "let env share GPUs (cluster.placement.env_strategy: device-colocate)"
    return advice


def _divided(role: str, gpus: float) -> tuple[float, float]:
    """Return what a worker asks for of its GPU, and what each of its two further processes does."""
    if role != "env" or gpus > 1:
        return gpus, 0.0
    extra = _floor(gpus / 4)
    return _floor(gpus - 2 * extra), extra


def _floor(share: float) -> float:
    return math.floor(share * _UNITS + 1e-6) / _UNITS


def _shared_cpus(
    board: Board, cluster: ClusterConfig, notes: list[str], *, pinned: bool
) -> list[float]:
    """Return the cores that each request gets; where they are too few, its share of them."""
    factors = [
        min(1.0, node.cpus / demand) if demand else 1.0
        for node, demand in zip(board.nodes, board.cpu_demand, strict=True)
    ]
    if not pinned:
        factors = [min(factors, default=1.0)] * len(factors)
    demand, have = sum(board.cpu_demand), sum(node.cpus for node in board.nodes)
    scarce = [node for node, factor in zip(board.nodes, factors, strict=True) if factor < 1]
    if scarce and not cluster.share_cpus:
        asked = {role: sum(r.cpus for r in board.requests if r.role == role) for role in ROLES}
        most = max(asked, key=lambda role: asked[role])
        listed = ", ".join(f"{role} {cpus:g}" for role, cpus in asked.items() if cpus)
        raise PlacementError(
            f"the run asks for {demand:g} CPUs ({listed}), more than the cluster's {have:g} allow "
            f"({', '.join(f'{node.name} {node.cpus:g}' for node in board.nodes)}). Ask for fewer "
            "workers or cores, or let them share cores: cluster.share_cpus: true",
            role=most,
            resource="CPU",
            asked=demand,
            available=have,
        )
    if scarce and pinned:
        where = "; ".join(
            f"{asked:g} asked for, {node.cpus:g} on {node.name}"
            for node, asked in zip(board.nodes, board.cpu_demand, strict=True)
            if node in scarce
        )
        notes.append(f"workers share cores: {where}")
    elif scarce:
        notes.append(f"workers share cores: {demand:g} asked for, {have:g} there")
    return [
        _floor(request.cpus * factors[request.node]) if request.node is not None else request.cpus
        for request in board.requests
    ]


def _bundled(
    board: Board, cpus: Sequence[float], notes: list[str]
) -> tuple[list[Bundle], dict[int, int], dict[int, float]]:
    """Return the bundles, each request's bundle, and the GPUs that it asks of its bundle."""
    grouped: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for position, request in enumerate(board.requests):
        if request.gpu_ids and request.node is not None:
            grouped.setdefault((request.node, request.gpu_ids), []).append(position)
    bundles: list[Bundle] = []
    members: dict[int, int] = {}
    shares: dict[int, float] = {}
    shared = 0
    for (node, gpu_ids), positions in sorted(grouped.items()):
        asked = sum(board.requests[position].gpus for position in positions)
        for position in positions:
            members[position] = len(bundles)
            if asked > len(gpu_ids) + 1e-6:
                shares[position] = _floor(len(gpu_ids) / len(positions))
        shared += asked > len(gpu_ids) + 1e-6
        bundles.append(
            Bundle(
                node=board.nodes[node].name,
                gpu_ids=gpu_ids,
                cpus=round(sum(cpus[position] for position in positions), 4),
                memory_bytes=sum(board.requests[position].memory_bytes for position in positions),
            )
        )
    if shared:
        notes.append(f"{shared} of {len(bundles)} GPUs are shared by workers that asked for more")
    return bundles, members, shares
