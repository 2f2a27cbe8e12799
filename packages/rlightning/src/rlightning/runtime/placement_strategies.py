"""The four ways to place workers, each a function that puts every request on the board.

* ``default``: wherever there is room; whether it all fits is found out here, where each worker goes
  is left to the scheduler.
* ``disaggregate``: train workers fill nodes from the largest; eval and environment workers stand
  together on what is left, on other nodes where there are any.
* ``colocate``: train worker i and eval worker i share a GPU (or a node, without GPUs).
* ``manual``: as ``resource_pool`` says.

Storage workers stand on the nodes of train workers. All of it is pure and repeatable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlightning.errors import PlacementError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlightning.config import ClusterConfig, ResourcePoolConfig
    from rlightning.runtime.placement_board import Board, Request

__all__ = ["place_anywhere", "place_apart", "place_as_told", "place_together"]


def _of(board: Board, role: str) -> list[Request]:
    return [request for request in board.requests if request.role == role]


def place_anywhere(board: Board, cluster: ClusterConfig) -> None:
    """Put every request on the least loaded node with room, those with most GPUs first."""
    del cluster  # the four strategies are called alike
    for request in sorted(board.requests, key=lambda each: -each.gpus):
        board.place(request, board.by_load())


def place_apart(board: Board, cluster: ClusterConfig) -> None:
    """Keep train workers apart from eval and environment workers."""
    order = board.by_size()
    train = _of(board, "train")
    if any(request.gpus for request in train):
        for request in train:
            board.place(request, order)
        used = {request.node for request in train}
        others = [node for node in order if node not in used] or order
    else:
        count = _nodes_for(train, board)
        others = order[count:] or order
        for request in train:
            board.place(request, board.by_load(order[:count]))
    evals = _of(board, "eval")
    beside = _environments_beside(board, evals)
    for request in evals:
        needed = request.gpus + _own_gpus(beside[request.index], cluster)
        free = board.by_free_gpus(others)
        roomy = [node for node in (*free, *order) if sum(board.free_gpus[node]) >= needed]
        board.place(request, dict.fromkeys([*roomy, *free, *order]))
        for environment in beside[request.index]:
            _place_environment(board, cluster, environment, partner=request, first=others)
    if not evals:
        for environment in _of(board, "env"):
            _place_environment(board, cluster, environment, partner=None, first=others)
    _place_storages(board)


def _environments_beside(board: Board, partners: Sequence[Request]) -> list[list[Request]]:
    """Return the environments that stand with each of `partners`, in turn."""
    return [
        [request for request in _of(board, "env") if request.index % len(partners) == position]
        for position in range(len(partners))
    ]


def _own_gpus(environments: Sequence[Request], cluster: ClusterConfig) -> float:
    """Return the GPUs that environments need besides those of the worker they stand with."""
    if cluster.placement.env_strategy == "device-colocate":
        return 0.0
    return sum(request.gpus for request in environments)


def _nodes_for(train: Sequence[Request], board: Board) -> int:
    """Return how many nodes without GPUs train workers get: their share of all cores, rounded."""
    everything = sum(request.cpus for request in board.requests)
    mine = sum(request.cpus for request in train)
    share = mine / everything if everything else 0.5
    return min(max(1, round(share * len(board.nodes))), max(1, len(board.nodes) - 1))


def place_together(board: Board, cluster: ClusterConfig) -> None:
    """Let train worker i and eval worker i share a GPU."""
    train, evals = _of(board, "train"), _of(board, "eval")
    for request in (*train, *evals):
        if request.gpus > 1:
            raise PlacementError(
                f"{request.role} worker {request.index} asks for {request.gpus:g} GPUs; with "
                "cluster.placement.strategy: colocate, workers share one GPU each. Lower "
                f"cluster.{request.role}_each_gpu_num to 1, or take strategy: disaggregate",
                role=request.role,
                resource="GPU",
                asked=request.gpus,
                available=1,
            )
    first, second = (train, evals) if len(train) >= len(evals) else (evals, train)
    for position, request in enumerate(first):
        partner = second[position] if position < len(second) else None
        own = request.gpus
        request.gpus = max(own, partner.gpus if partner else 0.0)
        has_gpu = request.gpus > 0
        board.place(request, board.by_size() if has_gpu else board.by_load())
        request.gpus = own
        if partner is not None:
            board.join(partner, request)
    partners = evals or train
    for environment in _of(board, "env"):
        partner = partners[environment.index % len(partners)] if partners else None
        _place_environment(board, cluster, environment, partner=partner, first=board.by_size())
    _place_storages(board)


def _place_environment(
    board: Board,
    cluster: ClusterConfig,
    request: Request,
    *,
    partner: Request | None,
    first: Sequence[int],
) -> None:
    """Put an environment on the node of its partner, on its partner's GPU where that is asked."""
    share = cluster.placement.env_strategy == "device-colocate"
    if share and partner is not None and request.gpus and partner.gpu_ids:
        if len(partner.gpu_ids) > 1 or request.gpus > 1:
            raise PlacementError(
                f"env worker {request.index} is to share the GPUs of {partner.role} worker "
                f"{partner.index} (cluster.placement.env_strategy: device-colocate), which "
                "workers with several GPUs cannot. Give each one GPU, or take env_strategy: "
                "default",
                role="env",
                resource="GPU",
                asked=max(request.gpus, len(partner.gpu_ids)),
                available=1,
            )
        board.join(request, partner)
        return
    nearby = [] if partner is None or partner.node is None else [partner.node]
    board.place(request, dict.fromkeys([*nearby, *board.by_load(first), *board.by_load()]))


