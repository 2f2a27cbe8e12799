"""`Recipe`: from what a command line chose to an algorithm, here or in another process."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from plugrl_server.errors import UsageError

if TYPE_CHECKING:
    from plugrl_server.algorithm.base_algorithm import BaseAlgorithm
    from plugrl_server.algorithm.ranks import Ranks
    from plugrl_server.common.registry import Spec

__all__ = ["Recipe"]

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """A policy, an algorithm, and the seed of their first weights. Can be pickled."""

    policy: Spec
    policy_config: Any
    algo: Spec
    algo_config: Any
    seed: int
    """Seeds python, numpy and torch before anything is built."""
    torch_threads: int
    """Threads of one torch operation; 0 leaves it to torch."""
    overlaps: bool = False
    """Whether acting goes on while the algorithm learns."""

    def build(self, ranks: Ranks | None = None) -> BaseAlgorithm:
        """Build the algorithm with its optimizers, in the order in which seeds matter.

        Args:
            ranks: the learners that it learns with.

        Raises:
            UsageError: it cannot learn while its policy acts.
        """
        import torch

        from rlightning.utils.seeding import seed_everything

        if self.torch_threads:
            torch.set_num_threads(self.torch_threads)
        seed_everything(self.seed)
        policy = self.policy.create(self.policy_config)
        _log.info("Policy created: %s", type(policy).__name__)
        algorithm: BaseAlgorithm = self.algo.create(policy=policy, config=self.algo_config)
        if ranks is not None:
            algorithm.ranks = ranks
        if self.overlaps:
            try:
                algorithm.separate_learner()
            except NotImplementedError as error:
                raise UsageError(str(error)) from error
        algorithm.init_optimizers()
        return algorithm
