"""`EvalWorkers`: the EVAL instances of a policy: who answers what, and what happens when one dies.

An instance that dies is started again with the newest weights. Where others are alive they answer
meanwhile; a single one is waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlightning.errors import WorkerLostError
from rlightning.policy.answering import Answerer
from rlightning.policy.joining import rows_of
from rlightning.policy.policy_proxy import PolicyProxy
from rlightning.policy.router import build_router
from rlightning.runtime.base import Done, Future
from rlightning.runtime.supervision import Restart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlightning.policy.random_stream import RandomStream
    from rlightning.types import EnvRet, PolicyResponse

__all__ = ["EvalWorkers"]

Part = tuple[int, list[int]]
"""An instance, by its index, and the positions of what it answers."""


class EvalWorkers:
    """The EVAL instances, addressed as one.

    Args:
        policies: the instances: policies of this process, or proxies.
        router_type: how environments are assigned to them.
        random_stream: what they draw from.
    """

    def __init__(
        self, policies: Sequence[Any], *, router_type: str, random_stream: RandomStream
    ) -> None:
        self._policies = list(policies)
        self._random_stream = random_stream
        self._answerers = [
            policy if isinstance(policy, PolicyProxy) else Answerer(policy) for policy in policies
        ]
        here = [answerer for answerer in self._answerers if isinstance(answerer, Answerer)]
        self._only_one_here = here[0] if len(here) == len(policies) == 1 else None
        self._router = build_router(router_type, [None] * len(policies), sticky=True)
        self._restarts: dict[int, Restart] = {}
        self._weights: tuple[int, dict[str, Any] | None] | None = None
        self.lost = 0
        """How many instances have died."""

    def set_addresses(self, env_addresses: Mapping[str, str]) -> None:
        """Take note of where everybody is, now that all have started.

        Args:
            env_addresses: the machine of each environment worker, by its id.
        """
        for index, policy in enumerate(self._policies):
            here = policy.address if isinstance(policy, PolicyProxy) else ""
            self._router.mark_alive(index, here)
        for env_id, address in env_addresses.items():
            self._router.move(env_id, address)

    # ---- acting --------------------------------------------------------------------------------

    def answer(self, env_rets: Sequence[EnvRet], *, deterministic: bool) -> list[PolicyResponse]:
        """Return one response per `EnvRet`, in order; several instances answer side by side."""
        if self._only_one_here is not None:
            self._random_stream.hand_to(self._policies[0])
            return self._only_one_here.answer(env_rets, deterministic=deterministic)
        self._take_back()
        responses: list[Any] = [None] * len(env_rets)
        waiting = [
            (part, self._begin(part, env_rets, deterministic)) for part in self._parts(env_rets)
        ]
        while waiting:
            part, future = waiting.pop(0)
            try:
                answers = future.result()
            except WorkerLostError as error:
                self._replace(part[0], error)
                again = self._parts([env_rets[position] for position in part[1]])
                for index, chosen in again:
                    moved = (index, [part[1][position] for position in chosen])
                    waiting.append((moved, self._begin(moved, env_rets, deterministic)))
                continue
            for position, answer in zip(part[1], answers, strict=True):
                responses[position] = answer
        return responses

    def postprocess(
        self, env_rets: Sequence[EnvRet], responses: Sequence[PolicyResponse]
    ) -> list[PolicyResponse]:
        """Run the policy's `postprocess` on each pair, where the response came from."""
        processed: list[Any] = [None] * len(responses)
        for index, positions in self._parts(env_rets):
            policy = self._policies[index]
            self._random_stream.hand_to(policy)
            pairs = [(env_rets[position], responses[position]) for position in positions]
            if isinstance(policy, PolicyProxy):
                results = policy.postprocess_each(*map(list, zip(*pairs, strict=True)))
            else:
                results = [policy._postprocess(*pair) for pair in pairs]
            for position, result in zip(positions, results, strict=True):
                processed[position] = result
        return processed

    def _parts(self, env_rets: Sequence[EnvRet]) -> list[Part]:
        if len(self._policies) == 1:
            return [(0, list(range(len(env_rets))))]
        owners = self._router.assign({item.env_id: rows_of(item) or 1 for item in env_rets})
        parts: dict[int, list[int]] = {}
        for position, item in enumerate(env_rets):
            parts.setdefault(owners[item.env_id], []).append(position)
        return list(parts.items())

    def _begin(self, part: Part, env_rets: Sequence[EnvRet], deterministic: bool) -> Future:  # noqa: FBT001  # as `answer`
        index, positions = part
        mine = [env_rets[position] for position in positions]
        answerer = self._answerers[index]
        self._random_stream.hand_to(self._policies[index])
        if isinstance(answerer, PolicyProxy):
            return answerer.begin_answer(mine, deterministic=deterministic)
        return Done(answerer.answer(mine, deterministic=deterministic))

    # ---- what they remember --------------------------------------------------------------------

    def memories(self) -> list[dict[str, Any]]:
        """Return what each instance remembers of the episodes under way; a dead one, nothing."""
        return [self._remembered(index) for index in range(len(self._policies))]

    def _remembered(self, index: int) -> dict[str, Any]:
        if index in self._restarts:
            return {}
        try:
            memory: dict[str, Any] = self._policies[index].episode_memory()
        except WorkerLostError as error:
            self._replace(index, error)
            return {}
        return memory

    def load_memories(self, memories: Sequence[dict[str, Any]]) -> None:
        """Replace what each instance remembers; a dead one has forgotten."""
        for index, memory in enumerate(memories[: len(self._policies)]):
            if index in self._restarts:
                continue
            try:
                self._policies[index].load_episode_memory(memory)
            except WorkerLostError as error:
                self._replace(index, error)

    def share_memories(self, env_rets: Sequence[EnvRet], entries: Sequence[Any]) -> None:
        """Let each instance remember of the environments that it will answer, and nothing else.

        Args:
            env_rets: the environments' last rows.
            entries: what is remembered of each, None where nothing; may be empty.
        """
        memories: list[dict[str, Any]] = [{} for _ in self._policies]
        for index, positions in self._parts(env_rets) if entries else ():
            for position in positions:
                if entries[position] is not None:
                    memories[index][env_rets[position].env_id] = entries[position]
        self.load_memories(memories)

    # ---- weights -------------------------------------------------------------------------------

    @property
    def oldest_weights(self) -> int:
        """The oldest version that an instance has, those that are being started again aside."""
        alive = [item for i, item in enumerate(self._policies) if i not in self._restarts]
        return min((policy.weights_version for policy in alive), default=-1)

    def import_weights(self, version: int, payload: dict[str, Any] | None) -> None:
        """Load weights into every instance that has older ones.

        Args:
            version: of the weights.
            payload: the weights; None for what instances elsewhere were given to share.
        """
        self._weights = (version, payload)
        begun: list[tuple[int, Future]] = []
        for index, policy in enumerate(self._policies):
            if index in self._restarts or policy.weights_version >= version:
                continue
            if isinstance(policy, PolicyProxy):
                begun.append((index, policy.begin_import(version, payload)))
            else:
                policy.import_weights(version, payload)
        for index, future in begun:
            try:
                future.result()
            except WorkerLostError as error:
                self._replace(index, error)

    def rest(self) -> None:
        """Let instances that live elsewhere leave their device until they are asked again."""
        begun = [
            (index, policy.begin_rest())
            for index, policy in enumerate(self._policies)
            if isinstance(policy, PolicyProxy) and index not in self._restarts
        ]
        for index, future in begun:
            try:
                future.result()
            except WorkerLostError as error:
                self._replace(index, error)

    # ---- deaths --------------------------------------------------------------------------------

    def _replace(self, index: int, error: WorkerLostError) -> None:
        """Start an instance again: aside, where another one is alive, and else at once."""
        self.lost += 1
        self._router.mark_dead(index)
        if self._router.alive:
            policy = self._policies[index]
            self._restarts[index] = Restart(policy.worker, lambda: policy.restore(error))
            return
        self._policies[index].restore(error)
        self._router.mark_alive(index)

    def _take_back(self) -> None:
        """Let instances that have been started again answer."""
        for index, restart in list(self._restarts.items()):
            if not restart.is_done:
                continue
            del self._restarts[index]
            restart.finish()
            if self._weights is not None:
                self._policies[index].import_weights(*self._weights)
            self._router.mark_alive(index)

    def close(self) -> None:
        """End what is being started again."""
        for restart in self._restarts.values():
            restart.abandon()
        self._restarts.clear()
