"""`metrics.jsonl` and `metrics.csv`: a run's numbers where any tool can read them.

One row per stream and environment step. A stream is a metric prefix ("train", "eval"); within a
stream `env_step` strictly increases, also over a resume. The JSON file is complete after every row;
the CSV file lacks each stream's newest row until the stream moves on or the run ends.
Knows nothing about backends or clocks.
"""

from __future__ import annotations

import csv
import json
import os
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["AXES", "MetricsFiles", "read_rows"]

AXES = ("stream", "env_step", "epoch", "wall_s")
"""The columns that every row has: what was logged, and when on each axis."""

Row = dict[str, Any]


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a `metrics.jsonl`; a last line cut off by a kill is left out.

    Raises:
        ValueError: a complete line is not JSON.
    """
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
    return rows


@final
class MetricsFiles:
    """The two files of one run directory.

    The directory is created, and an earlier run's files set aside as ``metrics-<n>.*``, with the
    first row; `resume` keeps them instead.

    Args:
        run_dir: where the files live.
    """

    def __init__(self, run_dir: Path) -> None:
        self.jsonl_path = run_dir / "metrics.jsonl"
        self._csv = _GrowingCsv(run_dir / "metrics.csv")
        self._started = False
        self._newest: dict[str, Row] = {}  # by stream; not in the CSV file yet
        self._offset: dict[str, int] = {}  # by stream: where its newest line starts

    def resume(self, env_step: int) -> float:
        """Continue the files of an earlier run: rows after `env_step` are removed.

        They came after the checkpoint that the run resumes from and will be produced again.

        Returns:
            The wall-clock seconds of the last row that stays; 0 if there is none.
        """
        rows = read_rows(self.jsonl_path) if self.jsonl_path.exists() else []
        kept = [row for row in rows if row["env_step"] <= env_step]
        self._start(kept)
        return max((float(row["wall_s"]) for row in kept), default=0.0)

    def write(self, row: Row) -> Row:
        """Append `row`; one for the stream's newest step or an older one is merged into the newest.

        Returns:
            The row as it stands in the file.
        """
        if not self._started:
            self._set_aside()
            self._start([])
        stream = row["stream"]
        newest = self._newest.get(stream)
        if newest is not None and row["env_step"] <= newest["env_step"]:
            merged = newest | {key: value for key, value in row.items() if key not in AXES}
            self._replace(stream, merged)
            return merged
        if newest is not None:
            self._csv.append(newest)
        self._newest[stream] = row
        with self.jsonl_path.open("ab") as file:
            self._offset[stream] = file.tell()
            file.write(_encode(row))
        return row

    def close(self) -> None:
        """Complete the CSV file; later rows need a `resume`."""
        for row in self._newest.values():
            self._csv.append(row)
        self._newest.clear()
        self._offset.clear()

    def _start(self, rows: list[Row]) -> None:
        self.jsonl_path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.jsonl_path.with_suffix(".jsonl.tmp")
        temporary.write_bytes(b"".join(map(_encode, rows)))
        os.replace(temporary, self.jsonl_path)
        offset = 0
        for row in rows:
            self._newest[row["stream"]] = row
            self._offset[row["stream"]] = offset
            offset += len(_encode(row))
        self._csv.start([row for row in rows if row is not self._newest[row["stream"]]])
        self._started = True

    def _replace(self, stream: str, row: Row) -> None:
        """Rewrite the newest line of `stream`; the few lines after it move."""
        start = self._offset[stream]
        with self.jsonl_path.open("r+b") as file:
            file.seek(start)
            old = file.readline()
            rest = file.read()
            file.seek(start)
            file.write(_encode(row) + rest)
            file.truncate()
        grown = len(_encode(row)) - len(old)
        for other, offset in self._offset.items():
            self._offset[other] = offset + grown if offset > start else offset
        self._newest[stream] = row

    def _set_aside(self) -> None:
        paths = (self.jsonl_path, self._csv.path)
        number = 1
        while any(_numbered(path, number).exists() for path in paths):
            number += 1
        for path in paths:
            if path.exists():
                path.rename(_numbered(path, number))


@final
class _GrowingCsv:
    """A CSV file whose header grows: a new column is empty in the rows before it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns = list(AXES)

    def start(self, rows: list[Row]) -> None:
        self._columns = list(dict.fromkeys([*AXES, *(key for row in rows for key in row)]))
        temporary = self.path.with_suffix(".csv.tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(temporary, self.path)

    def append(self, row: Row) -> None:
        if not row.keys() <= set(self._columns):
            with self.path.open(newline="", encoding="utf-8") as file:
                earlier: list[Row] = list(csv.DictReader(file))
            self.start([*earlier, row])
            return
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)


def _encode(row: Row) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}-{number}{path.suffix}")
