"""Run one batch of requests through an algorithm, and find out whose fault a failure is.

Knows nothing about threads or sockets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

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
    "InferenceResult",
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


class InferenceResult(NamedTuple):
    """What one request of a batch gets.

    Attributes:
        action: ``[H, n, *A]``, time first.
        step: to be remembered until the feedback.
    """

    action: Array
    step: InferStep


@dataclass(slots=True)
class Inference:
    """Runs batches and checks what comes back."""

    algorithm: BaseAlgorithm
    _per_row: tuple[int, ...] | None = None
    _known_good: Layout | None = None

    def run(self, requests: Sequence[Infer], layout: Layout) -> list[InferenceResult]:
        """Act for several requests of one layout at once.

        Raises:
            PolicyContractError: the action has not the promised shape.
            Exception: whatever the algorithm raises.
        """
        algorithm = self.algorithm
        obs = concatenate([request.observation.to_wire() for request in requests])
        action, runtime_state = algorithm.infer(obs)
        sampled = Sampled(obs, runtime_state, algorithm.derive_train_state)
        rows = sum([len(request.env_indices) for request in requests])
        self._check(action, rows)
        self._known_good = layout
        by_time, version = action.swapaxes(0, 1), algorithm.current_version
        if len(requests) == 1:
            return [
                InferenceResult(
                    by_time, InferStep(sampled, version, 0, is_whole=True, rows_left=rows)
                )
            ]
        results, start = [], 0
        for request in requests:
            n = len(request.env_indices)
            step = InferStep(sampled, version, start, n == rows, n)
            results.append(InferenceResult(by_time[:, start : start + n], step))
            start += n
        return results

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
            self._per_row = action.shape[1:]
        else:
            raise PolicyContractError(
                f"{name} gave actions of shape {list(self._per_row)} per row before and now of "
                f"{list(action.shape[1:])}; keep the action's shape stable"
            )

    def blame(self, error: Exception, layout: Layout) -> str:
        """Word why a request that failed alone is refused; short, both sides named."""
        if isinstance(error, ObservationError):
            return error.reason
        sent = describe_observation(layout)
        if self._known_good is not None and self._known_good != layout:
            return f"observation {sent}, policy has {describe_observation(self._known_good)}"
        return f"observation {sent}, policy raised {type(error).__name__}: {error}"