def _place_storages(board: Board) -> None:
    """Put storages on the nodes of train workers in turn, or on the least loaded nodes."""
    near = list(dict.fromkeys(r.node for r in _of(board, "train") if r.node is not None))
    for position, request in enumerate(_of(board, "buffer")):
        turn = position % len(near) if near else 0
        board.place(request, dict.fromkeys([*near[turn:], *near[:turn], *board.by_load()]))


# ---- by hand ------------------------------------------------------------------------------------


def place_as_told(board: Board, cluster: ClusterConfig) -> None:
    """Put workers on the indices that ``resource_pool`` gives to their role."""
    pools = cluster.resource_pool or []
    chosen = _choose_nodes(board, pools)
    for role in ("train", "eval", "env", "buffer"):
        requests = _of(board, role)
        places = [
            place
            for pool in pools
            for place in _places(pool, chosen[pool.name], pool.indices(role), board)
        ]
        if requests and not places:
            if role != "buffer":
                raise _wrong_count(role, requests, 0)
            _place_storages(board)
            continue
        if not requests:
            continue
        width = max(request.width for request in requests)
        if len(places) % width or (len(requests) * width) % len(places):
            raise _wrong_count(role, requests, len(places))
        groups = [places[start : start + width] for start in range(0, len(places), width)]
        per_group = len(requests) // len(groups)
        for position, request in enumerate(requests):
            group = groups[position // per_group]
            if len({node for node, _ in group}) > 1:
                raise PlacementError(
                    f"{role} worker {request.index} would get GPUs of several nodes; order the "
                    "indices in resource_pool so that its GPUs are on one node",
                    role=role,
                    resource="GPU",
                    asked=width,
                    available=1,
                )
            uses_gpu = request.gpus > 0 and board.nodes[group[0][0]].gpus > 0
            board.put(request, group[0][0], [gpu for _, gpu in group] if uses_gpu else ())


def _wrong_count(role: str, requests: Sequence[Request], places: int) -> PlacementError:
    width = max(request.width for request in requests)
    needed = len(requests) * width
    return PlacementError(
        f"resource_pool gives {places} indices to {role} and {len(requests)} {role} workers need "
        f"{needed} (or as many workers share one as divides them evenly). List {needed} indices "
        f"under `{role}`, or change the number of {role} workers",
        role=role,
        resource="place",
        asked=needed,
        available=places,
    )


def _choose_nodes(board: Board, pools: Sequence[ResourcePoolConfig]) -> dict[str, list[int]]:
    """Return the nodes of each pool: those it names, or the first that fit and are free."""
    by_name = {node.name: index for index, node in enumerate(board.nodes)}
    any_gpus = any(node.gpus for node in board.nodes)
    taken: set[int] = set()
    chosen: dict[str, list[int]] = {}
    for pool in sorted(pools, key=lambda each: each.node_ids is None):
        names = sorted(by_name) if pool.node_ids is None else pool.node_ids
        mine: list[int] = []
        for name in names:
            if name not in by_name:
                raise PlacementError(
                    f"resource_pool {pool.name!r} names the node {name!r}, which is not in the "
                    f"cluster.{did_you_mean(name, by_name)} Nodes: {', '.join(sorted(by_name))}",
                    role=pool.name,
                    resource="node",
                    asked=pool.num_node,
                    available=len(by_name),
                )
            node = by_name[name]
            wanted = pool.gpus_per_node()[min(len(mine), pool.num_node - 1)]
            fits = not any_gpus or board.nodes[node].gpus >= wanted
            if len(mine) < pool.num_node and node not in taken and fits:
                mine.append(node)
                taken.add(node)
        if len(mine) < pool.num_node:
            raise PlacementError(
                f"resource_pool {pool.name!r} asks for {pool.num_node} nodes with "
                f"{pool.num_gpus} GPUs and {len(mine)} are left for it: "
                + ", ".join(f"{node.name} has {node.gpus}" for node in board.nodes)
                + ". A node is in one pool only; lower num_node or num_gpus, or add nodes",
                role=pool.name,
                resource="node",
                asked=pool.num_node,
                available=len(mine),
            )
        chosen[pool.name] = mine
    return chosen


def _places(
    pool: ResourcePoolConfig, nodes: Sequence[int], indices: Sequence[int], board: Board
) -> list[tuple[int, int]]:
    """Return the node and the GPU on it of each index of a pool."""
    per_node = pool.gpus_per_node()
    if sum(per_node) == 0:
        return [(nodes[index % len(nodes)], 0) for index in indices]
    numbered = [
        (node, gpu) for node, count in zip(nodes, per_node, strict=True) for gpu in range(count)
    ]
    for index in indices:
        if index >= len(numbered):
            raise PlacementError(
                f"resource_pool {pool.name!r} uses the index {index} and has {len(numbered)} GPUs, "
                f"numbered from 0 over {', '.join(board.nodes[node].name for node in nodes)}",
                role=pool.name,
                resource="GPU",
                asked=index + 1,
                available=len(numbered),
            )
    return [numbered[index] for index in indices]
