"""Turn what users log into plain finite floats. Knows nothing about files or backends."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["clean_payload"]


def clean_payload(
    payload: Mapping[str, Any] | None, prefix: str
) -> tuple[dict[str, float], list[str]]:
    """Return the payload's scalars under ``<prefix>/<key>``, and the keys that are not finite.

    Nested mappings become paths. None says "no such number yet" and is left out. Python, numpy and
    torch scalars are accepted: anything with one element and an ``item`` method.

    Args:
        payload: numbers by name; None is an empty payload.
        prefix: what the keys are put under; an empty string leaves them as they are.

    Returns:
        The finite values as floats; the keys whose value is NaN or infinite.

    Raises:
        TypeError: a value is neither a scalar nor a mapping of them.
    """
    finite: dict[str, float] = {}
    not_finite: list[str] = []
    for name, value in (payload or {}).items():
        key = f"{prefix}/{name}" if prefix else str(name)
        if value is None:
            continue
        if hasattr(value, "items"):
            nested, nested_bad = clean_payload(value, key)
            finite |= nested
            not_finite += nested_bad
            continue
        number = _to_float(key, value)
        if math.isfinite(number):
            finite[key] = number
        else:
            not_finite.append(key)
    return finite, not_finite


def _to_float(key: str, value: Any) -> float:
    item = getattr(value, "item", None)
    try:
        return float(item() if callable(item) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"metric {key!r} is {type(value).__name__} {_shape(value)}; expected one number "
            "(int, float, bool, a numpy or torch scalar), None or a mapping of these"
        ) from error


def _shape(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return repr(value)[:60] if shape is None else f"of shape {tuple(shape)}"
