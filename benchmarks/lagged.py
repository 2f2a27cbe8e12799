"""An engine whose policy acts with weights some versions old. For `learn_vtrace`; not run alone."""

import collections
from typing import Any

from rlightning.config import Config
from rlightning.engine.sync_rl import SyncRLEngine
from rlightning.utils.registry import ENGINE


@ENGINE.register("lagged_syncrl")
class LaggedSyncRLEngine(SyncRLEngine):
    """Rolls out, learns, and lets the rollout take over the weights of `lag` updates ago."""

    class TrainExtras(Config):
        """Further keys of the ``train`` section."""

        lag: int = 2
        """Updates between the weights that act and those that learn."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._payloads: collections.deque[dict[str, Any]] = collections.deque()

    def sync_weights(self) -> None:
        """Publish the newest weights; act with older ones."""
        self.policy_group.send_weights()
        _, payload = self.policy_group.weight_buffer.get()
        self._payloads.append(_copied(payload))
        if len(self._payloads) > self.config.train.lag:
            version = self.policy_group.version - self.config.train.lag
            for policy in self.policy_group.eval_list:
                policy.import_weights(version, self._payloads.popleft())

    def evaluate(self, obj_set: str = "train", prefix: str = "eval") -> dict[str, float]:
        """Evaluate the newest weights, and go on with those that acted."""
        acting = [policy.export_weights() for policy in self.policy_group.eval_list]
        acting = [_copied(payload) for payload in acting]
        versions = [policy.weights_version for policy in self.policy_group.eval_list]
        self.policy_group.update_eval_weights()
        try:
            return super().evaluate(obj_set, prefix)
        finally:
            for policy, version, payload in zip(
                self.policy_group.eval_list, versions, acting, strict=True
            ):
                policy.import_weights(version, payload)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return value.clone()
