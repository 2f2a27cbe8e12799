"""The TRAIN and EVAL instances of a policy of rlightning, in workers."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from plugrl_server.cluster.learner_group import LEARN_TIMEOUT_S
from rlightning.policy import PolicyGroup
from rlightning.policy.policy_proxy import PolicyProxy
from rlightning.types import PolicyRole
from rlightning.utils.registry import POLICIES, WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from plugrl_server.cluster.places import Places
    from rlightning.config import MainConfig

__all__ = ["policies_builder"]


def policies_builder(places: Places) -> Callable[[MainConfig], PolicyGroup]:
    """Give what builds the instances in workers, as many as `places` has."""
    return functools.partial(_build, places)


def _build(places: Places, config: MainConfig) -> PolicyGroup:
    kind: Any = POLICIES.get(config.policy.type)
    section, learners = config.policy, places.config.ddp_workers
    section.train_config = config.train

    def proxy(role: PolicyRole, start: Callable[..., Any], number: int) -> Any:
        spawn = functools.partial(start, number)
        return PolicyProxy(kind, section, role, spawn, timeout_s=LEARN_TIMEOUT_S)

    learner = functools.partial(places.learner, timeout_s=LEARN_TIMEOUT_S)
    train = [proxy(PolicyRole.TRAIN, learner, number) for number in range(learners)]
    actors = range(places.config.infer_workers)
    evals = [proxy(PolicyRole.EVAL, places.actor, number) for number in actors]
    weights = section.weight_buffer
    store = None
    if weights.buffer_strategy != "None":
        sharded = weights.buffer_strategy == "Sharded"
        store = WEIGHTS.get(weights.type)(*([learners] if sharded else []))
    group = PolicyGroup(train, evals, section, weight_buffer=store)
    places.at_end(group.close)
    return group
