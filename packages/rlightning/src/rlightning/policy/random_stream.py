"""`RandomStream`: the one stream of random numbers of a run, wherever the policy works that draws.

In one process, TRAIN and EVAL policies draw from the same global generators in turn. Where they
live in several, the generators' state goes along to who draws next, so that a run gives the same
numbers wherever its parts are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from rlightning.errors import WorkerLostError
from rlightning.policy.policy_proxy import PolicyProxy
from rlightning.utils.seeding import get_rng_state, set_rng_state

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["RandomStream"]


class RandomStream:
    """Remembers who holds the stream; this process does, at first."""

    def __init__(self) -> None:
        self._holder: PolicyProxy | None = None
        self._shared = True

    def split(self, policies: Iterable[Any]) -> None:
        """Let every process draw from a stream of its own from now on: several draw at once."""
        self.take_home()
        self._shared = False
        for policy in policies:
            if isinstance(policy, PolicyProxy):
                policy.reseed(int(np.random.randint(2**31)))

    def hand_to(self, policy: Any) -> None:
        """See that `policy` draws from the stream."""
        holder = policy if isinstance(policy, PolicyProxy) else None
        if holder is self._holder or not self._shared:
            return
        state = self._state()
        if holder is None:
            set_rng_state(state)
        else:
            holder.set_rng_state(state)
        self._holder = holder

    def take_home(self) -> None:
        """See that this process holds the stream."""
        self.hand_to(None)

    def is_home_with(self, state: dict[str, Any]) -> None:
        """Continue the stream from `state`, here."""
        set_rng_state(state)
        self._holder = None

    def _state(self) -> dict[str, Any]:
        if self._holder is None:
            return get_rng_state()
        try:
            state: dict[str, Any] = self._holder.get_rng_state()
        except WorkerLostError:  # what it drew is lost with it: go on with what is here
            return get_rng_state()
        return state
