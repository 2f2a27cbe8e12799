"""`RandomStream`: the one stream of random numbers of a run, wherever the process is that draws.

In one process acting and learning draw from the same global generators in turn. Where each has one
process of its own, the generators' state goes along to who draws next, so that a run gives the same
numbers. Where there are several of a kind, they draw at the same time, each from its own stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from rlightning.errors import WorkerLostError
from rlightning.utils.seeding import get_rng_state, set_rng_state

if TYPE_CHECKING:
    from rlightning.runtime.base import Handle

__all__ = ["RandomStream"]


@final
class RandomStream:
    """Remembers who holds the stream; this process does, at first.

    Args:
        shared: whether there is one for all; without, nothing is handed over.
    """

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._holder: Handle | None = None

    def hand_to(self, worker: Handle | None) -> None:
        """See that a worker draws from the stream; None stands for this process.

        Raises:
            WorkerLostError: that worker is lost.
        """
        if worker is self._holder or not self._shared:
            return
        state = self._state()
        if worker is None:
            set_rng_state(state)
        else:
            worker.call("set_rng_state", state).result()
        self._holder = worker

    def is_here(self) -> None:
        """This process goes on with its own generators, whoever had the stream."""
        self._holder = None

    def _state(self) -> dict[str, Any]:
        if self._holder is not None:
            try:
                state: dict[str, Any] = self._holder.call("get_rng_state").result()
            except WorkerLostError:  # what it drew is lost with it: go on with what is here
                pass
            else:
                return state
        return get_rng_state()
