"""Run one batch of requests through an algorithm, and find out whose fault a failure is.

Knows nothing about threads or sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_protocol.errors import MAX_REASON_BYTES
from plugrl_server.algorithm.base_algorithm import Sampled
from plugrl_server.common.trees import concatenate
from plugrl_server.errors import ObservationError, PolicyContractError
from plugrl_server.server.client_envs import InferStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from plugrl_protocol.messages import Infer, Observation
    from plugrl_server.algorithm.base_algorithm import BaseAlgorithm

__all__ = [
    "Inference",
    "Inferred",
    "Layout",
    "describe_observation",
    "layout_of_observation",
    "same_but_for_dtypes",
]

Array = np.ndarray[Any, Any]
Layout = tuple[Any, ...]


def layout_of_observation(observation: Observation) -> Layout:
    """Give names, dtypes and shapes (without the batch): what can share a batch."""
    images, states = observation.images, observation.states
    if len(states) == 1 and not images:
        ((name, array),) = states.items()
        return ((name, array.dtype.char, array.shape[1:]),)
    return tuple(
        (name, array.dtype.char, array.shape[1:])
        for group in (images, states)
        for name, array in sorted(group.items())
    )


def same_but_for_dtypes(one: Layout, other: Layout) -> bool:
    """Whether two layouts have the same names and shapes."""
    return [(n, shape) for n, _, shape in one] == [(n, shape) for n, _, shape in other]


def describe_observation(layout: Layout) -> str:
    """Name what an observation holds, for a person: ``a:3,t:1,cam:224x224x3``."""
    parts = [f"{name}:{'x'.join(map(str, shape))}" for name, _, shape in layout]
    return ",".join(parts) or "nothing"


@dataclass(slots=True, eq=False)
class Inferred:
    """What came of one batch.

    Attributes:
        actions: one per request, ``[H, n, *A]``, time first.
    """

    actions: list[Array]
    _algorithm: BaseAlgorithm
    _obs: dict[str, Any]
    _runtime_state: Any
    _rows: list[int]

    def steps(self) -> list[InferStep]:
        """Give what is to be remembered of each request until its feedback; ask once.

        Apart from the actions, because nobody waits for it.
        """
        algorithm, counts = self._algorithm, self._rows
        sampled = Sampled(self._obs, self._runtime_state, algorithm.derive_train_state)
        version, is_whole = algorithm.current_version, len(counts) == 1
        steps, start = [], 0
        for rows in counts:
            steps.append(InferStep(sampled, version, start, is_whole, rows))
            start += rows
        return steps


@dataclass(slots=True)
class Inference:
    """Runs batches and checks what comes back."""

    algorithm: BaseAlgorithm
    _per_row: tuple[int, ...] | None = None
    _known_good: Layout | None = None

    def run(self, requests: Sequence[Infer], layout: Layout) -> Inferred:
        """Act for several requests of one layout at once.

        Raises:
            PolicyContractError: the action has not the promised shape.
            Exception: whatever the algorithm raises.
        """
        algorithm = self.algorithm
        obs = concatenate([request.observation.to_wire() for request in requests])
        action, runtime_state = algorithm.infer(obs)
        counts = [len(request.env_indices) for request in requests]
        self._check(action, sum(counts))
        self._known_good = layout
        by_time = action.swapaxes(0, 1)
        actions, start = [by_time], 0
        if len(counts) > 1:
            actions = []
            for rows in counts:
                actions.append(by_time[:, start : start + rows])
                start += rows
        return Inferred(actions, algorithm, obs, runtime_state, counts)

    def _check(self, action: Any, rows: int) -> None:
        is_batch = isinstance(action, np.ndarray) and action.ndim >= 2 and len(action) == rows
        if is_batch and action.shape[1:] == self._per_row:
            return
        name = type(self.algorithm.policy).__name__
        if not is_batch:
            raise PolicyContractError(
                f"{name} gave an action of shape {list(np.shape(action))} for {rows} rows; "
                "expected an array [n, H, ...]: batch first, then the horizon"
            )
        if self._per_row is None:
            horizon = getattr(self.algorithm.policy, "action_horizon", None)
            if isinstance(horizon, int) and action.shape[1] != horizon:
                raise PolicyContractError(
                    f"{name} gave an action of shape {list(action.shape)}, and its action_horizon "
                    f"is {horizon}; expected [n, {horizon}, ...]: batch first, then the horizon"
                )
            self._per_row = action.shape[1:]
        else:
            raise PolicyContractError(
                f"{name} gave actions of shape {list(self._per_row)} per row before and now of "
                f"{list(action.shape[1:])}; keep the action's shape stable"
            )

    def blame(self, error: Exception, layout: Layout) -> str:
        """Word why a request that failed alone is refused; short, both sides named.

        What to do about it is said where a close frame has room for that.
        """
        if isinstance(error, ObservationError):
            whole = str(error)
            return whole if len(whole.encode()) <= MAX_REASON_BYTES else error.reason
        sent = describe_observation(layout)
        if self._known_good is not None and self._known_good != layout:
            return f"observation {sent}, policy has {describe_observation(self._known_good)}"
        return f"observation {sent}, policy raised {type(error).__name__}: {error}"
