"""What every benchmark shares: where it ran, at which commit, and how a result is kept."""

import json
import os
import pathlib
import platform
import subprocess
import sys
import time

import numpy as np

RESULTS = pathlib.Path(__file__).parent / "results"


def commit() -> str:
    """Return the commit of the code under test, marked where files but results differ from it."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        root = pathlib.Path(__file__).parent.parent
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    others = (":!benchmarks/results", ":!docs/reference/results.md")
    is_dirty = git("status", "--porcelain", "--untracked-files=no", "--", ".", *others)
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("-dirty" if is_dirty else "")


def machine() -> dict:
    """Return what the numbers depend on."""
    return {
        "cpus": os.cpu_count(),
        "processor": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def over_seeds(returns: list[float]) -> dict:
    """Return the mean over seeds and, of several, the interquartile mean and its interval.

    The interval is the percentile-bootstrap 95 % interval of the interquartile mean, resampled over
    seeds (Agarwal et al. 2021); with fewer than four seeds nothing is cut off and it is the mean's.
    """
    from rlightning.engine.evaluation import bootstrap_interval, interquartile_mean

    values = np.asarray(returns, dtype=np.float64)
    summary: dict = {"mean": round(float(values.mean()), 1)}
    if len(values) > 1:
        summary["iqm"] = round(float(interquartile_mean(values[None])[0]), 1)
        interval = bootstrap_interval(values, interquartile_mean)
        summary["iqm_interval_95"] = [round(bound, 1) for bound in interval]
    return summary


def spread(row: dict) -> str:
    """Return the interquartile mean of a row of `over_seeds` with its interval, for a table."""
    if "iqm" not in row:
        return "one seed"
    low, high = row["iqm_interval_95"]
    return f"{row['iqm']:.1f} [{low:.1f}, {high:.1f}]"


def seeds(row: dict) -> str:
    """Return how many seeds stand behind a row, for a goal."""
    count = len(row["seeds"])
    return "one seed" if count == 1 else f"{count} seeds"


def goal(
    what: str, found: float, *, at_least: float | None = None, at_most: float | None = None
) -> dict:
    """Return a goal as results keep it: what was found, what was wanted, and whether that holds."""
    if (at_least is None) == (at_most is None):
        raise ValueError("a goal is either at_least or at_most something")
    wanted = f"at most {at_most:g}" if at_least is None else f"at least {at_least:g}"
    holds = found <= at_most if at_least is None else found >= at_least
    return {"what": what, "found": round(float(found), 3), "wanted": wanted, "holds": bool(holds)}


def write_result(name: str, figures: object, goals: list[dict], **further: object) -> pathlib.Path:
    """Print whether goals hold; write ``results/<name>.json``, with command, machine and commit.

    ``python scripts/results_page.py`` then brings docs/reference/results.md up to date.
    """
    for each in goals:
        verdict = "holds" if each["holds"] else "FAILS"
        print(f"{verdict}  {each['what']}: {each['found']:g}, {each['wanted']}")
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {
        "figures": figures,
        "goals": goals,
        **further,
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path
