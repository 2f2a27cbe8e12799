"""Print how large the product is, and fail where a file or a function is over its hard cap.

Caps: 600 lines a file, 60 lines a function body (its docstring not counted). A comment
``# size: <reason>`` in a file's first ten lines, or on the line of a ``def``, waives the cap.
"""

from __future__ import annotations

import ast
import pathlib
import statistics
import subprocess
import sys
from typing import NamedTuple

FILE_CAP = 600
FUNCTION_CAP = 60
WAIVER = "# size: "
ROOT = pathlib.Path(__file__).resolve().parent.parent


class Sized(NamedTuple):
    """A file or a function, where it stands and how many lines it has."""

    lines: int
    where: str
    waived: bool


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function's body without its docstring."""
    body = function.body
    if ast.get_docstring(function, clean=False) is not None:
        body = body[1:]
    if not body:
        return 0
    return (body[-1].end_lineno or body[-1].lineno) - body[0].lineno + 1


def measure(path: pathlib.Path) -> tuple[Sized, list[Sized]]:
    """Return the size of one file and of every function in it."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    where = path.relative_to(ROOT).as_posix()
    functions = [
        Sized(
            body_lines(node), f"{where}:{node.lineno} {node.name}", WAIVER in lines[node.lineno - 1]
        )
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    waived = any(WAIVER in line for line in lines[:10])
    return Sized(len(lines), where, waived), functions


def git(*arguments: str) -> str:
    """Return git's output, or an empty string where it fails."""
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()


def lines_added() -> str:
    """Return the lines added under `packages` since the last tag, or since the first commit."""
    base = git("describe", "--tags", "--abbrev=0") or git("rev-list", "--max-parents=0", "HEAD")
    base = base.splitlines()[-1] if base else ""
    changes = git("diff", "--shortstat", base, "HEAD", "--", "packages/*/src/*.py") if base else ""
    return f"since {base[:12]}: {changes}" if changes else "no history to compare with"


def percentile(sizes: list[Sized], share: float) -> int:
    """Return the size below which `share` of the entries lie."""
    ordered = sorted(size.lines for size in sizes)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def report(kind: str, sizes: list[Sized]) -> str:
    """Return one line about `sizes`."""
    longest = max(sizes)
    median = statistics.median_low(size.lines for size in sizes)
    return (
        f"{len(sizes)} {kind}: median {median}, p90 {percentile(sizes, 0.9)}, "
        f"longest {longest.lines} ({longest.where})"
    )


def main() -> int:
    """Print the report; return 1 if a cap is broken without a reason."""
    files: list[Sized] = []
    functions: list[Sized] = []
    for source in sorted(ROOT.glob("packages/*/src")):
        before = len(files)
        for path in sorted(source.rglob("*.py")):
            size, inside = measure(path)
            files.append(size)
            functions += inside
        total = sum(size.lines for size in files[before:])
        print(f"{source.parent.name:20} {len(files) - before:4d} files {total:6d} lines")
    print(f"{'all':20} {len(files):4d} files {sum(size.lines for size in files):6d} lines")
    print(report("files", files))
    print(report("functions", functions))
    print(lines_added())
    over = [size for size in files if size.lines > FILE_CAP and not size.waived]
    over += [size for size in functions if size.lines > FUNCTION_CAP and not size.waived]
    for size in over:
        print(f"over its cap: {size.where}, {size.lines} lines; split it, or say why: {WAIVER}...")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
