"""`DataBuffer`: takes rows of environment workers, gives batches of transitions.

A buffer is segments (rows being collected), a storage (finished transitions) and a sampler. It
knows nothing about policies or environments beyond the values they exchange.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from rlightning.buffer.amounts import (
    divide,
    refuse_never_enough,
    refuse_nothing,
    refuse_too_few,
)
from rlightning.buffer.columns import Path, nest
from rlightning.buffer.flattening import flat_columns, flatten_env_major
from rlightning.buffer.indexing import is_single, one_per_row, positions
from rlightning.buffer.pipeline import Pipeline
from rlightning.buffer.row_segment import RowSegment
from rlightning.buffer.sampler import make_sampler
from rlightning.buffer.segment import Segment
from rlightning.buffer.storage import Storage
from rlightning.buffer.utils.utils import align_episode
from rlightning.config import Config
from rlightning.errors import ConfigError, ContractError, UnknownNameError
from rlightning.types import EnvRet, PolicyResponse

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlightning.buffer.indexing import Index
    from rlightning.buffer.sampler import Indices
    from rlightning.config import BufferConfig
    from rlightning.types import BatchedData, EnvMeta

__all__ = ["DataBuffer"]


class DataBuffer:
    """Base of all buffers; on its own it keeps transitions until they are overwritten.

    Adding, sampling and clearing exclude each other, so threads may share a buffer.

    Args:
        config: the ``buffer`` section.
        obs_preprocessor: replaces the observation that is stored: a function of an observation, or
            a `Preprocessor` class.
        reward_preprocessor: replaces the reward that is stored: a function of a reward.
        env_ret_preprocess_fn: replaces ``default_env_ret_preprocess_fn``.
        policy_resp_preprocess_fn: replaces ``default_policy_resp_preprocess_fn``.
        preprocess_fn: replaces ``default_preprocess_fn``, and with it all of the above.
        postprocess_fn: replaces ``default_postprocess_fn``.
        seed: seeds the sampler.

    Raises:
        ConfigError: a stage is replaced together with the only one that would call it.
    """

    default_sampler = "uniform"
    """The sampler where the configuration names none."""
    keeps_sampled = True
    """Whether transitions stay after `sample`, which then copies them, to be sampled again."""
    needs_bootstrap_response = True
    """Whether the last observation of a rollout must be added with a policy's answer to it."""

    class Extras(Config):
        """Further keys of the ``buffer`` section that this class reads, with their defaults."""

        save_contents: bool = False
        """Whether checkpoints hold the transitions too, and a resumed run takes them over."""

    def __init__(  # the documented signature
        self,
        config: BufferConfig,
        obs_preprocessor: Any = None,
        reward_preprocessor: Any = None,
        env_ret_preprocess_fn: Any = None,
        policy_resp_preprocess_fn: Any = None,
        preprocess_fn: Any = None,
        postprocess_fn: Any = None,
        *,
        seed: int | None = None,
    ) -> None:
        self.config = config
        if seed is None:  # the global generator, which the run's seed has seeded
            seed = int(np.random.randint(2**31))
        self.options: Any = self.Extras.read(config)
        """The `Extras` in force: the configuration's values over the defaults."""
        self._pipeline = Pipeline(
            obs_preprocessor=obs_preprocessor,
            reward_preprocessor=reward_preprocessor,
            env_ret_preprocess_fn=env_ret_preprocess_fn,
            policy_resp_preprocess_fn=policy_resp_preprocess_fn,
            preprocess_fn=preprocess_fn,
            postprocess_fn=postprocess_fn,
        )
        self.sampler = make_sampler(
            config.sampler.type if config.sampler else self.default_sampler, seed=seed
        )
        self.storage = Storage(config.capacity, mode=config.storage.mode, unit=config.storage.unit)
        self._segments: dict[str, Segment | RowSegment] = {}
        self._rows: dict[str, int] = {}
        self._labels: dict[str, str] = {}  # what errors call the workers
        self._unanswered: dict[str, tuple[EnvRet, bool]] = {}
        self._train_workers = 1
        self._lock = threading.RLock()

    # ---- what subclasses may replace -----------------------------------------------------------

    def _derive(self, transitions: Mapping[Path, torch.Tensor]) -> dict[Path, torch.Tensor]:
        """Return further ``[T, N]`` fields, computed from a segment as `align` returns it."""
        del transitions
        return {}

    def _add_row(self, env_id: str, env_ret: EnvRet, response: PolicyResponse) -> None:
        """Take one row of a known worker."""
        segment = self._segments[env_id]
        fields, info = self._pipeline.row(env_ret, response)
        segment.add(fields, info, response.extras)
        if self.config.auto_truncate_episode:
            for env in segment.ended():
                self._push_env(segment, env)

    def _end_segment(self, env_id: str) -> None:
        """End a known worker's segment; its transitions become final."""
        segment = self._segments[env_id]
        if len(segment) == 0:
            return
        by_env = self.config.auto_truncate_episode or self.config.storage.unit == "episode"
        if by_env or segment.has_gaps:
            for env in range(self._rows[env_id]):
                self._push_env(segment, env)
            segment.reset()
        elif isinstance(segment, RowSegment):
            self._push_rows(segment.take(), self._rows[env_id])
        else:
            self._push(segment.take())

    def _prepare(self, metas: Sequence[EnvMeta]) -> None:
        """Make what a subclass keeps rows in; at the end of `init`."""

    def _gather(self, indices: Indices | None) -> dict[Path, torch.Tensor]:
        """Return the transitions at `indices`, or all where None."""
        return self.storage.gather(indices)

    # ---- collecting ----------------------------------------------------------------------------

    def init(
        self,
        env_meta_list: Sequence[EnvMeta] | None = None,
        env_ids: Sequence[str] | None = None,
        *,
        train_worker_num: int = 1,
    ) -> None:
        """Prepare for the environment workers that will add rows.

        Args:
            env_meta_list: one per worker.
            env_ids: their ids; by default those in the metas.
            train_worker_num: into how many batches `sample` divides what it picks.
        """
        metas = list(env_meta_list or [])
        ids = list(env_ids) if env_ids else [str(meta.env_id) for meta in metas]
        if len(ids) != len(metas):
            raise ContractError(f"{len(ids)} environment ids for {len(metas)} workers")
        if metas:
            self._pipeline.bind(metas[0])
        kind = RowSegment if self._pipeline.by_row else Segment
        device = self.config.storage.device
        if device == "cuda" and not torch.cuda.is_available():
            raise ConfigError(
                "buffer.storage.device is cuda, and torch finds no GPU here; set it to cpu"
            )
        self._segments = {
            env_id: kind(meta, device=device) for env_id, meta in zip(ids, metas, strict=True)
        }
        self._rows = {env_id: meta.num_envs or 1 for env_id, meta in zip(ids, metas, strict=True)}
        self._labels = {
            env_id: meta.label or env_id for env_id, meta in zip(ids, metas, strict=True)
        }
        self._unanswered = {}
        self._train_workers = train_worker_num
        self._prepare(metas)

    def add_worker(self, env_id: str, meta: EnvMeta) -> None:
        """Prepare for a worker that joins after `init`."""
        with self._lock:
            kind = RowSegment if self._pipeline.by_row else Segment
            self._segments[env_id] = kind(meta, device=self.config.storage.device)
            self._rows[env_id] = meta.num_envs or 1
            self._labels[env_id] = meta.label or env_id

    def remove_worker(self, env_id: str) -> None:
        """Forget a worker, and what it left unfinished."""
        with self._lock:
            self._segments.pop(env_id)
            self._rows.pop(env_id)
            self._labels.pop(env_id)
            self._unanswered.pop(env_id, None)

    def size(self) -> int:
        """Return how many transitions the buffer holds; episodes where that is the unit."""
        return len(self.storage)

    def can_insert(self, rows: int) -> bool:
        """Return whether `rows` more transitions may be collected now."""
        del rows
        return True

    def can_sample(self, batch_size: int) -> bool:
        """Return whether a batch of `batch_size` rows may be taken now.

        Raises:
            ConfigError: episodes are the unit, and the buffer is full with fewer.
        """
        self._refuse_if_never_enough(batch_size)
        return self.size() >= batch_size

    def has_batch(self, batch_size: int) -> bool:
        """Return whether a learner that takes turns with collecting should learn now.

        What is handed out whole, or once, is learned from whatever there is; else `can_sample`.
        """
        if self.keeps_sampled and not self.sampler.takes_all(batch_size):
            return self.can_sample(batch_size)
        return self.size() > 0

    def __len__(self) -> int:
        return self.size()

    def pending_size(self) -> int:
        """Return how many further transitions the unfinished segments make so far."""
        return sum(segment.pending for segment in self._segments.values())

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
            ContractError: a field is missing, not numeric, or changes its shape or dtype.
        """
        if is_eval:
            return
        with self._lock:
            if env_id not in self._segments:
                raise UnknownNameError(env_id, kind="buffer's environment", known=self._segments)
            try:
                self._add_row(env_id, env_ret, policy_resp)
                if truncated:
                    self._end_segment(env_id)
            except ContractError as error:
                raise ContractError(f"{self._labels[env_id]}: {error}") from error

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
        ids = batched_env_ret.ids()
        if ids != batched_policy_resp.ids():
            raise ContractError(
                f"observations of {ids} and responses to {batched_policy_resp.ids()} do not match"
            )
        flags = one_per_row(truncations, len(ids))
        for env_id, env_ret, response, truncated in zip(
            ids, batched_env_ret.values(), batched_policy_resp.values(), flags, strict=True
        ):
            self.add_transition(env_id, env_ret, response, truncated, is_eval)
        return self

    def add_data_async(
        self,
        env_id: str,
        data: EnvRet | PolicyResponse,
        truncated: bool = False,  # noqa: FBT001, FBT002  # the documented signature
    ) -> None:
        """Append half a row: first what the environment returned, later the policy's answer.

        Args:
            env_id: the worker.
            data: the `EnvRet`, or the `PolicyResponse` to the last one.
            truncated: with either half: the row is the last of its segment.

        Raises:
            ContractError: two `EnvRet` follow each other, or a response follows none.
        """
        with self._lock:
            if isinstance(data, EnvRet):
                if env_id in self._unanswered:
                    raise ContractError(
                        f"{self._labels.get(env_id, env_id)} returned twice without a response "
                        "in between; add the policy's response to the first before the second"
                    )
                self._unanswered[env_id] = (data, truncated)
                return
            if env_id not in self._unanswered:
                label = self._labels.get(env_id, env_id)
                raise ContractError(f"a response to {label}, which has returned nothing to answer")
            env_ret, ends = self._unanswered.pop(env_id)
            self.add_transition(env_id, env_ret, data, truncated or ends)

    def add_batched_data_async(
        self,
        batched_data: BatchedData[Any],
        truncations: Sequence[bool] | bool | None = None,  # noqa: FBT001  # the documented signature
    ) -> None:
        """Append half a row of each worker; see `add_data_async`."""
        count = len(batched_data)
        if isinstance(truncations, bool):
            truncations = [truncations] * count
        flags = one_per_row(truncations, count)
        for (env_id, data), truncated in zip(batched_data, flags, strict=True):
            self.add_data_async(env_id, data, truncated)

    def add_episode(self, episode: Any, num_envs: int = 1) -> None:
        """Append finished transitions from elsewhere, for example demonstrations.

        Args:
            episode: a mapping of ``[T, ...]`` arrays with the names that batches have, nested
                where observations are; or T+1 rows, one dictionary each, for `postprocess_fn`.
            num_envs: above 1, arrays are ``[T, N, ...]``.

        Raises:
            ContractError: lengths differ, or something is not numeric.
        """
        if isinstance(episode, (list, tuple)):
            names = episode[0].keys()
            listed = {name: [row[name] for row in episode] for name in names}
            episode = self._pipeline.postprocess_fn(listed)
        with self._lock:
            self._store_episodes(
                flat_columns(episode, num_envs, device=self.config.storage.device), num_envs
            )

    def truncate_one_episode(self, env: Any) -> None:
        """End the segment of a worker (an id, or an object with one) and keep its transitions.

        Raises:
            TypeError: it is neither.
            KeyError: `init` was not told of the worker.
        """
        env_id = env if isinstance(env, str) else getattr(env, "env_id", None)
        if not isinstance(env_id, str):
            raise TypeError(f"expected an environment id, found a {type(env).__name__}")
        if env_id not in self._segments:
            raise UnknownNameError(env_id, kind="buffer's environment", known=self._segments)
        with self._lock:
            self._end_segment(env_id)

    def truncate_episodes(self, envs: Sequence[Any]) -> None:
        """End the segments of several workers."""
        if not isinstance(envs, (list, tuple)):
            raise TypeError(f"expected a list of environment ids, found a {type(envs).__name__}")
        for env in envs:
            self.truncate_one_episode(env)

    def _push_env(self, segment: Segment | RowSegment, env: int) -> None:
        if isinstance(segment, Segment):
            for transitions in segment.take_env(env):
                self._push(transitions)
            return
        for episode in segment.take_env(env):
            self._push_rows(episode, 1)

    def _push(self, transitions: dict[Path, torch.Tensor]) -> None:
        """Store time-major ``[T, N, ...]`` transitions, one environment after the other."""
        transitions |= self._derive(transitions)
        self._store(
            {
                path: flatten_env_major(tensor)
                for path, tensor in transitions.items()
                if path[0] != "_next"
            }
        )

    def _push_rows(self, episode: dict[str, list[Any]], num_envs: int) -> None:
        """Store what the user's `postprocess_fn` makes of a segment's rows."""
        # First, because the function may change what it is given.
        names = ("last_reward", "last_terminated", "last_truncated", "value", "final_value")
        learned = {name: list(episode[name]) for name in names if name in episode}
        derived: dict[Path, torch.Tensor] = {}
        if len(learned) == len(names):
            derived = self._derive(align_episode(learned))
        result = flat_columns(self._pipeline.postprocess_fn(episode), num_envs)
        count = next(iter(result.values())).shape[0]
        for path, tensor in derived.items():
            flat = flatten_env_major(tensor) if num_envs > 1 else tensor
            if path not in result and flat.shape[0] == count:
                result[path] = flat
        self._store(result)

    def _store_episodes(self, rows: dict[Path, torch.Tensor], count: int) -> None:
        """Keep `count` finished episodes of one length, one after the other in flat columns."""
        if self.config.storage.unit == "transition":
            self._store(rows)
            return
        pieces = {path: tensor.chunk(count) for path, tensor in rows.items()}
        for index in range(count):
            self._store({path: parts[index] for path, parts in pieces.items()})

    def _store(self, rows: dict[Path, torch.Tensor]) -> None:
        """Keep finished transitions: flat ``[rows, ...]`` tensors."""
        self.storage.append(rows)

    # ---- sampling ------------------------------------------------------------------------------

    def get(self, indices: Index) -> TensorDict:
        """Return the transitions at `indices`, 0 the oldest; negative ones count from the newest.

        Args:
            indices: a number, which gives one transition (or one episode, where that is the
                unit); or a slice, a list or an array of numbers, or one of truth values for all.

        Raises:
            IndexError: there is no such transition.
            TypeError: `indices` is none of these.
        """
        with self._lock:
            wanted = positions(indices, self.size(), unit=self._unit())
            if len(wanted):
                batch = _batch(self._gather(wanted))
            else:
                self._refuse_if_empty()  # nobody knows the fields yet
                batch = _batch(self._gather(np.zeros(1, dtype=np.int64)))[:0]
        one = is_single(indices) and self.config.storage.unit == "transition"
        return batch[0] if one else batch

    def __getitem__(self, index: Index) -> TensorDict:
        """Return what `get` returns; a pair, such as ``buffer[0, 1]``, means nothing here."""
        if isinstance(index, tuple):
            raise TypeError(
                f"found the index {index}, but a buffer has one axis, its {self._unit()}, and one "
                f"storage; write buffer[i], or buffer[{list(index)}] for several"
            )
        return self.get(index)

    def get_all(self) -> TensorDict:
        """Return every transition, copied, the oldest first.

        Raises:
            ValueError: there is none.
        """
        with self._lock:
            self._refuse_if_empty()
            return _batch(self._gather(None)).clone()

    def sample(
        self,
        batch_size: int | None = None,
        shuffle: bool = True,  # noqa: FBT001, FBT002  # the documented signature
        drop_last: bool = True,  # noqa: FBT001, FBT002  # the documented signature
    ) -> list[TensorDict]:
        """Return one batch per train worker: a TensorDict of flat ``[rows, ...]`` tensors.

        Args:
            batch_size: rows wanted (episodes where that is the unit); None takes all there are.
            shuffle: whether their order is random; without, rows of one environment follow each
                other in time, one environment after the other.
            drop_last: for several train workers: drop what does not divide evenly, or else repeat
                the first rows.

        Raises:
            ValueError: the buffer is empty, or has not enough for a batch.
        """
        with self._lock:
            return self._sample(batch_size, shuffle=shuffle, drop_last=drop_last)

    def _sample(
        self, batch_size: int | None, *, shuffle: bool, drop_last: bool
    ) -> list[TensorDict]:
        """Do what `sample` says, with the lock held."""
        self._refuse_if_empty()
        size = self.size()
        takes_all = self.sampler.takes_all(batch_size)
        if not takes_all:
            refuse_too_few(self._least(batch_size), size, self._unit())
        if takes_all and not shuffle and self._train_workers == 1:
            batch = _batch(self._gather(None))
            return [batch.clone() if self.keeps_sampled else batch]
        indices = self.sampler.sample(batch_size, size, shuffle)
        return [_batch(self._gather(part)) for part in self._divide(indices, drop_last=drop_last)]

    def _divide(self, indices: Indices, *, drop_last: bool) -> list[Indices]:
        return divide(indices, self._train_workers, drop_last=drop_last)

    def _refuse_if_empty(self) -> None:
        if not self.size():
            refuse_nothing(self.pending_size())

    def _refuse_if_never_enough(self, wanted: int) -> None:
        if self.storage.is_full:
            capacity = self.config.capacity
            refuse_never_enough(wanted, self.size(), self._unit(), capacity=capacity)

    def _least(self, batch_size: int | None) -> int | None:
        """Return how many rows there must be for a batch of `batch_size`."""
        return batch_size

    def _unit(self) -> str:
        return f"{self.config.storage.unit}s"

    def clear(self) -> None:
        """Drop all transitions and unfinished segments."""
        with self._lock:
            self.storage.clear()
            self._unanswered = {}
            for segment in self._segments.values():
                segment.reset()

    # ---- checkpoints ---------------------------------------------------------------------------

    def _form(self) -> str:
        """Return which buffers can read each other's contents: those that say the same."""
        return f"{type(self).__name__} of {self._unit()}"

    def _contents(self) -> dict[str, Any]:
        return self.storage.state_dict()

    def _load_contents(self, contents: dict[str, Any]) -> None:
        self.storage.load_state_dict(contents)

    def state_dict(self, *, include_data: bool | None = None) -> dict[str, Any]:
        """Return the state as plain data and tensors.

        Args:
            include_data: whether the transitions are part of it; by default as the configuration's
                ``save_contents`` says. Unfinished segments never are.
        """
        with self._lock:
            state: dict[str, Any] = {"sampler": self.sampler.generator.bit_generator.state}
            if self.options.get("save_contents", False) if include_data is None else include_data:
                state["contents"] = self._contents()
                state["contents_of"] = self._form()
            return state

    def load_state_dict(self, state: dict[str, Any], *, continue_episodes: bool = False) -> None:
        """Restore what `state_dict` returned; without contents in it, the buffer keeps its own.

        Args:
            state: from a buffer of the same configuration.
            continue_episodes: whether the environments were restored too; for buffers that keep
                the rows of unfinished segments.

        Raises:
            ContractError: there are contents, and they are another kind of buffer's.
        """
        del continue_episodes  # no unfinished segment is saved here
        shards = state.get("shards", [state])
        if len(shards) > 1:
            raise ConfigError(
                f"the checkpoint is of {len(shards)} storage workers and this run has one; set "
                f"cluster.buffer_worker_num: {len(shards)}"
            )
        (state,) = shards
        form = self._form()
        saved_form = state.get("contents_of", form)
        if "contents" in state and saved_form != form:
            raise ContractError(
                f"the saved transitions are of a {saved_form}, and this run's buffer is a {form}"
            )
        with self._lock:
            self.sampler.generator.bit_generator.state = state["sampler"]
            if "contents" in state:
                self._load_contents(state["contents"])


def _batch(columns: dict[Path, torch.Tensor]) -> TensorDict:
    rows = next(iter(columns.values())).shape[0]
    return TensorDict(nest(columns), batch_size=[rows])
