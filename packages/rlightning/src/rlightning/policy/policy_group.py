"""`PolicyGroup`: the TRAIN and EVAL instances of one policy, addressed as one.

Joins inference over environment workers, carries weights from the TRAIN to the EVAL instances and
gathers what a checkpoint needs. It knows nothing about environments or buffers.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from rlightning.errors import ConfigError, ContractError
from rlightning.policy.eval_workers import EvalWorkers
from rlightning.policy.policy_proxy import PolicyProxy, join_ranks
from rlightning.policy.random_stream import RandomStream
from rlightning.policy.state import find_generators
from rlightning.policy.weight_route import WeightRoute
from rlightning.runtime.base import Done, Future
from rlightning.runtime.group import gather
from rlightning.types import BatchedData, EnvRet, PolicyResponse, PolicyRole
from rlightning.utils.logger import get_logger
from rlightning.utils.profiler import profiler

if TYPE_CHECKING:
    import pathlib
    from collections.abc import Iterator, Sequence

    from rlightning.config import PolicyConfig, TrainConfig
    from rlightning.policy.base_policy import BasePolicy
    from rlightning.types import EnvMeta, WeightStore

__all__ = ["PolicyGroup"]

_log = get_logger("policy")


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
        self._route = (
            None
            if weight_buffer is None
            else WeightRoute(weight_buffer, train_policy_list, eval_policy_list)
        )
        self.version = -1
        """The version of the newest weights that were sent."""
        self.random_stream = RandomStream()
        """The random numbers that the policies draw."""
        self._evals = EvalWorkers(
            eval_policy_list, router_type=config.router_type, random_stream=self.random_stream
        )

    @property
    def lost_eval_workers(self) -> int:
        """How many EVAL instances died and were started again."""
        return self._evals.lost

    @property
    def train_list(self) -> list[BasePolicy]:
        """The TRAIN instances."""
        return self.policy_list[PolicyRole.TRAIN]

    @property
    def policy_class(self) -> type[Any]:
        """The class of the instances."""
        policy = (self.train_list or self.eval_list)[0]
        return policy.policy_class if isinstance(policy, PolicyProxy) else type(policy)

    @property
    def eval_list(self) -> list[BasePolicy]:
        """The EVAL instances."""
        return self.policy_list[PolicyRole.EVAL]

    # ---- initialisation ------------------------------------------------------------------------

    def split_random_stream(self) -> None:
        """Let instances that live elsewhere draw random numbers of their own: several act at once.

        Otherwise they share the one stream of this process, and a run gives the same numbers
        wherever they live.
        """
        self.random_stream.split([*self.train_list, *self.eval_list])

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
        self._check_masks(env_meta)
        if len(self.train_list) > 1 or len(self.eval_list) > 1:
            self.split_random_stream()
        if len(self.train_list) > 1:
            join_ranks(self.train_list)
        self._each_train("init_train", [(train_config, env_meta)] * len(self.train_list))
        if len(self.train_list) > 1:  # each has drawn its own first weights
            weights = self.train_list[0].export_weights()
            self._each_train("import_weights", [(self.version, weights)] * len(self.train_list))

    def init_eval(self, eval_config: Any = None, env_meta: EnvMeta | None = None) -> None:
        """Build the networks of the EVAL instances."""
        self._check_masks(env_meta)
        for policy in self.eval_list:
            self.random_stream.hand_to(policy)
            policy.init_eval(eval_config, env_meta=env_meta)

    def _check_masks(self, env_meta: EnvMeta | None) -> None:
        """Refuse environments of which some have fewer actions, where that would not be heeded."""
        kind = self.policy_class
        if env_meta is not None and env_meta.masked_actions and not kind.reads_action_mask:
            raise ConfigError(
                f"some tasks have fewer actions than {env_meta.action_space}, and {kind.__name__} "
                "does not read which (reads_action_mask = False): make the action spaces equal "
                "with wrappers (`env.wrappers`), choose a policy that does, such as PPOPolicy or "
                "DQNPolicy, or train a policy for each task"
            )

    def set_addresses(self, env_addresses: dict[str, str]) -> None:
        """Say which machine each environment worker is on, for routing by nearness."""
        self._evals.set_addresses(env_addresses)

    # ---- acting --------------------------------------------------------------------------------

    def rollout_batch(
        self, batched_env_ret: BatchedData[EnvRet], *, deterministic: bool = False
    ) -> BatchedData[PolicyResponse]:
        """Return one response per `EnvRet`, in order.

        Args:
            batched_env_ret: what the environments returned.
            deterministic: whether policies should act without exploration (evaluation).
        """
        ids, env_rets = batched_env_ret.ids(), batched_env_ret.values()
        return BatchedData(ids, self._evals.answer(env_rets, deterministic=deterministic))

    def postprocess(
        self,
        batched_env_ret: BatchedData[EnvRet],
        batched_policy_resp: BatchedData[PolicyResponse],
    ) -> BatchedData[PolicyResponse]:
        """Run the policy's `postprocess` on each pair; what returns nothing passes unchanged."""
        processed = self._evals.postprocess(batched_env_ret.values(), batched_policy_resp.values())
        return BatchedData(batched_policy_resp.ids(), processed)

    @contextlib.contextmanager
    def memory_kept(self, *, empty: bool = False) -> Iterator[None]:
        """On leaving, let policies remember of their episodes what they did on entering.

        Args:
            empty: whether they start with no memory inside, for other environments.
        """
        before = self._evals.memories()
        if empty:
            self.forget_episodes()
        try:
            yield
        finally:
            self._evals.load_memories(before)

    def forget_episodes(self, env_ids: Sequence[str] | None = None) -> None:
        """Say that environments start a new episode, whatever their flags say; by default all."""
        if env_ids is None:
            self._evals.load_memories([{} for _ in self.eval_list])
            return
        kept = [
            {env_id: entry for env_id, entry in memory.items() if env_id not in env_ids}
            for memory in self._evals.memories()
        ]
        self._evals.load_memories(kept)

    def episode_memories(self, env_ids: Sequence[str]) -> list[list[Any]]:
        """Return what each EVAL instance remembers of these environments, None where nothing."""
        return [[memory.get(env_id) for env_id in env_ids] for memory in self._evals.memories()]

    def load_episode_memories(
        self, memories: list[list[Any]], batched_env_ret: BatchedData[EnvRet]
    ) -> None:
        """Restore what `episode_memories` returned, also of another number of EVAL instances.

        Args:
            memories: of the same environments, in the same order.
            batched_env_ret: their last rows; they may have new names.
        """
        of_each = zip(*memories, strict=True)  # one instance remembers an environment
        entries = [next((item for item in found if item is not None), None) for found in of_each]
        self._evals.share_memories(batched_env_ret.values(), entries)

    def acting_generators(self) -> list[dict[str, Any]]:
        """Return the state of the generators that EVAL instances of this process act with."""
        return [
            {name: generator.get_state() for name, generator in find_generators(policy).items()}
            for policy in self._acting_here()
        ]

    def load_acting_generators(self, states: list[dict[str, Any]]) -> None:
        """Restore what `acting_generators` returned, where there are as many instances."""
        for policy, saved in zip(self._acting_here(), states, strict=False):
            for name, generator in find_generators(policy).items():
                if name in saved:
                    generator.set_state(saved[name])

    def _acting_here(self) -> list[Any]:
        return [policy for policy in self.eval_list if not isinstance(policy, PolicyProxy)]

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
        self._each_train("_update_dataset", [(data,) for data in sample_data])

    def train(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Update every TRAIN instance; return the metrics, averaged over instances."""
        results: list[dict[str, Any]] = self._each_train(
            "_train", [args] * len(self.train_list), **kwargs
        )
        if len(results) == 1:
            return results[0]
        return {
            key: sum(float(result[key]) for result in results) / len(results) for key in results[0]
        }

    def _each_train(
        self, method: str, arguments: Sequence[tuple[Any, ...]], **kwargs: Any
    ) -> list[Any]:
        """Call a method of every TRAIN instance, those that live elsewhere side by side."""
        begun: list[Future] = []
        for policy, args in zip(self.train_list, arguments, strict=True):
            self.random_stream.hand_to(policy)
            if isinstance(policy, PolicyProxy):
                begun.append(policy.begin(method, *args, **kwargs))
            else:
                begun.append(Done(getattr(policy, method)(*args, **kwargs)))
        return gather(begun)

    def priorities(self) -> list[tuple[Any, Any]]:
        """Return what each TRAIN instance says of the rows it learned from; see `BasePolicy`."""
        reports = [policy.priorities() for policy in self.train_list]
        return [report for report in reports if report is not None]

    # ---- weights -------------------------------------------------------------------------------

    def send_weights(self) -> None:
        """Publish the first TRAIN instance's weights as the next version."""
        self.version += 1
        if self._route is not None:
            self._route.publish(self.version)

    def update_eval_weights(self) -> None:
        """Load the newest published weights into every EVAL instance that has older ones."""
        if self._route is None:
            self._evals.import_weights(self.version, self.train_list[0].export_weights())
        elif self._evals.oldest_weights < self._route.version:
            with self._route.newest() as (version, payload):
                self._evals.import_weights(version, payload)

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
            for name, norm in want.items():  # infinite ones, as of a mask, are equal; NaN never is
                if have[name] != norm and not abs(have[name] - norm) <= rtol * abs(norm):
                    return False
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
        """Restore what `export_state` returned, into TRAIN and EVAL instances.

        Raises:
            ContractError: the state is of another number of TRAIN instances.
        """
        if len(state["training"]) != len(self.train_list):
            raise ContractError(
                f"the saved state is of {len(state['training'])} train workers, and this run has "
                f"{len(self.train_list)}"
            )
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

    def rest(self, role: PolicyRole) -> None:
        """Let the instances of a role that live elsewhere leave their device to others.

        Their next call brings everything back.
        """
        if role is PolicyRole.EVAL:
            self._evals.rest()
            return
        policies = self.policy_list[role]
        gather([policy.begin_rest() for policy in policies if isinstance(policy, PolicyProxy)])

    def close(self) -> None:
        """End the instances that live elsewhere."""
        self._evals.close()
        for policy in (*self.train_list, *self.eval_list):
            if isinstance(policy, PolicyProxy):
                policy.close()

    def set_dump_dir(self, path: pathlib.Path) -> None:
        """Say where a TRAIN instance saves what it found not to be finite."""
        for policy in self.train_list:
            policy.set_dump_dir(path)

    def print_timing_summary(self, reset: bool = False) -> None:  # noqa: FBT001, FBT002  # public contract
        """Log the timings that policies in this process have recorded.

        Args:
            reset: forget them afterwards.
        """
        for policy in (*self.train_list, *self.eval_list):
            if policy.timing_raw:
                role = policy.role_type.upper()
                _log.info("time of a %s policy\n%s", role, profiler.summary(policy.timing_raw))
            if reset:
                policy.timing_raw = {}
