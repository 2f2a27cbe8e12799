"""Numbers of a command line that cannot be meant, refused before anything is built."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any, Final, TypeAlias

from plugrl_server.errors import UsageError

__all__ = ["FINITE", "UNBOUNDED", "Ranges", "check_ranges"]

Ranges: TypeAlias = "dict[str, tuple[float, float]]"
"""Field to the least and the largest number that can be meant."""

FINITE: Final = sys.float_info.max
"""The largest number that is not infinite."""
UNBOUNDED: Final = math.inf


def check_ranges(config: Any, prefix: str) -> None:
    """Refuse numbers outside the ``_ranges`` of a configuration's classes, and NaN in any field.

    Args:
        config: a dataclass; a field may hold None, which passes, or a tuple of numbers.
        prefix: of its flags, for example ``"--algo."``.

    Raises:
        UsageError: names the flag, what it says and what was expected.
    """
    ranges: Ranges = {}
    for cls in reversed(type(config).__mro__):
        ranges |= vars(cls).get("_ranges", {})
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        least, most = ranges.get(field.name, (-math.inf, math.inf))
        for number in value if isinstance(value, (tuple, list)) else (value,):
            is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
            if is_number and not least <= number <= most:
                flag = f"{prefix}{field.name.replace('_', '-')}"
                raise UsageError(f"{flag} is {number:g}; expected {_describe(least, most)}")


def _describe(least: float, most: float) -> str:
    if least == -math.inf and most == math.inf:
        return "a number"
    if most == math.inf:
        return f"at least {least:g}"
    if most == FINITE:
        return f"a finite number of at least {least:g}"
    return f"a number from {least:.15g} to {most:.15g}"
