"""`Answerer`: asks one policy for its actions, in whichever of the three ways it answers."""

from __future__ import annotations

import asyncio
import weakref
from typing import TYPE_CHECKING

from rlightning.policy.joining import join_rows, split_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlightning.policy.base_policy import BasePolicy
    from rlightning.types import EnvRet, PolicyResponse

__all__ = ["Answerer"]


class Answerer:
    """Asks `policy`: joined rows, one `EnvRet` after another, or as coroutines side by side."""

    def __init__(self, policy: BasePolicy) -> None:
        self._policy = policy
        self._runner: asyncio.Runner | None = None

    def answer(
        self, env_rets: Sequence[EnvRet], *, deterministic: bool = False
    ) -> list[PolicyResponse]:
        """Return one response per `EnvRet`, in order.

        Args:
            env_rets: what the environments returned.
            deterministic: whether to act without exploration (evaluation).
        """
        policy = self._policy
        if policy.deterministic == deterministic:
            return self._ask(policy, env_rets)
        policy.deterministic = deterministic
        try:
            return self._ask(policy, env_rets)
        finally:
            policy.deterministic = not deterministic

    def _ask(self, policy: BasePolicy, env_rets: Sequence[EnvRet]) -> list[PolicyResponse]:
        if policy.batched_rollout:
            response = policy._rollout(join_rows(env_rets))
            return split_rows(response, env_rets)
        if policy.rollout_mode == "async":
            # Weights change between the steps of all environments, never while one waits.
            with policy._weights_lock:
                return self._event_loop().run(_gather(policy, env_rets))
        return [policy._rollout(env_ret) for env_ret in env_rets]

    def _event_loop(self) -> asyncio.Runner:
        """Return the one loop that coroutine policies run in, so that locks outlive a step."""
        if self._runner is None:
            self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
            # Not the runner's own `close`: it runs the loop once more, which the collector may
            # ask for in the middle of another loop.
            weakref.finalize(self, self._runner.get_loop().close)
        return self._runner


async def _gather(policy: BasePolicy, env_rets: Sequence[EnvRet]) -> list[PolicyResponse]:
    tasks = [asyncio.create_task(policy._rollout_async(env_ret)) for env_ret in env_rets]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:  # the loop lives on, and with it what is not ended here
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
