"""Clauses, verdicts and the report that both checkers write."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum


class ViolationError(Exception):
    """A clause was broken.

    Attributes:
        clause: its name.
        found: what was seen, and what was expected instead.
    """

    def __init__(self, clause: str, found: str) -> None:
        super().__init__(clause, found)
        self.clause, self.found = clause, found

    def __str__(self) -> str:
        return f"{self.clause}: {self.found}"


class SkippedError(Exception):
    """A clause could not be tried here; the message says what to pass so that it can."""


class Verdict(Enum):
    """What became of a clause."""

    PASS = "pass"
    FAIL = "FAIL"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Clause:
    """One sentence of the page."""

    name: str
    section: int
    """Section of the page."""
    text: str


@dataclass(slots=True)
class Report:
    """The verdicts of one run, in the order in which clauses were first tried."""

    clauses: dict[str, Clause]
    verdicts: dict[str, tuple[Verdict, str]] = field(default_factory=dict)

    def passed(self, name: str) -> None:
        """Note that a clause held; an earlier failure stands."""
        if name not in self.verdicts or self.verdicts[name][0] is Verdict.SKIP:
            self.verdicts[name] = (Verdict.PASS, "")

    def failed(self, name: str, found: str) -> None:
        """Note that a clause was broken; the first finding stands."""
        if name not in self.verdicts or self.verdicts[name][0] is not Verdict.FAIL:
            self.verdicts[name] = (Verdict.FAIL, found)

    def skipped(self, name: str, reason: str) -> None:
        """Note that a clause was not tried."""
        self.verdicts.setdefault(name, (Verdict.SKIP, reason))

    @property
    def failures(self) -> list[str]:
        """Names of the clauses that were broken."""
        return [name for name, (verdict, _) in self.verdicts.items() if verdict is Verdict.FAIL]

    @property
    def exit_code(self) -> int:
        """0 when nothing was broken and something was tried."""
        tried = any(verdict is Verdict.PASS for verdict, _ in self.verdicts.values())
        return 0 if tried and not self.failures else 1

    def lines(self) -> list[str]:
        """Render the report, one clause a line and a summary."""
        rows = []
        for name, (verdict, found) in self.verdicts.items():
            clause = self.clauses.get(name)
            text = f"{clause.section}: {clause.text}" if clause is not None else ""
            rows.append(f"{verdict.value}  {name:<28} {text}")
            if found:
                rows.append(f"      {found}")
        counts = dict.fromkeys(Verdict, 0)
        for verdict, _ in self.verdicts.values():
            counts[verdict] += 1
        rows.append(
            f"{counts[Verdict.PASS]} passed, {counts[Verdict.FAIL]} failed, "
            f"{counts[Verdict.SKIP]} skipped"
        )
        return rows


def index(clauses: list[Clause]) -> dict[str, Clause]:
    """Make the table of a checker's clauses; names are unique."""
    table = {clause.name: clause for clause in clauses}
    if len(table) != len(clauses):
        raise ValueError("two clauses have one name")
    return table
