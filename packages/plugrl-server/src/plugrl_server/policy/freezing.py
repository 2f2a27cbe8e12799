"""Freeze parameters by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

__all__ = ["freeze_matching"]


def freeze_matching(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Stop the gradients of every parameter whose name a pattern is found in.

    Args:
        module: whose ``named_parameters`` are searched.
        patterns: regular expressions.

    Returns:
        The frozen names, in the module's order.

    Raises:
        ValueError: a pattern matches nothing; nothing has been frozen then.
    """
    names = [name for name, _ in module.named_parameters()]
    unmatched = [p for p in patterns if not any(re.search(p, name) for name in names)]
    if unmatched:
        raise ValueError(
            f"the patterns {unmatched} match no parameter; the module has {', '.join(names)}"
        )
    frozen = []
    for name, parameter in module.named_parameters():
        if any(re.search(pattern, name) for pattern in patterns):
            parameter.requires_grad = False
            frozen.append(name)
    return frozen
