"""What every benchmark shares: where it ran, at which commit, and how a result is kept."""

import json
import os
import pathlib
import platform
import subprocess
import sys
import time

RESULTS = pathlib.Path(__file__).parent / "results"


def commit() -> str:
    """Return the commit of the code under test, marked where files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"],
        cwd=pathlib.Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or "unknown"


def machine() -> dict:
    """Return what the numbers depend on."""
    return {
        "cpus": os.cpu_count(),
        "processor": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def write_result(name: str, figures: object, **further: object) -> pathlib.Path:
    """Write ``results/<name>.json`` with figures, goals, command, machine and commit."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {
        "figures": figures,
        **further,
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
