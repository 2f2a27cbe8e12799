"""`PolicyWorker`: a policy where it lives, with what its process does around it."""

from __future__ import annotations

import pathlib
import tempfile
from typing import TYPE_CHECKING, Any

import torch

from rlightning.policy.answering import Answerer
from rlightning.policy.state import find_stateful
from rlightning.runtime import process_group
from rlightning.utils.seeding import get_rng_state, seed_everything, set_rng_state

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rlightning.config import PolicyConfig
    from rlightning.policy.base_policy import BasePolicy
    from rlightning.types import EnvRet, PolicyResponse, PolicyRole

__all__ = ["PolicyWorker"]


class PolicyWorker:
    """Owns one policy; what is not defined here is the policy's own.

    Args:
        kind: the policy's class.
        config: the ``policy`` section.
        train_config: the ``train`` section, which policies read too.
        role: of the policy.
        make_offload: takes the policy and its optimizers, and returns what moves their memory to
            the host and back (`rlightning.weights.Offload`); None where they never move.
    """

    def __init__(
        self,
        kind: type[BasePolicy],
        config: PolicyConfig,
        train_config: Any,
        role: PolicyRole,
        make_offload: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        config.train_config = train_config
        self.policy = kind(config, role)
        self._answerer = Answerer(self.policy)
        self._make_offload = make_offload
        self._offload: Any = None
        self._weights: Any = None

    def __getattr__(self, name: str) -> Any:
        if name == "policy":
            raise AttributeError(name)
        self._wake()
        return getattr(self.policy, name)

    def rest(self) -> None:
        """Leave the device to others; the next call brings everything back."""
        if self._offload is None and self._make_offload is not None:
            held = find_stateful(self.policy).values()
            optimizers = [item for item in held if isinstance(item, torch.optim.Optimizer)]
            self._offload = self._make_offload(self.policy, optimizers)
        if self._offload is not None:
            self._offload.offload()

    def _wake(self) -> None:
        if self._offload is not None:
            self._offload.reload()

    def is_ready(self) -> bool:
        """Return True: who gets an answer has found a worker."""
        return True

    def answer(self, env_rets: Sequence[EnvRet], deterministic: bool) -> list[PolicyResponse]:  # noqa: FBT001  # a call between processes
        """Return one response per `EnvRet`, in order."""
        self._wake()
        return self._answerer.answer(env_rets, deterministic=deterministic)

    def postprocess_each(
        self, env_rets: Sequence[EnvRet], responses: Sequence[PolicyResponse]
    ) -> list[PolicyResponse]:
        """Run the policy's `postprocess` on each pair."""
        self._wake()
        pairs = zip(env_rets, responses, strict=True)
        return [self.policy._postprocess(env_ret, response) for env_ret, response in pairs]

    def open_weights(self, address: Any) -> bool:
        """Open weights in shared memory; return whether they are on this machine."""
        self._weights = address.open()
        return self._weights is not None

    def publish_weights(self, version: int, shard: int | None) -> None:
        """Publish the policy's weights there, or one part of them."""
        self._wake()
        if shard is None:
            self._weights.publish(version, self.policy.export_weights())
        else:
            self._weights.publish_shard(version, shard, self.policy.export_weights())

    def load_published(self) -> None:
        """Load the newest weights from there."""
        self._wake()
        with self._weights.read() as (version, payload):
            self.policy.import_weights(version, payload)

    def import_packed(self, version: int, packed: Any) -> None:
        """Load weights that were packed for the way from another machine."""
        self._wake()
        self.policy.import_weights(version, packed.unpack())

    def rank_address(self, host: str) -> str:
        """Return where others can meet this worker, which is at `host`, as their rank 0."""
        return process_group.free_address(host)

    def join_ranks(self, rank: int, world_size: int, address: str, timeout_s: float) -> None:
        """Learn together with other workers; before `init_train`."""
        self.policy.process_group = process_group.init(
            rank, world_size, address, timeout_s=timeout_s
        )

    def set_dump_dir(self, path: str) -> None:
        """Say where to save what is found not to be finite."""
        if self.policy._guard is not None:
            self.policy._guard.dump_dir = pathlib.Path(path)

    def checkpoint_files(self, name: str) -> dict[str, bytes]:
        """Return what the policy's `save_checkpoint` writes, by path beside `name`."""
        self._wake()
        with tempfile.TemporaryDirectory(prefix="rl-") as folder:
            root = pathlib.Path(folder)
            self.policy.save_checkpoint(str(root / name))
            return {
                str(path.relative_to(root)): path.read_bytes()
                for path in sorted(root.rglob("*"))
                if path.is_file()
            }

    def reseed(self, seed: int) -> None:
        """Seed this process's global random generators."""
        seed_everything(seed)

    def get_rng_state(self) -> dict[str, Any]:
        """Return the state of this process's global random generators."""
        return get_rng_state()

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_rng_state` returned."""
        set_rng_state(state)
