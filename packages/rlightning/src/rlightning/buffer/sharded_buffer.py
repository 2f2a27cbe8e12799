"""`ShardedBuffer`: several buffers addressed as one, each with the rows of its own environments.

A batch takes an equal share of every shard. Knows nothing about where the shards are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rlightning.errors import ConfigError, UnknownNameError
from rlightning.types import BatchedData

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensordict import TensorDict

    from rlightning.types import EnvMeta, EnvRet, PolicyResponse

__all__ = ["ShardedBuffer"]


class ShardedBuffer:
    """Several buffers of one kind.

    Args:
        shards: the buffers; each holds its share of the capacity.
        capacity: rows of all together.
    """

    def __init__(self, shards: Sequence[Any], *, capacity: int) -> None:
        self.shards = list(shards)
        self.capacity = capacity
        self._owner: dict[str, int] = {}

    @property
    def needs_bootstrap_response(self) -> bool:
        """Whether the last observation of a rollout must be added with a policy's answer to it."""
        return bool(self.shards[0].needs_bootstrap_response)

    def init(
        self,
        env_meta_list: Sequence[EnvMeta],
        env_ids: Sequence[str] | None = None,
        *,
        train_worker_num: int = 1,
    ) -> None:
        """Deal the environment workers out to the shards, in turn.

        Raises:
            ConfigError: there are more shards than environment workers.
        """
        metas = list(env_meta_list)
        ids = list(env_ids) if env_ids else [str(meta.env_id) for meta in metas]
        count = len(self.shards)
        if len(ids) < count:
            raise ConfigError(
                f"{count} storage workers for {len(ids)} environment workers: each stores the rows "
                "of its own environments. Lower cluster.buffer_worker_num, or raise env.num_workers"
            )
        self._owner = {env_id: position % count for position, env_id in enumerate(ids)}
        for index, shard in enumerate(self.shards):
            mine = slice(index, None, count)
            shard.init(metas[mine], ids[mine], train_worker_num=train_worker_num)

    # ---- collecting ----------------------------------------------------------------------------

    def add_batched_transition(
        self,
        batched_env_ret: BatchedData[EnvRet],
        batched_policy_resp: BatchedData[PolicyResponse],
        truncations: Sequence[bool] | None = None,
        *,
        is_eval: bool = False,
    ) -> ShardedBuffer:
        """Append one row of each worker, to its shard."""
        ids = batched_env_ret.ids()
        flags = list(truncations) if truncations is not None else [False] * len(ids)
        for index, shard in enumerate(self.shards):
            mine = [row for row, env_id in enumerate(ids) if self._shard_of(env_id) == index]
            if not mine:
                continue
            names = [ids[row] for row in mine]
            shard.add_batched_transition(
                BatchedData(names, [batched_env_ret.values()[row] for row in mine]),
                BatchedData(names, [batched_policy_resp.values()[row] for row in mine]),
                [flags[row] for row in mine],
                is_eval=is_eval,
            )
        return self

    def add_transition(self, env_id: str, *args: Any, **kwargs: Any) -> None:
        """Append one row of a worker, to its shard."""
        self.shards[self._shard_of(env_id)].add_transition(env_id, *args, **kwargs)

    def add_data_async(self, env_id: str, data: Any, truncated: bool = False) -> None:  # noqa: FBT001, FBT002  # the documented signature
        """Append half a row of a worker, to its shard."""
        self.shards[self._shard_of(env_id)].add_data_async(env_id, data, truncated)

    def add_episode(self, episode: Any, num_envs: int = 1) -> None:
        """Append finished transitions from elsewhere, to the shard with the fewest."""
        min(self.shards, key=lambda shard: int(shard.size())).add_episode(episode, num_envs)

    def finish_segments(self, batched_env_ret: BatchedData[EnvRet]) -> None:
        """Complete the last transitions of workers with what followed, and end their segments."""
        for env_id, env_ret in batched_env_ret:
            one = BatchedData([env_id], [env_ret])
            self.shards[self._shard_of(env_id)].finish_segments(one)

    def truncate_one_episode(self, env: Any) -> None:
        """End the segment of a worker and keep its transitions."""
        env_id = env if isinstance(env, str) else env.env_id
        self.shards[self._shard_of(env_id)].truncate_one_episode(env_id)

    def truncate_episodes(self, envs: Sequence[Any]) -> None:
        """End the segments of several workers."""
        for env in envs:
            self.truncate_one_episode(env)

    def _shard_of(self, env_id: str) -> int:
        if env_id not in self._owner:
            raise UnknownNameError(env_id, kind="buffer's environment", known=self._owner)
        return self._owner[env_id]

    # ---- sampling ------------------------------------------------------------------------------

    def size(self) -> int:
        """Return how many transitions all shards hold."""
        return sum(shard.size() for shard in self.shards)

    def __len__(self) -> int:
        return self.size()

    def pending_size(self) -> int:
        """Return how many further transitions the unfinished segments make so far."""
        return sum(shard.pending_size() for shard in self.shards)

    def can_insert(self, rows: int) -> bool:
        """Return whether `rows` more transitions may be collected now."""
        shares = self._shares(rows)
        return all(
            shard.can_insert(share) for shard, share in zip(self.shards, shares, strict=True)
        )

    def can_sample(self, batch_size: int) -> bool:
        """Return whether a batch of `batch_size` rows may be taken now."""
        shares = self._shares(batch_size)
        return all(
            shard.can_sample(share) for shard, share in zip(self.shards, shares, strict=True)
        )

    def has_batch(self, batch_size: int) -> bool:
        """Return whether a learner that takes turns with collecting should learn now."""
        shares = self._shares(batch_size)
        return all(shard.has_batch(share) for shard, share in zip(self.shards, shares, strict=True))

    def sample(
        self,
        batch_size: int | None = None,
        shuffle: bool = True,  # noqa: FBT001, FBT002  # the documented signature
        drop_last: bool = True,  # noqa: FBT001, FBT002  # the documented signature
    ) -> list[TensorDict]:
        """Return one batch per train worker, with an equal share of every shard."""
        shares: list[int | None] = [None] * len(self.shards)
        if batch_size is not None:
            shares = list(self._shares(batch_size))
        parts = [
            shard.sample(share, shuffle, drop_last)
            for shard, share in zip(self.shards, shares, strict=True)
        ]
        return [torch.cat(list(batches)) for batches in zip(*parts, strict=True)]  # type: ignore[misc]  # of TensorDicts

    def get_all(self) -> TensorDict:
        """Return every transition, one shard's after the other's."""
        return torch.cat([shard.get_all() for shard in self.shards])  # type: ignore[return-value]  # of TensorDicts

    def __getitem__(self, index: int) -> TensorDict:
        batch: TensorDict = self.get_all()[index]
        return batch

    def _shares(self, rows: int) -> list[int]:
        share, rest = divmod(rows, len(self.shards))
        return [share + (index < rest) for index in range(len(self.shards))]

    # ---- the rest ------------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop all transitions and unfinished segments."""
        for shard in self.shards:
            shard.clear()

    def state_dict(self, *, include_data: bool | None = None) -> dict[str, Any]:
        """Return the state of every shard."""
        return {"shards": [shard.state_dict(include_data=include_data) for shard in self.shards]}

    def load_state_dict(self, state: dict[str, Any], *, continue_episodes: bool = False) -> None:
        """Restore what `state_dict` of as many shards returned.

        Raises:
            ConfigError: there are more shards, or fewer.
        """
        states = state.get("shards", [state])
        if len(states) != len(self.shards):
            raise ConfigError(
                f"the checkpoint is of {len(states)} storage workers; there are "
                f"{len(self.shards)}. Set cluster.buffer_worker_num: {len(states)}"
            )
        for shard, part in zip(self.shards, states, strict=True):
            shard.load_state_dict(part, continue_episodes=continue_episodes)
