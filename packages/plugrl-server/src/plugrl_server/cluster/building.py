"""Build what a server runs, with its work sent to workers."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any, cast

from plugrl_server.cluster.algorithm_worker import AlgorithmWorker
from plugrl_server.cluster.infer_group import InferGroup
from plugrl_server.cluster.learner_group import LEARN_TIMEOUT_S, LearnerGroup
from plugrl_server.cluster.published_weights import PublishedWeights
from plugrl_server.cluster.random_stream import RandomStream
from plugrl_server.cluster.spread_algorithm import SpreadAlgorithm
from plugrl_server.errors import UsageError

if TYPE_CHECKING:
    from plugrl_server.algorithm.base_algorithm import BaseAlgorithm
    from plugrl_server.algorithm.recipe import Recipe
    from plugrl_server.cluster.places import Places

__all__ = ["build_spread", "number_of_learners"]

_log = logging.getLogger(__name__)


def number_of_learners(algorithm: type[BaseAlgorithm], asked: int | None) -> int:
    """Give how many learners an algorithm gets; 0 where it learns beside the sockets.

    Args:
        algorithm: its class.
        asked: how many were asked for; None: one, where the algorithm can learn apart.

    Raises:
        UsageError: it cannot act apart, or not learn in so many.
    """
    name, most = algorithm.__name__, algorithm.most_learners
    if algorithm.follows_chains:
        raise UsageError(
            f"{name} follows each environment through one process; it cannot be spread"
        )
    wanted = 1 if asked is None else asked
    if most is None or wanted <= most:
        return wanted
    if asked is None:
        return most
    where = "only beside the sockets" if most == 0 else f"in {most} workers at most"
    raise UsageError(
        f"--num-ddp-workers is {asked}, and {name} learns {where}: set it to {most}. ppo, sac, "
        "dummy and policies of --rlightning learn in any number; an algorithm of your own does "
        "with most_learners, hand_over, take_over and ranks (see BaseAlgorithm)"
    )


def build_spread(places: Places, recipe: Recipe) -> BaseAlgorithm:
    """Build an algorithm here, and the workers that act and learn for it.

    Args:
        places: starts them.
        recipe: of the algorithm.

    Raises:
        WorkerLostError: one cannot start.
    """
    config = places.config
    algorithm = _on_cpu(recipe).build()
    apart = _for_workers(recipe)
    one_each = config.infer_workers == 1 and config.ddp_workers <= 1
    stream = RandomStream(shared=one_each and not recipe.overlaps)
    weights = PublishedWeights() if hasattr(algorithm.policy, "state_dict") else None
    actors = InferGroup(
        [places.actor(n, AlgorithmWorker, (apart,)) for n in range(config.infer_workers)],
        example_state=algorithm.policy.fake_runtime_state(1),
        weights=weights,
        stream=stream,
        seed=recipe.seed,
    )
    learners = None
    if config.ddp_workers:
        learners = LearnerGroup(
            lambda number: places.learner(
                number, AlgorithmWorker, (apart,), timeout_s=LEARN_TIMEOUT_S
            ),
            config.ddp_workers,
            meeting=config.meeting,
            stream=stream,
            seed=recipe.seed,
            max_restarts=config.max_restarts,
        )
    spread: Any = SpreadAlgorithm(
        algorithm, actors=actors, learners=learners, weights=weights, stream=stream
    )
    places.at_end(spread.close)
    _log.info("acting in %d workers, learning in %d", config.infer_workers, config.ddp_workers)
    return cast("BaseAlgorithm", spread)


def _on_cpu(recipe: Recipe) -> Recipe:
    """What holds the sockets leaves GPUs to the workers."""
    if not hasattr(recipe.policy_config, "device"):
        return recipe
    config = dataclasses.replace(recipe.policy_config, device="cpu")
    return dataclasses.replace(recipe, policy_config=config)


def _for_workers(recipe: Recipe) -> Recipe:
    """Workers are given weights, and need no file for them."""
    config = recipe.algo_config
    if getattr(config, "policy_checkpoint_path", None) is not None:
        config = dataclasses.replace(config, policy_checkpoint_path=None)
    return dataclasses.replace(recipe, algo_config=config, overlaps=False)
