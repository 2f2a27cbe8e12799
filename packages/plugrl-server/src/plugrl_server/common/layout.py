"""Compare batched trees of arrays with what a buffer was sized for, and say where they differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from plugrl_server.common.trees import leaves
from plugrl_server.errors import PolicyContractError

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Layout", "check_layout", "layout_of"]

Layout = dict[tuple[str, ...], tuple[tuple[int, ...], "np.dtype[Any]"]]
"""Path to shape without the batch, and dtype."""


def layout_of(tree: Any) -> Layout:
    """Describe every array of a tree of numpy arrays."""
    return {path: (leaf.shape[1:], leaf.dtype) for path, leaf in leaves(tree)}


def check_layout(what: str, found: Any, expected: Layout) -> None:
    """Compare a batch with a layout.

    Args:
        what: how the message names it, for example ``"the train state of DemoPolicy"``.
        found: a tree of numpy arrays, batch first.
        expected: as `layout_of` described what the buffer was sized with.

    Raises:
        PolicyContractError: a field is missing or unknown, or has another shape or dtype.
    """
    if _is_flat_match(found, expected):
        return
    seen = layout_of(found)
    if seen == expected:
        return
    missing, unknown = sorted(expected.keys() - seen.keys()), sorted(seen.keys() - expected.keys())
    if missing or unknown:
        listed = [f"lacks {'.'.join(path)}" for path in missing]
        listed += [f"has the unknown {'.'.join(path)}" for path in unknown]
        raise PolicyContractError(
            f"{what} {' and '.join(listed)}; fake_runtime_state and get_action_and_runtime_state "
            "must agree on the fields"
        )
    for path, (shape, dtype) in expected.items():
        if seen[path] != (shape, dtype):
            raise PolicyContractError(
                f"{what} has {'.'.join(path) or 'an array'} of shape {seen[path][0]} and dtype "
                f"{seen[path][1]} per row; fake_runtime_state says shape {shape} and dtype {dtype}"
            )


def _is_flat_match(found: Any, expected: Layout) -> bool:
    """Whether a map of arrays is as expected; cheap, for the way that frames take all the time."""
    if type(found) is not dict or len(found) != len(expected):
        return False
    for path, (shape, dtype) in expected.items():
        leaf = found.get(path[0]) if len(path) == 1 else None
        if leaf is None or getattr(leaf, "dtype", None) != dtype or leaf.shape[1:] != shape:
            return False
    return True
