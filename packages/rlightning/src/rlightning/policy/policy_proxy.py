"""`PolicyProxy`: a policy that lives elsewhere, with the surface that `PolicyGroup` uses.

An EVAL worker that dies is started again with the newest weights; a TRAIN worker is not, for what
it has learned since the last checkpoint is gone with it.
"""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from rlightning.errors import ConfigError, WorkerLostError
from rlightning.policy.policy_worker import PolicyWorker
from rlightning.runtime.base import Done
from rlightning.runtime.group import gather
from rlightning.runtime.proxy import Proxy
from rlightning.runtime.supervision import Supervised

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rlightning.config import PolicyConfig
    from rlightning.policy.base_policy import BasePolicy
    from rlightning.runtime.base import Future, Handle
    from rlightning.runtime.turns import Turns
    from rlightning.types import EnvMeta, EnvRet, PolicyResponse, PolicyRole

__all__ = ["PolicyProxy", "join_ranks"]


class PolicyProxy(Proxy):
    """A policy elsewhere.

    Args:
        kind: its class.
        config: the ``policy`` section.
        role: TRAIN or EVAL.
        spawn: starts a worker: gets `PolicyWorker` and its arguments.
        timeout_s: longest wait for what TRAIN workers exchange.
        make_offload: moves the policy's memory to the host between its turns; see `PolicyWorker`.
    """

    def __init__(
        self,
        kind: type[BasePolicy],
        config: PolicyConfig,
        role: PolicyRole,
        spawn: Callable[[Callable[..., Any], tuple[Any, ...]], Handle],
        *,
        timeout_s: float = 120.0,
        make_offload: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        args = (kind, config, config.train_config, role, make_offload)
        super().__init__(kind, spawn(PolicyWorker, args))
        self.config = config
        self.timeout_s = timeout_s
        self.role_type = role
        self.rollout_mode = config.rollout_mode
        self.weights_version = -1
        self.timing_raw: dict[str, dict[str, float]] = {}
        self.turns: Turns | None = None
        """While the worker and an environment's take turns, what they have done."""
        self._init_args: tuple[Any, Any] = (None, None)
        self._weights: tuple[int, dict[str, Any] | None] | None = None
        self._published: Any = None
        self._shares_memory = False

    @property
    def address(self) -> str:
        """Which machine the worker is on."""
        return self._handle.address

    @property
    def policy_class(self) -> type[Any]:
        """The class of the policy."""
        return self._kind

    def _read(self, name: str) -> Any:
        return self._call("__getattr__", name)  # of the policy in the worker

    def is_ready(self) -> bool:
        """Wait until the worker has started."""
        return bool(self._call("is_ready"))

    def is_initialized(self) -> bool:
        """Return whether `init_eval` or `init_train` has run."""
        return bool(self._call("is_initialized"))

    # ---- both roles ----------------------------------------------------------------------------

    def import_weights(self, version: int, payload: dict[str, Any] | None) -> None:
        """Load exported weights."""
        self.begin_import(version, payload).result()

    def begin_import(self, version: int, payload: dict[str, Any] | None) -> Future:
        """Begin `import_weights`; without a payload, of what `share_weights` was given."""
        self._weights = (version, payload)
        self.weights_version = version
        return self._begin_import(self._handle)

    def _begin_import(self, handle: Handle) -> Future:
        assert self._weights is not None
        version, payload = self._weights
        if payload is not None:
            return handle.call("import_weights", version, payload)
        if self._shares_memory:
            return handle.call("load_published")
        return handle.call("import_packed", *self._published.pack())

    def share_weights(self, published: Any) -> bool:
        """Let the worker open weights in shared memory; return whether they are on its machine."""
        self._published = published
        self._shares_memory = bool(self._call("open_weights", published.address))
        return self._shares_memory

    def save_checkpoint(self, path: str) -> None:
        """Write what the policy's `save_checkpoint` writes, on this machine."""
        target = pathlib.Path(path)
        for name, content in self._call("checkpoint_files", target.name).items():
            file = target.parent / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)

    def get_rng_state(self) -> dict[str, Any]:
        """Return the state of the worker's global random generators."""
        state: dict[str, Any] = self._call("get_rng_state")
        return state

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_rng_state` returned."""
        self._call("set_rng_state", state)

    def reseed(self, seed: int) -> None:
        """Seed the worker's global random generators."""
        self._call("reseed", seed)

    def begin_rest(self) -> Future:
        """Begin to leave the device to others, until the next call."""
        return self.begin("rest")

    # ---- TRAIN ---------------------------------------------------------------------------------

    def set_dump_dir(self, path: pathlib.Path) -> None:
        """Say where to save what is found not to be finite."""
        self._call("set_dump_dir", str(path))

    # ---- EVAL ----------------------------------------------------------------------------------

    def init_eval(self, eval_config: Any = None, env_meta: EnvMeta | None = None) -> None:
        """Build the network for acting."""
        self._init_args = (eval_config, env_meta)
        self._call("init_eval", eval_config, env_meta=env_meta)

    def begin_answer(self, env_rets: Sequence[EnvRet], *, deterministic: bool) -> Future:
        """Begin to act on `env_rets`; the answer is one response each."""
        answer = None if self.turns is None else self.turns.take_answer()
        if answer is not None:
            return Done([answer])
        return self.begin("answer", list(env_rets), deterministic)

    def postprocess_each(
        self, env_rets: Sequence[EnvRet], responses: Sequence[PolicyResponse]
    ) -> list[PolicyResponse]:
        """Run the policy's `postprocess` on each pair."""
        result: list[PolicyResponse] = self._call(
            "postprocess_each", list(env_rets), list(responses)
        )
        return result

    def restore(self, error: WorkerLostError) -> None:
        """Replace the worker, which is lost, by one with the same weights.

        Raises:
            WorkerLostError: too many have died, or it is a TRAIN worker.
        """
        if not isinstance(self._handle, Supervised):
            raise error
        self._handle.restore(error, self._prepare)

    def _prepare(self, handle: Handle) -> None:
        eval_config, env_meta = self._init_args
        handle.call("init_eval", eval_config, env_meta=env_meta).result()
        if self._published is not None:
            address = self._published.address
            self._shares_memory = bool(handle.call("open_weights", address).result())
        if self._weights is not None:
            self._begin_import(handle).result()

    def close(self) -> None:
        """End the worker."""
        self._handle.stop()


def join_ranks(policies: Sequence[Any]) -> None:
    """Let TRAIN workers learn together, data-parallel; before they build their networks.

    Raises:
        ConfigError: they do not all live elsewhere.
    """
    if not all(isinstance(policy, PolicyProxy) for policy in policies):
        raise ConfigError(
            f"{len(policies)} train workers learn together only where each has its own process: "
            "set cluster.remote_train: true"
        )
    workers = [policy.worker for policy in policies]
    for policy in policies:
        policy.is_ready()
    here = len({worker.address for worker in workers}) == 1
    host = "127.0.0.1" if here else workers[0].address
    address = workers[0].call("rank_address", host).result()
    gather(
        [
            policy.begin("join_ranks", rank, len(policies), address, policy.timeout_s)
            for rank, policy in enumerate(policies)
        ]
    )
