"""Let an environment worker and a policy worker step and answer by themselves, for a rollout.

Where each of the two is one worker on this machine, their steps and answers need not pass through
this process one by one (`rlightning.runtime.turns`). The engine's loop stays as it is: it gets what
the two have done, in order.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from rlightning.env.env_proxy import EnvProxy
from rlightning.policy.policy_proxy import PolicyProxy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rlightning.env import EnvGroup
    from rlightning.policy import PolicyGroup
    from rlightning.runtime.turns import Turns
    from rlightning.types import BatchedData, EnvRet

__all__ = ["taking_turns"]

_FEWEST_STEPS = 8
"""To begin and to end costs as much as a few steps."""


@contextlib.contextmanager
def taking_turns(
    env_group: EnvGroup, policy_group: PolicyGroup, env_rets: BatchedData[EnvRet], steps: int
) -> Iterator[Turns | None]:
    """Let the environments step `steps` times and the policy answer as often, where that can be.

    Inside, the two groups give what was done; nothing else may be asked of either worker.

    Args:
        env_group: the environments.
        policy_group: the policy.
        env_rets: what they returned last.
        steps: how many steps follow.

    Yields:
        What knows how far they are; None where this process makes every call itself.
    """
    env: Any = env_group.env_list[0]
    policy: Any = policy_group.eval_list[0] if policy_group.eval_list else None
    alone = len(env_group) == len(policy_group.eval_list) == 1 and env_group.step_counter is None
    elsewhere = isinstance(env, EnvProxy) and isinstance(policy, PolicyProxy)
    turns = None
    if alone and elsewhere and steps >= _FEWEST_STEPS and env.can_take_turns:
        policy_group.random_stream.hand_to(policy)
        (question,) = env_rets.values()
        turns = env.begin_turns(policy.worker, question, steps)
    if turns is None:
        yield None
        return
    env.turns = policy.turns = turns
    try:
        yield turns
    finally:
        env.turns = policy.turns = None
        turns.close()
        env.can_take_turns = not turns.stumbled
