"""`PolicyGroup`: the TRAIN and EVAL instances of one policy, addressed as one.

Joins inference over environment workers, carries weights from the TRAIN to the EVAL instances and
gathers what a checkpoint needs. It knows nothing about environments or buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from typing import TYPE_CHECKING, Any

from rlightning.errors import ContractError
from rlightning.policy.joining import join_rows, split_rows
from rlightning.types import BatchedData, EnvRet, PolicyResponse, PolicyRole

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Sequence

    from rlightning.config import PolicyConfig, TrainConfig
    from rlightning.policy.base_policy import BasePolicy
    from rlightning.types import EnvMeta, WeightStore

__all__ = ["PolicyGroup"]


class PolicyGroup:
    """All policy workers of a run.

    Args:
        train_policy_list: the TRAIN instances; may be empty for evaluation only.
        eval_policy_list: the EVAL instances.
        config: the ``policy`` section.
        weight_buffer: holds published weights between learner and actors; without one
            (strategy ``"None"``) weights go over directly.
    """

    def __init__(
        self,
        train_policy_list: Sequence[BasePolicy],
        eval_policy_list: Sequence[BasePolicy],
        config: PolicyConfig,
        *,
        weight_buffer: WeightStore | None = None,
    ) -> None:
        self.config = config
        self.policy_list: dict[PolicyRole, list[BasePolicy]] = {
            PolicyRole.TRAIN: list(train_policy_list),
            PolicyRole.EVAL: list(eval_policy_list),
        }
        self.weight_buffer = weight_buffer
        self.version = -1
        """The version of the newest weights that were sent."""
        self._runner: asyncio.Runner | None = None

    @property
    def train_list(self) -> list[BasePolicy]:
        """The TRAIN instances."""
        return self.policy_list[PolicyRole.TRAIN]

    @property
    def eval_list(self) -> list[BasePolicy]:
        """The EVAL instances."""
        return self.policy_list[PolicyRole.EVAL]

    # ---- initialisation ------------------------------------------------------------------------

    def init(
        self,
        train_config: TrainConfig,
        env_meta: EnvMeta | None = None,
        eval_config: Any = None,
    ) -> None:
        """Build the networks of all instances, TRAIN first."""
        self.init_train(train_config, env_meta)
        self.init_eval(eval_config, env_meta)

    def init_train(self, train_config: TrainConfig, env_meta: EnvMeta | None = None) -> None:
        """Build the networks and optimizers of the TRAIN instances."""
        for policy in self.train_list:
            policy.init_train(train_config, env_meta=env_meta)

    def init_eval(self, eval_config: Any = None, env_meta: EnvMeta | None = None) -> None:
        """Build the networks of the EVAL instances."""
        for policy in self.eval_list:
            policy.init_eval(eval_config, env_meta=env_meta)

    # ---- acting --------------------------------------------------------------------------------

    def rollout_batch(
        self, batched_env_ret: BatchedData[EnvRet], *, deterministic: bool = False
    ) -> BatchedData[PolicyResponse]:
        """Return one response per `EnvRet`, in order.

        Args:
            batched_env_ret: what the environments returned.
            deterministic: whether policies should act without exploration (evaluation).
        """
        policy = self.eval_list[0]
        if policy.deterministic == deterministic:
            return self._answer(policy, batched_env_ret)
        policy.deterministic = deterministic
        try:
            return self._answer(policy, batched_env_ret)
        finally:
            policy.deterministic = not deterministic

    def _answer(
        self, policy: BasePolicy, batched_env_ret: BatchedData[EnvRet]
    ) -> BatchedData[PolicyResponse]:
        env_rets = batched_env_ret.values()
        if policy.batched_rollout:
            response = policy._rollout(join_rows(env_rets))
            responses = split_rows(response, env_rets)
        elif policy.rollout_mode == "async":
            responses = self._event_loop().run(_gather(policy, env_rets))
        else:
            responses = [policy._rollout(env_ret) for env_ret in env_rets]
        return BatchedData(batched_env_ret.ids(), responses)

    def _event_loop(self) -> asyncio.Runner:
        """Return the one loop that coroutine policies run in, so that locks outlive a step."""
        if self._runner is None:
            self._runner = asyncio.Runner()
            weakref.finalize(self, self._runner.close)
        return self._runner

    def postprocess(
        self,
        batched_env_ret: BatchedData[EnvRet],
        batched_policy_resp: BatchedData[PolicyResponse],
    ) -> BatchedData[PolicyResponse]:
        """Run the policy's `postprocess` on each pair; what returns nothing passes unchanged."""
        policy = self.eval_list[0]
        pairs = zip(batched_env_ret.values(), batched_policy_resp.values(), strict=True)
        return BatchedData(
            batched_policy_resp.ids(),
            [policy._postprocess(env_ret, response) for env_ret, response in pairs],
        )

    @contextlib.contextmanager
    def memory_kept(self, *, empty: bool = False) -> Iterator[None]:
        """On leaving, let policies remember of their episodes what they did on entering.

        Args:
            empty: whether they start with no memory inside, for other environments.
        """
        before = [policy.episode_memory() for policy in self.eval_list]
        if empty:
            self.forget_episodes()
        try:
            yield
        finally:
            for policy, memory in zip(self.eval_list, before, strict=True):
                policy.load_episode_memory(memory)

    def forget_episodes(self) -> None:
        """Say that every environment starts a new episode, whatever its flags say."""
        for policy in self.eval_list:
            policy.load_episode_memory({})

    def episode_memories(self, env_ids: Sequence[str]) -> list[list[Any]]:
        """Return what each EVAL instance remembers of these environments, None where nothing."""
        memories = [policy.episode_memory() for policy in self.eval_list]
        return [[memory.get(env_id) for env_id in env_ids] for memory in memories]

    def load_episode_memories(self, memories: list[list[Any]], env_ids: Sequence[str]) -> None:
        """Restore what `episode_memories` returned; the environments may have new names."""
        for policy, memory in zip(self.eval_list, memories, strict=False):
            named = zip(env_ids, memory, strict=True)
            policy.load_episode_memory({name: item for name, item in named if item is not None})

    # ---- learning ------------------------------------------------------------------------------

    def update_dataset(self, sample_data: Sequence[Any]) -> None:
        """Hand each TRAIN instance its batch.

        Raises:
            ContractError: the number of batches is not the number of TRAIN instances.
        """
        if len(sample_data) != len(self.train_list):
            raise ContractError(
                f"{len(sample_data)} batches for {len(self.train_list)} train workers"
            )
        for policy, data in zip(self.train_list, sample_data, strict=True):
            policy._update_dataset(data)

    def train(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Update every TRAIN instance; return the metrics, averaged over instances."""
        results = [policy._train(*args, **kwargs) for policy in self.train_list]
        if len(results) == 1:
            return results[0]
        return {
            key: sum(float(result[key]) for result in results) / len(results) for key in results[0]
        }

    def priorities(self) -> list[tuple[Any, Any]]:
        """Return what each TRAIN instance says of the rows it learned from; see `BasePolicy`."""
        reports = [policy.priorities() for policy in self.train_list]
        return [report for report in reports if report is not None]

    # ---- weights -------------------------------------------------------------------------------

    def send_weights(self) -> None:
        """Publish the first TRAIN instance's weights as the next version."""
        self.version += 1
        if self.weight_buffer is not None:
            self.weight_buffer.publish(self.version, self.train_list[0].export_weights())

    def update_eval_weights(self) -> None:
        """Load the newest published weights into every EVAL instance that has older ones."""
        if self.weight_buffer is not None:
            version, payload = self.weight_buffer.get()
        else:
            version, payload = self.version, self.train_list[0].export_weights()
        for policy in self.eval_list:
            if policy.weights_version < version:
                policy.import_weights(version, payload)

    def sync_weights(self) -> None:
        """Publish the newest weights; on return every EVAL instance acts with them."""
        self.send_weights()
        self.update_eval_weights()

    def verify_eval_weight_consistency(self, rtol: float = 1e-3) -> bool:
        """Return whether every EVAL instance's tensors have the TRAIN instance's norms."""
        if not self.train_list:
            return True
        want = self.train_list[0].get_param_fingerprint()
        for policy in self.eval_list:
            have = policy.get_param_fingerprint()
            if have.keys() != want.keys():
                return False
            if not all(abs(have[name] - want[name]) <= rtol * abs(want[name]) for name in want):
                return False  # NaN is never consistent
        return True

    # ---- checkpoints ---------------------------------------------------------------------------

    def save_checkpoint(self, path: str) -> None:
        """Write the policy's own checkpoint file, from the first TRAIN instance."""
        (self.train_list or self.eval_list)[0].save_checkpoint(path)

    def export_state(self) -> dict[str, Any]:
        """Return weights and training state of all TRAIN instances, and the weights' version."""
        return {
            "version": self.version,
            "weights": self.train_list[0].export_weights(),
            "training": [policy.export_training_state() for policy in self.train_list],
        }

    def import_state(self, state: dict[str, Any]) -> None:
        """Restore what `export_state` returned, into TRAIN and EVAL instances."""
        version = int(state["version"])
        for policy, training in zip(self.train_list, state["training"], strict=True):
            policy.import_weights(version, state["weights"])
            policy.import_training_state(training)
        self.version = max(version - 1, self.version)
        self.sync_weights()

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Load exported weights into every initialised instance, for evaluation."""
        for policy in (*self.train_list, *self.eval_list):
            if policy.is_initialized():
                policy.import_weights(0, weights)

    def set_dump_dir(self, path: pathlib.Path) -> None:
        """Say where a TRAIN instance saves what it found not to be finite."""
        for policy in self.train_list:
            if policy._guard is not None:
                policy._guard.dump_dir = path

    def print_timing_summary(self, *, reset: bool = False) -> dict[str, dict[str, float]]:
        """Return the timings the policies recorded, by name; optionally forget them."""
        merged: dict[str, dict[str, float]] = {}
        for policy in (*self.train_list, *self.eval_list):
            merged |= policy.timing_raw
            if reset:
                policy.timing_raw = {}
        return merged


async def _gather(policy: BasePolicy, env_rets: Sequence[EnvRet]) -> list[PolicyResponse]:
    tasks = [asyncio.create_task(policy._rollout_async(env_ret)) for env_ret in env_rets]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:  # the loop lives on, and with it what is not ended here
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
