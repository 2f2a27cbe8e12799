"""`PriorReplayBuffer`: batches of which a fixed share comes from a dataset."""

from __future__ import annotations

import copy
import pathlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import Field

from rlightning.buffer.dataset_buffer import DatasetBuffer
from rlightning.buffer.replay_buffer import ReplayBuffer
from rlightning.datasets import open_dataset
from rlightning.errors import ConfigError, ContractError
from rlightning.utils.registry import BUFFERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensordict import TensorDict

    from rlightning.types import EnvMeta

__all__ = ["PriorReplayBuffer"]


@BUFFERS.register("PriorReplayBuffer")
class PriorReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` for what is collected, beside a dataset that stays as it is.

    The symmetric sampling of RLPD (Ball et al. 2023, arXiv:2302.02948): a batch holds
    ``prior_fraction`` rows of the dataset, evenly spread, so that consecutive minibatches hold as
    many each, give or take one row. Size, ``min_size`` and checkpoints speak of what was collected;
    the dataset is read again where a run resumes.

    Raises:
        ConfigError: as `DatasetBuffer`; or an option does not go with two sources.
    """

    class Extras(DatasetBuffer.Extras):
        """Keys of the ``buffer`` section that only this class reads."""

        prior_fraction: float = Field(default=0.5, gt=0, lt=1)
        """Share of the dataset in every batch."""
        min_size: int | None = Field(default=None, ge=1)
        """Collected transitions that there must be before the first batch; unset: as many as its
        collected share."""

    def _check_options(self) -> None:
        super()._check_options()
        options = self.options
        if options.prioritized or options.sequence_length is not None or self._by_segment:
            raise ConfigError(
                "PriorReplayBuffer mixes single transitions, all equally likely; it does not go "
                "with buffer.prioritized, buffer.sequence_length, storage.unit: episode or a "
                "postprocess_fn"
            )

    def _prepare(self, metas: Sequence[EnvMeta]) -> None:
        """Make the ring, and read the dataset."""
        super()._prepare(metas)
        options = self.options
        if options.dataset is None:
            raise ConfigError("buffer.dataset is not set; give the folder of a dataset")
        config: Any = copy.deepcopy(self.config)
        rows = sum(self._rows.values())
        config.capacity = max(rows, open_dataset(options.dataset, options.dataset_kind).n_steps)
        config.min_size, config.samples_per_insert, config.error_buffer = 1, None, None
        if options.memmap_dir is not None:
            folder = pathlib.Path(options.memmap_dir).expanduser()
            config.memmap_dir = str(folder.with_name(f"{folder.name}-prior"))
        seed = int(self.sampler.generator.integers(2**31))
        self.prior = DatasetBuffer(config, seed=seed)
        """The dataset."""
        self.prior.init(metas, list(self._rows), train_worker_num=self._train_workers)

    def can_sample(self, batch_size: int) -> bool:
        """Return whether a learner should sample; only the collected share must be there."""
        return super().can_sample(batch_size - self._share(batch_size))

    def _share(self, batch_size: int) -> int:
        return int(batch_size * self.options.prior_fraction)

    def _sample(
        self, batch_size: int | None, *, shuffle: bool, drop_last: bool
    ) -> list[TensorDict]:
        """Draw each share.

        Raises:
            ValueError: no batch size is given, or too little was collected.
            ContractError: the dataset lacks a field that was collected and cannot go without.
        """
        if batch_size is None:
            raise ValueError("mixing with a dataset needs a batch size; set train.batch_size")
        share = self._share(batch_size)
        collected = super()._sample(batch_size - share, shuffle=shuffle, drop_last=drop_last)
        if share == 0:
            return collected
        prior = self.prior.sample(share, shuffle, drop_last)
        return [_interleave(*pair) for pair in zip(collected, prior, strict=True)]

    def state_dict(self, *, include_data: bool | None = None) -> dict[str, Any]:
        """Return the state of what was collected, and of the draws from the dataset."""
        state = super().state_dict(include_data=include_data)
        state["prior"] = self.prior.state_dict(include_data=False)
        return state

    def load_state_dict(self, state: dict[str, Any], *, continue_episodes: bool = False) -> None:
        """Restore what `state_dict` returned."""
        own = {name: value for name, value in state.items() if name != "prior"}
        super().load_state_dict(own, continue_episodes=continue_episodes)
        if "prior" in state:  # else it is of a buffer without a dataset
            self.prior.load_state_dict(state["prior"])


def _interleave(collected: TensorDict, prior: TensorDict) -> TensorDict:
    """Return the rows of both, spread evenly, with the fields that both have."""
    if "steps" in collected.keys():  # noqa: SIM118  # iterating a TensorDict gives rows
        raise ContractError(
            "the environments take chunks of actions, and a dataset records single steps; set "
            "action_horizon to 1"
        )
    names = [name for name in collected.keys() if name in prior.keys()]  # noqa: SIM118  # as above
    missing = {"observation", "action", "reward", "terminated", "next_observation"} - set(names)
    if missing:
        raise ContractError(f"the fields {sorted(missing)} are not in dataset and rollouts both")
    n, m = len(collected), len(prior)
    # Row k is the dataset's where the count of its rows, k m / (n + m), passes a whole number.
    counts = np.arange(n + m + 1) * m // (n + m)
    from_prior = torch.from_numpy(np.diff(counts).astype(bool))
    order = torch.empty(n + m, dtype=torch.int64)
    order[~from_prior] = torch.arange(n)
    order[from_prior] = torch.arange(n, n + m)
    both: Any = torch.cat([collected.select(*names), prior.select(*names)])
    mixed: TensorDict = both[order]
    return mixed
