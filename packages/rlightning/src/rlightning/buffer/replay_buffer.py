"""`ReplayBuffer`: the off-policy buffer. Transitions stay until they are overwritten."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import Field
from tensordict import TensorDict

from rlightning.buffer.amounts import refuse_too_few
from rlightning.buffer.columns import as_array, as_numpy, nest
from rlightning.buffer.data_buffer import DataBuffer
from rlightning.buffer.limiter import RateLimiter
from rlightning.buffer.pipeline import refuse_taken
from rlightning.buffer.priorities import Priorities
from rlightning.buffer.ring import Ring, slot_numbers
from rlightning.buffer.stream import Stream
from rlightning.errors import ConfigError, ContractError, NonFiniteError
from rlightning.ops.returns import n_step_window
from rlightning.utils.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlightning.buffer.columns import Indices, Path
    from rlightning.types import BatchedData, EnvMeta, EnvRet, PolicyResponse

__all__ = ["ReplayBuffer"]

_log = get_logger("buffer")
_MOST_REDRAWS = 16


class ReplayBuffer(DataBuffer):
    """Keeps the newest transitions and samples from them again and again.

    A transition is complete as soon as the next row of its worker arrives: nothing waits for a
    truncation, and rows of the next rollout continue those of the last. A row whose `EnvRet` is
    added a second time only replaces the answer to it.

    Batches hold what on-policy batches hold, and where the configuration asks for it:

    - ``discount`` ``[rows]``, with ``n_step`` above 1: the factor of the bootstrap value,
      ``gamma ** steps``, zero after a termination; ``reward`` is then the discounted sum,
      ``next_observation`` what followed the last step, ``terminated`` and ``truncated`` that
      step's flags;
    - ``index`` and ``weight`` ``[rows]``, with ``prioritized``: the name of each transition for
      `update_priorities`, and its importance-sampling weight, at most 1;
    - ``mask`` ``[rows, L]`` bool, with ``sequence_length`` L: every field is ``[rows, L, ...]``, a
      transition and those after it in the same episode; where the mask is False, zeros.

    Where an environment says in ``info["executed_action"]`` what was really done, such as what a
    person did who took over, that is the action stored; of several environments
    ``_executed_action`` masks those that it is said of.

    `state_dict` and `load_state_dict` keep everything a resumed run needs.

    With ``storage.unit: episode`` or a `postprocess_fn` of the user's, transitions arrive by
    finished segments instead, as in the on-policy buffer.
    """

    default_sampler = "uniform"
    needs_bootstrap_response = False

    class Extras(DataBuffer.Extras):
        """Keys of the ``buffer`` section that only this class reads."""

        gamma: float = Field(default=0.99, ge=0, le=1)
        """Discount per environment step, for ``n_step`` above 1."""
        n_step: int = Field(default=1, ge=1)
        """Steps whose rewards are summed before bootstrapping."""
        sequence_length: int | None = Field(default=None, ge=1)
        """Length of sampled sequences; unset samples single transitions."""
        prioritized: bool = False
        """Sample in proportion to priorities (Schaul et al. 2016, arXiv:1511.05952)."""
        priority_exponent: float = Field(default=0.6, ge=0)
        """Alpha: 0 samples uniformly, 1 in proportion to the priorities."""
        importance_exponent: float = Field(default=0.4, ge=0, le=1)
        """Beta: how far the weights undo the bias of prioritised sampling; 1 does so fully."""
        priority_epsilon: float = Field(default=1e-6, gt=0)
        """Added to every priority, so that no transition is never sampled."""
        min_size: int | None = Field(default=None, ge=1)
        """Transitions (episodes where that is the unit) that there must be before the first batch;
        unset: as many as a batch has. A sampler that draws without replacement wants those
        anyway."""
        samples_per_insert: float | None = None
        """Sampled rows per inserted row that `can_sample` and `can_insert` hold to."""
        error_buffer: float | None = None
        """How many sampled rows that ratio may be off; see `RateLimiter`."""
        memmap_dir: str | None = None
        """Keep the rows in files of this new or empty folder instead of in memory."""

    def __init__(self, config: Any, *stages: Any, **more: Any) -> None:
        super().__init__(config, *stages, **more)
        options = self.options
        self.limiter = RateLimiter(
            min_size=options.min_size or 1,
            batch_counts=not self._repeats,
            samples_per_insert=options.samples_per_insert,
            error_buffer=options.error_buffer,
        )
        self.refused = 0
        """Rows that a full buffer with ``storage.mode: fixed`` did not take."""
        self._by_segment = config.storage.unit == "episode" or self._pipeline.by_row
        if self._by_segment:
            self.needs_bootstrap_response = True
        self._check_options()
        self._made = (
            ("index", "weight") * options.prioritized
            + ("discount",) * (options.n_step > 1)
            + ("mask",) * (options.sequence_length is not None)
        )
        self._streams: dict[str, Stream] = {}
        self._ring: Ring = Ring(1, pending=0, device="cpu")
        self._priorities: Priorities | None = None

    def _check_options(self) -> None:
        options, sampler = self.options, self.config.sampler
        one_by_one = {
            "n_step": options.n_step > 1,
            "sequence_length": options.sequence_length is not None,
            "prioritized": options.prioritized,
            "memmap_dir": options.memmap_dir is not None,
            "samples_per_insert": options.samples_per_insert is not None,
        }
        wrong = [name for name, asked in one_by_one.items() if asked]
        if self._by_segment and wrong:
            raise ConfigError(
                f"{', '.join(f'buffer.{name}' for name in wrong)}: these need transitions one by "
                "one; they do not go with storage.unit: episode or a postprocess_fn"
            )
        if options.sequence_length is not None and options.n_step > 1:
            raise ConfigError(
                "buffer.n_step sums the rewards of single transitions; it does not go with "
                "buffer.sequence_length"
            )
        if options.prioritized and sampler is not None and sampler.type != "uniform":
            raise ConfigError(
                "buffer.prioritized draws by priority; it does not go with buffer.sampler.type: "
                f"{sampler.type}. Leave the sampler out"
            )
        if (options.min_size or 0) > self.config.capacity:
            raise ConfigError(
                f"buffer.min_size is {options.min_size}: a buffer of capacity "
                f"{self.config.capacity} never holds that many transitions"
            )
        if options.error_buffer is not None and options.samples_per_insert is None:
            raise ConfigError(
                "buffer.error_buffer is how far buffer.samples_per_insert may be off, which is not "
                "set; set it, or leave error_buffer out"
            )
        if options.memmap_dir is not None and self.config.storage.device != "cpu":
            raise ConfigError("buffer.memmap_dir needs buffer.storage.device: cpu")

    @property
    def _repeats(self) -> bool:
        """Whether a batch may hold more rows than there are transitions."""
        return self.options.min_size is not None and self.sampler.replacement

    # ---- collecting ----------------------------------------------------------------------------

    def _prepare(self, metas: Sequence[EnvMeta]) -> None:
        """Make the ring.

        Raises:
            ConfigError: the capacity is smaller than one row of every environment.
        """
        if self._by_segment:
            return
        capacity, options = self.config.capacity, self.options
        rows = sum(self._rows.values())
        if rows > capacity:
            raise ConfigError(
                f"buffer.capacity is {capacity}, less than one row of each of the {rows} "
                "environments"
            )
        self._ring = Ring(
            capacity,
            pending=rows,
            device=self.config.storage.device,
            folder=_folder(options.memmap_dir),
        )
        self._streams = {
            env_id: Stream(meta, self._ring) for env_id, meta in zip(self._rows, metas, strict=True)
        }
        if options.prioritized:
            self._priorities = Priorities(
                self._ring.slots,
                exponent=options.priority_exponent,
                epsilon=options.priority_epsilon,
            )
            self._ring.on_drop = self._priorities.remove

    def add_worker(self, env_id: str, meta: EnvMeta) -> None:
        """Prepare for a worker that joins after `init`."""
        with self._lock:
            super().add_worker(env_id, meta)
            if not self._by_segment:
                self._streams[env_id] = Stream(meta, self._ring)

    def remove_worker(self, env_id: str) -> None:
        """Forget a worker, and what it left unfinished."""
        with self._lock:
            super().remove_worker(env_id)
            self._streams.pop(env_id, None)

    def size(self) -> int:
        """Return how many transitions the buffer holds; episodes where that is the unit."""
        return super().size() if self._by_segment else self._ring.count

    def _add_row(self, env_id: str, env_ret: EnvRet, response: PolicyResponse) -> None:
        if self._by_segment:
            super()._add_row(env_id, env_ret, response)
            return
        stream = self._streams[env_id]
        if self.config.storage.mode == "fixed" and not self._has_room(stream):
            return
        fields, info = self._pipeline.row(env_ret, response)
        refuse_taken(self._made, fields)
        finished = stream.add(env_ret, response, fields, info)
        if finished is not None:
            self.limiter.inserts += len(slot_numbers(finished))
            if self._priorities is not None:
                self._priorities.add(finished)

    def _has_room(self, stream: Stream) -> bool:
        if self._ring.count + stream.rows <= self._ring.capacity:
            return True
        if not self.refused:
            _log.warning(
                "the buffer is full at %d transitions and its storage.mode is fixed: further "
                "transitions are not stored",
                self._ring.count,
            )
        self.refused += stream.rows
        stream.reset()
        return False

    def _end_segment(self, env_id: str) -> None:
        if self._by_segment:
            super()._end_segment(env_id)
        else:
            self._streams[env_id].end()

    def _store_episodes(self, rows: dict[Path, torch.Tensor], count: int) -> None:
        if self._by_segment:
            super()._store_episodes(rows, count)
            return
        if not {("reward",), ("terminated",), ("truncated",)} <= rows.keys():
            raise ContractError(
                f"an episode needs reward, terminated, truncated, observation and "
                f"next_observation; found {sorted('.'.join(path) for path in rows)}"
            )
        length = len(rows["reward",]) // count
        for index in range(count):
            part = slice(index * length, (index + 1) * length)
            span = self._ring.append({path: tensor[part] for path, tensor in rows.items()})
            self.limiter.inserts += len(slot_numbers(span))
            if self._priorities is not None:
                self._priorities.add(span)

    def finish_segments(self, batched_env_ret: BatchedData[EnvRet]) -> None:
        """Complete the last transitions of workers with what followed, and end their segments.

        For an engine about to reset its environments, whose last observations nobody answered.
        """
        with self._lock:
            for env_id, env_ret in batched_env_ret:
                stream = self._streams.get(env_id)
                if stream is not None and stream.last_response is not None:
                    # The row is only read as the one after; its answer is never looked at.
                    self._add_row(env_id, env_ret, stream.last_response)
                self.truncate_one_episode(env_id)

    def clear(self) -> None:
        """Drop all transitions and waiting rows."""
        with self._lock:
            super().clear()
            self._ring.clear()
            for stream in self._streams.values():
                stream.reset()

    # ---- sampling ------------------------------------------------------------------------------

    def can_sample(self, batch_size: int) -> bool:
        """Return whether a learner should sample `batch_size` rows now; see `RateLimiter`.

        Raises:
            ConfigError: with such batches the learner and the environments would wait forever.
        """
        ready = self.limiter.can_sample(batch_size, size=self.size())
        if not ready and self._by_segment:
            self._refuse_if_never_enough(self.limiter.start)
        return ready

    def has_batch(self, batch_size: int) -> bool:
        """Return whether a learner should sample `batch_size` rows now; see `can_sample`."""
        return self.can_sample(batch_size)

    def can_insert(self, rows: int = 1) -> bool:
        """Return whether environments should add `rows` rows now; see `RateLimiter`."""
        return self.limiter.can_insert(rows)

    def _sample(
        self, batch_size: int | None, *, shuffle: bool, drop_last: bool
    ) -> list[TensorDict]:
        if self._by_segment:
            batches = super()._sample(batch_size, shuffle=shuffle, drop_last=drop_last)
            self.limiter.samples += sum(len(batch) for batch in batches)
            return batches
        self._refuse_if_empty()
        refuse_too_few(self._least(batch_size), self.size(), self._unit())
        slots = self._draw(batch_size, shuffle=shuffle)
        self.limiter.samples += len(slots)
        return [self._make_batch(part) for part in self._divide(slots, drop_last=drop_last)]

    def _least(self, batch_size: int | None) -> int | None:
        least: int | None = self.options.min_size
        return least if self._repeats else batch_size

    def _draw(self, batch_size: int | None, *, shuffle: bool) -> Indices:
        ring, sampler = self._ring, self.sampler
        if self._priorities is not None:
            return self._priorities.draw(batch_size or ring.count, sampler.generator)
        if not sampler.replacement:
            return ring.order()[sampler.sample(batch_size, ring.count, shuffle)]
        slots = ring.slot(sampler.sample(batch_size or ring.count, ring.written, shuffle))
        # Rows that are no transitions (yet) are few; drawing again keeps the others equally likely.
        for _ in range(_MOST_REDRAWS):
            wrong = np.flatnonzero(~ring.complete[slots])
            if not len(wrong):
                return slots
            slots[wrong] = ring.slot(sampler.sample(len(wrong), ring.written, shuffle))
        return ring.order()[sampler.sample(batch_size or ring.count, ring.count, shuffle)]

    def _make_batch(self, slots: Indices) -> TensorDict:
        options = self.options
        if options.sequence_length is not None:
            columns = self._sequences(slots, options.sequence_length)
        elif options.n_step > 1:
            columns = self._n_step(slots)
        else:
            columns = self._transitions(slots)
        if self._priorities is not None:
            names = slots + self._ring.slots * self._ring.generation[slots]
            columns["index",] = torch.from_numpy(names)
            columns["weight",] = self._priorities.weights(
                slots, count=self._ring.count, exponent=options.importance_exponent
            )
        return TensorDict(nest(columns), batch_size=[len(slots)])

    def _transitions(self, slots: Indices, last: Indices | None = None) -> dict[Path, torch.Tensor]:
        """Return the transitions at `slots`, with what followed the ones at `last`."""
        last = slots if last is None else last
        out = self._ring.next_observation(last)
        for path in self._ring.columns:
            ends = path[0] in ("terminated", "truncated")
            out[path] = self._ring.take(path, last if ends else slots)
        return out

    def _n_step(self, slots: Indices) -> dict[Path, torch.Tensor]:
        ring = self._ring
        if ("reward",) not in ring.columns:
            raise ContractError("buffer.n_step needs one reward per environment, not one per agent")
        steps = self.options.n_step
        chained, counts = ring.chain(slots, steps)
        cut = np.ones_like(counts)
        cut[:-1] = ~counts[1:]
        flat, shape = chained.reshape(-1), chained.shape
        window = n_step_window(
            ring.take(("reward",), flat).reshape(shape),
            ring.take(("terminated",), flat).reshape(shape),
            torch.from_numpy(cut).to(self.config.storage.device),
            gamma=self.options.gamma,
        )
        last = chained[as_numpy(window.length_B) - 1, np.arange(len(slots))]
        out = self._transitions(slots, last)
        out["reward",] = window.reward_B
        out["discount",] = window.discount_B
        return out

    def _sequences(self, slots: Indices, length: int) -> dict[Path, torch.Tensor]:
        chained, counts = self._ring.chain(slots, length)
        mask = torch.from_numpy(counts.T.copy())
        out: dict[Path, torch.Tensor] = {}
        for path, tensor in self._transitions(chained.T.reshape(-1)).items():
            rows = tensor.reshape(len(slots), length, *tensor.shape[1:])
            kept = mask.to(rows.device).reshape(*mask.shape, *(1,) * (rows.ndim - 2))
            out[path] = torch.where(kept, rows, torch.zeros_like(rows))
        out["mask",] = mask
        return out

    def _gather(self, indices: Indices | None) -> dict[Path, torch.Tensor]:
        if self._by_segment:
            return super()._gather(indices)
        slots = self._ring.order()
        return self._transitions(slots if indices is None else slots[indices])

    def update_priorities(self, indices: Any, priorities: Any) -> int:
        """Set how much a learner was surprised by sampled transitions.

        Args:
            indices: the batch's ``index``, ``[rows]``.
            priorities: ``[rows]``, for example the TD errors; their absolute value counts.

        Returns:
            How many were set; transitions that were overwritten since are left out.

        Raises:
            ContractError: the buffer is not prioritised, or the lengths differ.
            NonFiniteError: a priority is NaN or infinite.
        """
        if self._priorities is None:
            raise ContractError("the buffer is not prioritised; set buffer.prioritized: true")
        names = as_numpy(as_array(("index",), indices)).reshape(-1)
        values = np.abs(as_numpy(as_array(("priorities",), priorities)).astype(np.float64))
        values = values.reshape(-1)
        if len(names) != len(values):
            raise ContractError(f"{len(values)} priorities for {len(names)} transitions")
        if not np.isfinite(values).all():
            raise NonFiniteError("priority", source="update_priorities")
        with self._lock:
            generation, slots = np.divmod(names, self._ring.slots)
            fresh = self._ring.complete[slots] & (self._ring.generation[slots] == generation)
            self._priorities.update(slots[fresh], values[fresh])
        return int(np.count_nonzero(fresh))

    # ---- checkpoints ---------------------------------------------------------------------------

    def _form(self) -> str:
        by = ", by segments" if self._by_segment else ""
        return super()._form() + by

    def _contents(self) -> dict[str, Any]:
        return super()._contents() if self._by_segment else self._ring.state_dict()

    def _load_contents(self, contents: dict[str, Any]) -> None:
        if self._by_segment:
            super()._load_contents(contents)
        else:
            self._ring.load_state_dict(contents)

    def state_dict(self, *, include_data: bool | None = None) -> dict[str, Any]:
        """Return the state as plain data and tensors; see `DataBuffer.state_dict`.

        Contents include the rows that wait for the next ones, links, and priorities.
        """
        with self._lock:
            state = super().state_dict(include_data=include_data)
            state["limiter"] = self.limiter.state_dict()
            state["refused"] = self.refused
            if "contents" in state and not self._by_segment:
                # By position: environment ids are new in every run.
                state["waiting"] = [stream.state_dict() for stream in self._streams.values()]
                if self._priorities is not None:
                    state["priorities"] = self._priorities.state_dict(self._ring.slots)
            return state

    def load_state_dict(self, state: dict[str, Any], *, continue_episodes: bool = False) -> None:
        """Restore what `state_dict` returned; call it after `init`.

        Args:
            state: from a buffer of the same configuration.
            continue_episodes: whether the environments were restored too, so that the next row of
                each worker follows from its last one, or is it again where that one ended a
                segment. Otherwise the last row is dropped.

        Raises:
            ContractError: the contents are those of another capacity or other environments.
        """
        with self._lock:
            super().load_state_dict(state)
            (state,) = state.get("shards", [state])
            if "limiter" in state:  # of a replay
                self.limiter.load_state_dict(state["limiter"])
                self.refused = state["refused"]
            if "contents" not in state:
                if self.size() == 0:
                    _log.warning(
                        "the checkpoint holds no transitions: the buffer starts empty and fills "
                        "again before anything is learned. Set buffer.save_contents: true to keep "
                        "them"
                    )
                return
            if self._by_segment:
                return
            if len(state["waiting"]) != len(self._streams):
                raise ContractError(
                    f"the saved buffer has {len(state['waiting'])} environment workers and this "
                    f"one {len(self._streams)}"
                )
            for stream, waiting in zip(self._streams.values(), state["waiting"], strict=True):
                stream.reset()
                if continue_episodes:
                    stream.load_state_dict(waiting)
            if self._priorities is None:
                return
            if "priorities" in state:
                self._priorities.load_state_dict(state["priorities"])
            else:
                self._priorities.add(np.flatnonzero(self._ring.complete))


def _folder(path: str | None) -> pathlib.Path | None:
    """Return the folder for memory maps, made where it is missing.

    Raises:
        ConfigError: it holds something else.
    """
    if path is None:
        return None
    folder = pathlib.Path(path).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    foreign = [
        item.name for item in folder.iterdir() if not item.suffix.startswith((".column", ".final"))
    ]
    if foreign:
        raise ConfigError(
            f"buffer.memmap_dir {folder} holds other files ({', '.join(sorted(foreign)[:3])}); "
            "give a folder of its own"
        )
    return folder
