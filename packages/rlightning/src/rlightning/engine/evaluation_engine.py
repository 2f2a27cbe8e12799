"""`EvaluationEngine`, ``eval``: load a checkpoint and measure it."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any

from rlightning.checkpoint import find_checkpoint, load_weights
from rlightning.config import Config
from rlightning.engine.base_engine import BaseEngine
from rlightning.errors import ConfigError, RLightningError, StopRequested
from rlightning.utils.logger import get_logger
from rlightning.utils.seeding import derive_seed

if TYPE_CHECKING:
    from rlightning.buffer import DataBuffer
    from rlightning.config import MainConfig
    from rlightning.env import EnvGroup
    from rlightning.policy import PolicyGroup

__all__ = ["EvaluationEngine"]

_log = get_logger("engine.eval")


class EvaluationEngine(BaseEngine):
    """Plays ``train.eval_episodes`` episodes with the weights of ``train.checkpoint``.

    Raises:
        ConfigError: ``train.checkpoint`` is not set.
        CheckpointError: it is not a checkpoint.
    """

    class TrainExtras(Config):
        """Keys of the ``train`` section that only this class reads."""

        checkpoint: str | None = None
        """A checkpoint, or a run directory for its newest."""

    def __init__(
        self,
        config: MainConfig,
        env_group: EnvGroup,
        policy_group: PolicyGroup,
        buffer: DataBuffer | None = None,
    ) -> None:
        super().__init__(config, env_group, policy_group, buffer)
        where = config.train.get("checkpoint")
        if where is None:
            raise ConfigError("engine: eval needs train.checkpoint, a checkpoint or run directory")
        self._seed = derive_seed(self.run_context.seed, "eval", "env")
        self._eval_group = env_group.for_evaluation()
        metas = self._eval_group.init(seed=self._seed)
        policy_group.init_eval(env_meta=metas[0])
        policy_group.load_weights(load_weights(find_checkpoint(pathlib.Path(where))))

    def run(self) -> None:
        """Evaluate once; a stop request ends it."""
        try:
            self._evaluate()
        except StopRequested:
            _log.warning("stopped before the evaluation was complete")
        finally:
            self._eval_group.close()
            self.close()

    def evaluate(self, obj_set: str = "train", prefix: str = "eval") -> dict[str, float]:
        """Play the episodes and record their metrics."""
        return self._measure(self._eval_group, obj_set, prefix, self._seed)

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: nothing is collected or learned here."""
        raise RLightningError("the eval engine collects and learns nothing; use a training engine")

    rollout = update_dataset = train = _refuse
