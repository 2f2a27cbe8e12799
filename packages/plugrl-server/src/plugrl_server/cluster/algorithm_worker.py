"""`AlgorithmWorker`: an algorithm where it acts or learns, away from the sockets and the frames."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_server.algorithm.ranks import Ranks
from plugrl_server.algorithm.torch_state import learner_checkpoint, load_learner
from rlightning.runtime import process_group
from rlightning.utils.seeding import get_rng_state, seed_everything, set_rng_state
from rlightning.weights import pack

if TYPE_CHECKING:
    from plugrl_server.algorithm.base_algorithm import BaseAlgorithm, Checkpoint, MetricDict
    from plugrl_server.algorithm.recipe import Recipe

__all__ = ["AlgorithmWorker", "as_plain", "like_example", "with_text", "without_text"]


class AlgorithmWorker:
    """Owns one algorithm, which is built when it is first needed.

    Args:
        recipe: what it is built from.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._ranks = Ranks()
        self._published: Any = None

    @cached_property
    def algorithm(self) -> BaseAlgorithm:
        """The algorithm."""
        return self._recipe.build(self._ranks)

    def is_ready(self) -> bool:
        """Return True: who gets an answer has found a worker."""
        return True

    def build(self) -> None:
        """Build the algorithm now, if it is not yet."""
        assert self.algorithm is not None  # asking for it builds it

    # ---- acting --------------------------------------------------------------------------------

    def infer(self, step: int, version: int, obs: dict[str, Any]) -> tuple[Any, Any]:
        """Act on a batch.

        Args:
            step: environment steps that were stored.
            version: of the weights.
            obs: as `without_text` gives it.

        Returns:
            The action, and the runtime state as `as_plain` gives it.
        """
        algorithm = self.algorithm
        algorithm.global_step, algorithm.current_version = step, version
        action, runtime_state = algorithm.infer(with_text(obs))
        return action, as_plain(runtime_state)

    # ---- learning ------------------------------------------------------------------------------

    def rank_address(self, host: str) -> str:
        """Return where the others can meet this worker, which is at `host`, as their rank 0."""
        return process_group.free_address(host)

    def join_ranks(self, rank: int, count: int, address: str, timeout_s: float) -> None:
        """Learn together with other workers; before the first `load_learner`."""
        group = process_group.init(rank, count, address, timeout_s=timeout_s)
        self._ranks = Ranks(group, rank, count)

    def learn(self, step: int, collected: Any) -> tuple[MetricDict, dict[str, Any]]:
        """Learn from what was collected elsewhere.

        Args:
            step: environment steps that were stored.
            collected: what `BaseAlgorithm.hand_over` gave.

        Returns:
            Numbers to log, and `BaseAlgorithm.learner_meta`.
        """
        algorithm = self.algorithm
        algorithm.global_step = step
        algorithm.take_over(collected)
        _, metrics = algorithm.learn_impl()
        algorithm.post_learn()
        return metrics, algorithm.learner_meta()

    def learner_checkpoint(self) -> Checkpoint:
        """Copy what learning has changed; see `torch_state.learner_checkpoint`."""
        return learner_checkpoint(self.algorithm)

    def load_learner(self, checkpoint: Checkpoint) -> None:
        """Continue from what `learner_checkpoint` gave."""
        load_learner(self.algorithm, checkpoint)

    # ---- weights -------------------------------------------------------------------------------

    def open_weights(self, address: Any) -> bool:
        """Open weights in shared memory; return whether they are on this machine."""
        self._published = address.open()
        return self._published is not None

    def publish(self, version: int) -> None:
        """Publish the learned weights there."""
        self._published.publish(version, self._weights())

    def packed_weights(self) -> Any:
        """Give the learned weights for another machine."""
        return pack(self._weights())

    def _weights(self) -> dict[str, Any]:
        learner: Any = self.algorithm.learner_policy
        return dict(learner.state_dict())

    def load_published(self) -> None:
        """Act with the newest weights from there."""
        with self._published.read() as (_, weights):
            self._load(weights)

    def load_packed(self, packed: Any) -> None:
        """Act with weights that came from another machine."""
        self._load(packed.unpack())

    def _load(self, weights: dict[str, Any]) -> None:
        policy: Any = self.algorithm.policy
        policy.load_state_dict(weights)

    # ---- random numbers ------------------------------------------------------------------------

    def reseed(self, seed: int) -> None:
        """Seed this process's global generators, after the first weights were drawn."""
        self.build()
        seed_everything(seed)

    def get_rng_state(self) -> dict[str, Any]:
        """Return the state of this process's global generators."""
        return get_rng_state()

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Restore what `get_rng_state` returned, after the first weights were drawn."""
        self.build()
        set_rng_state(state)


# Numbers in arrays, and containers, go through a socket in a tenth of the time that pickle takes:
# strings go as lists, and dataclasses as maps of their fields.


def without_text(obs: dict[str, Any]) -> dict[str, Any]:
    """Give an observation with its text as a list."""
    text = obs["text"]
    return {**obs, "text": text.tolist() if isinstance(text, np.ndarray) else text}


def with_text(obs: dict[str, Any]) -> dict[str, Any]:
    """Undo `without_text`."""
    return {**obs, "text": np.array(obs["text"], dtype=np.str_)}


def as_plain(state: Any) -> Any:
    """Give dataclasses as maps of their fields; see `like_example`."""
    if dataclasses.is_dataclass(state) and not isinstance(state, type):
        return {f.name: as_plain(getattr(state, f.name)) for f in dataclasses.fields(state)}
    if isinstance(state, Mapping):
        return {key: as_plain(value) for key, value in state.items()}
    return state


def like_example(plain: Any, example: Any) -> Any:
    """Undo `as_plain`.

    Args:
        plain: what it gave.
        example: a state of the same classes.
    """
    if not isinstance(plain, dict):
        return plain
    if dataclasses.is_dataclass(example) and not isinstance(example, type):
        fields = {k: like_example(v, getattr(example, k, None)) for k, v in plain.items()}
        return dataclasses.replace(example, **fields)
    known = example if isinstance(example, Mapping) else {}
    return {key: like_example(value, known.get(key)) for key, value in plain.items()}
