"""What was really done: the actions that a client reports as executed, for learners off policy.

By the wire's convention ``info["executed_action"]`` is ``[m, H, ...]``: a chunk as the environment
executed it, a person's actions included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from plugrl_server.errors import ObservationError

if TYPE_CHECKING:
    from plugrl_server.algorithm.base_algorithm import FrameBatch

__all__ = ["executed_actions"]


def executed_actions(batch: FrameBatch, asked: Any) -> Any:
    """Return the actions of a batch as they were executed.

    Args:
        batch: frames; those of one feedback all report executed actions, or none does.
        asked: the policy's actions, ``[m, ...]`` of chunks of one, or ``[m, H, ...]``.

    Returns:
        As `asked`, which it is where the client says nothing.

    Raises:
        ObservationError: executed actions have another shape than those asked for.
    """
    given = batch.info.get("executed_action")
    if given is None:
        return asked
    shape = tuple(asked.shape)
    executed = np.asarray(given)
    if executed.shape[:1] + executed.shape[2:] == shape and executed.shape[1:2] == (1,):
        executed = executed[:, 0]
    if executed.shape != shape or executed.dtype.kind not in "iuf":
        raise ObservationError(
            f"executed_action {executed.dtype}{list(executed.shape)}",
            f"actions {list(shape)}",
            hint="info['executed_action'] is [m, H, ...], chunks as the policy answers them",
        )
    return executed.astype(asked.dtype, copy=False)
