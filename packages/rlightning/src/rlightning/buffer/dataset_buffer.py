"""`DatasetBuffer`: a replay buffer that starts with recorded episodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from rlightning.buffer.replay_buffer import ReplayBuffer
from rlightning.datasets import Fit, open_dataset
from rlightning.errors import ConfigError
from rlightning.utils.logger import get_logger
from rlightning.utils.registry import BUFFERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rlightning.types import EnvMeta

__all__ = ["DatasetBuffer"]

_log = get_logger("buffer")


@BUFFERS.register("DatasetBuffer")
class DatasetBuffer(ReplayBuffer):
    """A `ReplayBuffer` with the transitions of a dataset in it, read one episode at a time.

    With ``memmap_dir`` they are kept in files, so a dataset may be larger than memory. Checkpoints
    hold no contents unless asked to: the dataset is read again.

    Raises:
        ConfigError: there is no dataset, it does not fit the environment, or the buffer is too
            small for it.
    """

    class Extras(ReplayBuffer.Extras):
        """Keys of the ``buffer`` section that only this class reads."""

        dataset: str | None = None
        """Folder of the dataset, in the layout of Minari or LeRobot."""
        dataset_kind: Literal["auto", "minari", "lerobot"] = "auto"
        """Which layout; ``auto`` looks."""
        min_size: int | None = Field(default=1, ge=1)
        """Transitions that there must be before the first batch, which may be larger."""

    def _prepare(self, metas: Sequence[EnvMeta]) -> None:
        """Make the ring, and read the dataset into it."""
        super()._prepare(metas)
        if self.options.dataset is None:
            raise ConfigError("buffer.dataset is not set; give the folder of a dataset")
        dataset = open_dataset(self.options.dataset, self.options.dataset_kind)
        if dataset.n_steps > self.config.capacity:
            raise ConfigError(
                f"buffer.capacity is {self.config.capacity}; {dataset} needs {dataset.n_steps}"
            )
        for episode in Fit(dataset, metas[0].observation_space, metas[0].action_space):
            rows: dict[str, Any] = episode.transitions()
            if len(rows["action"]):
                self.add_episode(rows)
        if self.size() == 0:
            raise ConfigError(f"{dataset} holds no transition whose outcome is known")
        _log.info("%s: %d transitions", dataset, self.size())
