"""The typed API of the reference, checked as a user's type checker checks it."""

import pathlib
import subprocess
import sys

import pytest


def test_code_as_users_write_it_type_checks(tmp_path):
    pytest.importorskip("mypy")
    file = pathlib.Path(__file__).with_name("typing_api.py")
    root = next(path for path in file.parents if (path / "constraints.txt").is_file())
    checked = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            str(root / "pyproject.toml"),
            "--cache-dir",
            str(root / ".mypy_cache"),
            str(file),
        ],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
