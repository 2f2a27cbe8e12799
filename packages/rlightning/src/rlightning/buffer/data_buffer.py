"""`DataBuffer`: takes rows of environment workers, gives batches of transitions.

A buffer is segments (rows being collected), storage (finished transitions) and a sampler. It knows
nothing about policies or environments beyond the values they exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from rlightning.buffer.columns import Path, nest
from rlightning.buffer.sampler import make_sampler
from rlightning.buffer.segment import Segment
from rlightning.config import Config
from rlightning.errors import ContractError, UnknownNameError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlightning.config import BufferConfig
    from rlightning.types import BatchedData, EnvMeta, EnvRet, PolicyResponse

__all__ = ["DataBuffer"]


class DataBuffer(ABC):
    """Base of all buffers.

    Args:
        config: the ``buffer`` section.
        seed: seeds the sampler; by default drawn from numpy's global generator.
    """

    default_sampler = "uniform"
    """The sampler where the configuration names none."""

    class Extras(Config):
        """Further keys of the ``buffer`` section that this class reads, with their defaults."""

    def __init__(self, config: BufferConfig, *, seed: int | None = None) -> None:
        self.config = config
        if seed is None:  # the global generator, which the run's seed has seeded
            seed = int(np.random.randint(2**31))
        kind = config.sampler.type if config.sampler else self.default_sampler
        self.sampler = make_sampler(kind, seed=seed)
        self._segments: dict[str, Segment] = {}

    # ---- what subclasses implement -------------------------------------------------------------

    @abstractmethod
    def _store(self, rows: dict[Path, torch.Tensor]) -> None:
        """Keep finished transitions: flat ``[rows, ...]`` tensors."""

    @abstractmethod
    def _gather(self, indices: np.ndarray[Any, Any] | None) -> dict[Path, torch.Tensor]:
        """Return the transitions at `indices`, or all where None."""

    @abstractmethod
    def size(self) -> int:
        """Return how many transitions the buffer holds."""

    @abstractmethod
    def clear(self) -> None:
        """Drop all transitions and unfinished segments."""

    def _derive(self, transitions: dict[Path, torch.Tensor]) -> dict[Path, torch.Tensor]:
        """Return further time-major ``[T, N, ...]`` fields computed from a finished segment."""
        del transitions
        return {}

    # ---- collecting ----------------------------------------------------------------------------

    def init(self, env_meta_list: Sequence[EnvMeta], env_ids: Sequence[str] | None = None) -> None:
        """Prepare for the environment workers that will add rows.

        Args:
            env_meta_list: one per worker.
            env_ids: their ids; by default those in the metas.
        """
        ids = env_ids or [str(meta.env_id) for meta in env_meta_list]
        device = self.config.storage.device
        self._segments = {
            env_id: Segment(meta, device=device)
            for env_id, meta in zip(ids, env_meta_list, strict=True)
        }

    def __len__(self) -> int:
        return self.size()

    def can_insert(self, rows: int) -> bool:
        """Return whether `rows` more transitions may be collected now."""
        del rows
        return True

    def can_sample(self, batch_size: int) -> bool:
        """Return whether a batch of `batch_size` rows may be taken now."""
        return self.size() >= batch_size

    def add_transition(
        self,
        env_id: str,
        env_ret: EnvRet,
        policy_resp: PolicyResponse,
        truncated: bool = False,  # noqa: FBT001, FBT002  # the documented signature
        is_eval: bool = False,  # noqa: FBT001, FBT002  # the documented signature
    ) -> None:
        """Append one row of a worker.

        Args:
            env_id: the worker.
            env_ret: what it returned.
            policy_resp: what the policy answered.
            truncated: whether collection stops here: the row is the last of its segment.
            is_eval: rows of evaluation are not stored.

        Raises:
            KeyError: `init` was not told of the worker.
        """
        if is_eval:
            return
        if env_id not in self._segments:
            raise UnknownNameError(env_id, kind="buffer's environment", known=self._segments)
        self._segments[env_id].add(env_ret, policy_resp)
        if truncated:
            self.truncate_one_episode(env_id)

    def add_batched_transition(
        self,
        batched_env_ret: BatchedData[EnvRet],
        batched_policy_resp: BatchedData[PolicyResponse],
        truncations: Sequence[bool] | None = None,
        *,
        is_eval: bool = False,
    ) -> DataBuffer:
        """Append one row of each worker; see `add_transition`.

        Raises:
            ValueError: ids or lengths do not match.
            TypeError: `truncations` is not a list.
        """
        if batched_env_ret.ids() != batched_policy_resp.ids():
            raise ContractError(
                f"observations of {batched_env_ret.ids()} and responses to "
                f"{batched_policy_resp.ids()} do not match"
            )
        if truncations is None:
            truncations = [False] * len(batched_env_ret)
        if not isinstance(truncations, (list, tuple)):
            raise TypeError(f"truncations is a {type(truncations).__name__}; expected a list")
        if len(truncations) != len(batched_env_ret):
            raise ContractError(f"{len(truncations)} truncations for {len(batched_env_ret)} rows")
        for (env_id, env_ret), response, truncated in zip(
            batched_env_ret, batched_policy_resp.values(), truncations, strict=True
        ):
            self.add_transition(env_id, env_ret, response, truncated, is_eval)
        return self

    def truncate_one_episode(self, env: Any) -> None:
        """End the segment of a worker (an id, or an object with one) and keep its transitions."""
        env_id = env if isinstance(env, str) else getattr(env, "env_id", None)
        if env_id is None:
            raise TypeError(f"expected an environment id, found a {type(env).__name__}")
        segment = self._segments[env_id]
        if len(segment) == 0:
            return
        transitions = segment.take()
        derived = self._derive(transitions)
        rows = {
            path: _flatten_env_major(tensor)
            for path, tensor in (transitions | derived).items()
            if path[0] != "_next"
        }
        self._store(rows)

    def truncate_episodes(self, envs: Sequence[Any]) -> None:
        """End the segments of several workers."""
        for env in envs:
            self.truncate_one_episode(env)

    # ---- sampling ------------------------------------------------------------------------------

    def get(self, indices: int | Sequence[int]) -> TensorDict:
        """Return the transitions at `indices`; negative ones count from the end.

        Raises:
            IndexError: there is no such transition.
        """
        size = self.size()
        wanted = np.atleast_1d(np.asarray(indices, dtype=np.int64))
        if ((wanted < -size) | (wanted >= size)).any():
            raise IndexError(f"index {indices} is out of range for {size} transitions")
        batch = _batch(self._gather(np.where(wanted < 0, wanted + size, wanted)))
        return batch[0] if isinstance(indices, (int, np.integer)) else batch

    def __getitem__(self, index: int) -> TensorDict:
        return self.get(index)

    def get_all(self) -> TensorDict:
        """Return every transition.

        Raises:
            ValueError: there is none.
        """
        if self.size() == 0:
            raise ValueError("the buffer is empty; add transitions first")
        return _batch(self._gather(None))

    def sample(
        self,
        batch_size: int | None = None,
        shuffle: bool = True,  # noqa: FBT001, FBT002  # the documented signature
        drop_last: bool = True,  # noqa: FBT001, FBT002  # the documented signature
    ) -> list[TensorDict]:
        """Return one batch per train worker: a TensorDict of flat ``[rows, ...]`` tensors.

        Args:
            batch_size: rows wanted; None takes all there are.
            shuffle: whether their order is random.
            drop_last: for several train workers, drop what does not divide evenly.

        Raises:
            ValueError: there are not enough transitions.
        """
        del drop_last  # one train worker takes everything
        return [_batch(self._gather(self.sampler.sample(batch_size, self.size(), shuffle)))]

    # ---- checkpoints ---------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sampler, as plain data."""
        return {"sampler": self.sampler.generator.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.sampler.generator.bit_generator.state = state["sampler"]


def _flatten_env_major(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``[T, N, ...]`` as ``[N*T, ...]``, one environment's steps after the other's."""
    return tensor.transpose(0, 1).flatten(0, 1).clone(memory_format=torch.contiguous_format)


def _batch(columns: dict[Path, torch.Tensor]) -> TensorDict:
    rows = next(iter(columns.values())).shape[0]
    return TensorDict(nest(columns), batch_size=[rows])
