"""A picture of a run: return against environment steps, drawn from `metrics.jsonl`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlightning.utils.logger.files import read_rows

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["write_curve"]


def write_curve(run_dir: Path, *, metric: str = "episode_return") -> Path | None:
    """Draw ``<run_dir>/curve.png``: one line per stream that recorded `metric`, and per task of it.

    Args:
        run_dir: the folder with `metrics.jsonl`.
        metric: the name after the prefix.

    Returns:
        The picture's path; None if nothing recorded the metric.
    """
    lines: dict[str, tuple[list[int], list[float]]] = {}
    path = run_dir / "metrics.jsonl"
    for row in read_rows(path) if path.exists() else []:
        stream = f"{row['stream']}/"
        for key in row:
            if key.startswith(stream) and key.endswith(f"/{metric}"):
                steps, values = lines.setdefault(key, ([], []))
                steps.append(row["env_step"])
                values.append(row[key])
    if not lines:
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # half a second to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(xlabel="environment steps", ylabel=metric.replace("_", " "))
    for key, (steps, values) in lines.items():
        axes.plot(steps, values, label=key, marker="." if len(steps) < 30 else "")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    picture = run_dir / "curve.png"
    figure.savefig(picture, dpi=120)
    return picture
