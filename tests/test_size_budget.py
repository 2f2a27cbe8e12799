"""The size budget counts what it says it counts, and fails where a cap is broken unexplained."""

import importlib.util
import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture
def budget(tmp_path, monkeypatch):
    """The script, looking at a repository with one distribution in a temporary folder."""
    path = ROOT / "scripts" / "size_budget.py"
    spec = importlib.util.spec_from_file_location("size_budget", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    source = tmp_path / "packages" / "one" / "src"
    source.mkdir(parents=True)
    module.write = lambda text: (source / "part.py").write_text(text)
    return module


def function(lines, comment=""):
    body = "".join(f"    x{n} = {n}\n" for n in range(lines))
    return f'def f():{comment}\n    """Say\n\n    more.\n    """\n{body}'


@pytest.mark.parametrize(("lines", "code"), [(60, 0), (61, 1)])
def test_a_function_may_have_sixty_lines_beside_its_docstring(budget, lines, code, capsys):
    budget.write(function(lines))
    assert budget.main() == code
    assert f"longest {lines} (packages/one/src/part.py:1 f)" in capsys.readouterr().out


def test_a_reason_waives_the_cap_of_a_function(budget):
    budget.write(function(80, "  # size: one formula"))
    assert budget.main() == 0


@pytest.mark.parametrize(
    ("lines", "reason", "code"), [(600, "", 0), (601, "", 1), (601, "a table", 0)]
)
def test_a_file_may_have_six_hundred_lines_or_a_reason(budget, lines, reason, code, capsys):
    waiver = f"# size: {reason}\n" if reason else "\n"
    budget.write(waiver + "def g(): ...\n" + "\n" * (lines - 2))
    assert budget.main() == code
    assert ("over its cap" in capsys.readouterr().out) == bool(code)


def test_the_real_tree_is_within_its_caps(budget, monkeypatch, capsys):
    monkeypatch.setattr(budget, "ROOT", ROOT)
    assert budget.main() == 0, capsys.readouterr().out
