"""`BasePolicy`: what a policy must do to be served. Needs no torch.

A policy sees observations of many environments at once and answers with a chunk of actions for
each. It knows nothing about sockets, buffers or gradients.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any

import tyro  # noqa: TC002  # the command line reads the annotations

from plugrl_server.common.ranges import check_ranges
from plugrl_server.policy.state import NumpyState, PolicyRuntimeState

__all__ = ["BasePolicy", "BasePolicyConfig", "PolicyRuntimeState"]


@dataclasses.dataclass
class BasePolicyConfig:
    """What every policy's configuration has; a field of a subclass is a ``--policy.`` flag."""

    algo: tyro.conf.Suppress[str] = "unknown"
    """UID of the chosen algorithm; written by the command line."""

    def __post_init__(self) -> None:
        """Refuse numbers that cannot be meant; see `check_ranges`."""
        check_ranges(self, "--policy.")


class BasePolicy(ABC):
    """A policy behind the server.

    Observations are batched maps, even for one environment: ``{"images": {name: uint8 [n, h, w,
    c]}, "states": {name: float [n, d]}, "text": n strings}``.

    A subclass sets ``action_dim`` and ``action_horizon`` (positive ints) in ``__init__``; clients
    are told both.

    Args:
        config: kept as ``self.config``.
    """

    action_dim: int
    action_horizon: int

    def __init__(self, config: Any) -> None:
        self.config = config

    def prepare_observation(self, _obs: dict[str, Any]) -> NumpyState:
        """Turn the map of observations into an array, or nested maps of arrays, ``[n, ...]``.

        Raises:
            NotImplementedError: the policy does not say how.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not override prepare_observation, which gives the arrays "
            "that its model reads"
        )

    @abstractmethod
    def get_action_and_runtime_state(self, _obs: dict[str, Any]) -> tuple[Any, PolicyRuntimeState]:
        """Act.

        Returns:
            The action, batch first with a horizon axis, ``[n, H, ...]`` (a one-step policy gives
            ``[n, 1, D]``); and what the algorithm needs to learn from it: anything that can be cut
            by row (an array, a tensor, a dict or dataclass of them), or None.
        """

    @abstractmethod
    def fake_runtime_state(self, batch_size: int) -> PolicyRuntimeState:
        """Give a runtime state of zeros with the right shapes and dtypes; it sizes buffers."""

    def get_value(self, _obs: dict[str, Any]) -> Any:
        """Estimate the value of observations, ``[n]``.

        Raises:
            NotImplementedError: the policy has no critic.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no get_value, which this algorithm bootstraps from"
        )
