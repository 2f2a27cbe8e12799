"""The report that both checkers write."""

import pytest

from plugrl_protocol.conformance.clauses import Clause, Report, Verdict, ViolationError, index

TABLE = index([Clause("one", 1, "first things first"), Clause("two", 2, "then the second")])


def test_the_first_failure_of_a_clause_stands():
    report = Report(TABLE)
    report.passed("one")
    report.failed("one", "it broke")
    report.failed("one", "again")
    report.passed("one")

    assert report.verdicts["one"] == (Verdict.FAIL, "it broke")
    assert report.failures == ["one"]
    assert report.exit_code == 1


def test_a_skip_yields_to_a_verdict_and_never_replaces_one():
    report = Report(TABLE)
    report.skipped("one", "say --flag")
    report.passed("one")
    report.skipped("one", "say --flag")

    assert report.verdicts["one"] == (Verdict.PASS, "")
    assert report.exit_code == 0


def test_a_report_that_tried_nothing_is_no_success():
    report = Report(TABLE)
    report.skipped("one", "say --flag")
    assert report.exit_code == 1
    assert Report(TABLE).exit_code == 1


def test_the_lines_name_clause_section_and_finding():
    report = Report(TABLE)
    report.passed("one")
    report.failed("two", "found this, expected that")
    report.failed("server-gone", "no table entry, still told")

    lines = report.lines()
    assert lines[0].split(maxsplit=2) == ["pass", "one", "1: first things first"]
    assert lines[2].strip() == "found this, expected that"
    assert lines[-1] == "1 passed, 2 failed, 0 skipped"
    assert str(ViolationError("two", "x")) == "two: x"


def test_names_of_clauses_are_unique():
    with pytest.raises(ValueError, match="one name"):
        index([Clause("one", 1, ""), Clause("one", 2, "")])
