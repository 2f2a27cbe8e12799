"""Write docs/reference/results.md from what the benchmarks found last.

python scripts/results_page.py           writes the page
python scripts/results_page.py --check   exits 1 where it is out of date
"""

import ast
import json
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
PAGE = ROOT / "docs" / "reference" / "results.md"

SECTIONS = {
    "Does it learn?": (
        "learn_ppo",
        "learn_sac",
        "learn_dqn",
        "learn_a2c",
        "learn_recurrent",
        "learn_vtrace",
        "learn_rlpd",
        "learn_bc",
        "learn_served",
    ),
    "How fast does it train?": ("speed_ppo", "speed_sac"),
    "What do the wire and the server cost?": ("codec", "echo", "serve", "bridge"),
    "What does a cluster cost?": ("ray_overhead", "weight_sync", "scale_sim"),
}

HEAD = """# Results

What the benchmarks found when they last ran, goals that were missed included. Each is run alone, by
the command above its table, and keeps all its figures in `benchmarks/results/<name>.json`, with the
machine, the commit and the day. The machine is small (two cores that others share, no GPU), so
speeds are ratios to a peer, or to the least that the same work can cost, measured in turns in one
run. *Floor* marks what may not be missed; without it, the wanted figure is a goal. Figures of
learning are mean returns over seeds; `benchmarks/results/<name>/` holds every run's curve."""


def question_of(name: str) -> str:
    """Return the first line of a benchmark's docstring."""
    tree = ast.parse((BENCHMARKS / f"{name}.py").read_text(encoding="utf-8"))
    return (ast.get_docstring(tree) or "").splitlines()[0]


def number(value: float) -> str:
    """Return a figure with as many digits as help."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def section(name: str) -> list[str]:
    """Return the lines of one benchmark."""
    result: dict[str, Any] = json.loads(
        (BENCHMARKS / "results" / f"{name}.json").read_text(encoding="utf-8")
    )
    lines = [
        f"### `{name}`",
        "",
        question_of(name),
        "",
        f"`python benchmarks/{name}.py`, {result['date']}, commit `{result['commit']}`",
        "",
    ]
    if not result["goals"]:
        return [*lines, "It has no goal; its figures are in the file.", ""]
    lines += ["| what | found | wanted | holds |", "|---|---|---|---|"]
    for goal in result["goals"]:
        verdict = "yes" if goal["holds"] else "**no**"
        cells = (goal["what"], number(goal["found"]), goal["wanted"], verdict)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def render() -> str:
    """Return the whole page.

    Raises:
        ValueError: a benchmark has a result and no place on the page.
    """
    placed = {name for names in SECTIONS.values() for name in names}
    kept = {path.stem for path in (BENCHMARKS / "results").glob("*.json")}
    if placed != kept:
        raise ValueError(f"results without a place, or places without: {sorted(placed ^ kept)}")
    lines = [HEAD, ""]
    for title, names in SECTIONS.items():
        lines += [f"## {title}", ""]
        for name in names:
            lines += section(name)
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Write the page, or compare with it."""
    text = render()
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        print("docs/reference/results.md is out of date: python scripts/results_page.py")
        raise SystemExit(1)


if __name__ == "__main__":
    main()
