"""``rlightning list``: the names that a configuration can use."""

from __future__ import annotations

import sys

from rlightning.config.compose import CONFIGS
from rlightning.utils.registry import BUFFERS, ENGINE, ENVS, POLICIES

__all__ = ["list_names"]


def list_names(kind: str | None) -> None:
    """Print all names, or those of one kind."""
    names = {
        "policies": POLICIES.names(),
        "envs": ENVS.names(),
        "buffers": BUFFERS.names(),
        "engines": ENGINE.names(),
        "configs": sorted(path.stem for path in CONFIGS.glob("*.yaml")),
    }
    for name, known in names.items():
        if kind in (None, name):
            sys.stdout.write(f"{name}\n" + "".join(f"  {item}\n" for item in known))
