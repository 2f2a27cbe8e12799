"""The table of pitfalls is complete, and every test that it names exists."""

import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "pitfalls.md"
NUMBERS = [
    *(1, 3, 5, 7, 9, 10, 12, 14, 15, 16, 18, 19, 20, 22, 23, 25, 27, 29, 30),
    *(31, 32, 34, 35, 37, 39, 40, 42, 43, 45, 47, 49, 50, 51),
    *(52, 54, 55, 57, 58, 60, 61, 62, 64),
    *(65, 66, 68, 69, 70, 72, 73, 75, 76, 77, 78, 79),
    *(98, 100, 101, 102, 103, 104, 106, 107, 108, 110, 111),
]


def rows_of(text):
    """Return number, kind of fault and what holds it, of every row."""
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return [(int(row[0]), row[1], row[2]) for row in cells if row and row[0].isdigit()]


def named_in(cell):
    """Return the (file, test) pairs that a cell names: a file, then tests in it."""
    pairs, file = [], None
    for word in re.findall(r"`([^`]+)`", cell):
        if re.fullmatch(r"test_\w+\.py", word):
            file = word
        elif word.startswith("test_"):
            pairs.append((file, word))
    return pairs


@functools.cache
def defined_tests():
    """Return the names of the tests in every test file, by file name; a list, one set per file."""
    found = {}
    for path in [*ROOT.glob("packages/*/tests/**/test_*.py"), *ROOT.glob("tests/**/test_*.py")]:
        names = re.findall(r"^(?:async )?def (test_\w+)", path.read_text("utf-8"), re.MULTILINE)
        found.setdefault(path.name, []).append(set(names))
    return found


def missing_tests(pairs):
    """Return the pairs for which no single file defines the test."""
    found = defined_tests()
    return [
        (file, test)
        for file, test in pairs
        if len(found.get(file, [])) != 1 or test not in found[file][0]
    ]


ROWS = rows_of(PAGE.read_text("utf-8"))


def test_every_number_stands_in_the_table_once_and_in_order():
    assert [number for number, *_ in ROWS] == NUMBERS


@pytest.mark.parametrize(("number", "kind", "cell"), ROWS, ids=[str(row[0]) for row in ROWS])
def test_the_tests_that_a_row_names_exist(number, kind, cell):
    assert kind
    pairs = named_in(cell)
    assert pairs, f"{number} names no test"
    assert missing_tests(pairs) == []


def test_a_file_or_test_that_does_not_exist_is_noticed():
    here = "test_pitfalls_table.py"
    right, wrong = "test_every_number_stands_in_the_table_once_and_in_order", "test_nothing"
    pairs = named_in(f"`{here}`: `{wrong}`, `{right}`; `test_absent.py`: `test_x`. And words.")
    assert missing_tests(pairs) == [(here, wrong), ("test_absent.py", "test_x")]
