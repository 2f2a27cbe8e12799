"""What users write against the public names, checked as their type checker checks it."""

import subprocess
import sys
from pathlib import Path

import pytest

API = Path(__file__).with_name("protocol_typing_api.py")
ROOT = next((path for path in API.parents if (path / "constraints.txt").is_file()), None)


@pytest.mark.skipif(ROOT is None, reason="mypy's configuration is the repository's")
def test_code_as_users_write_it_type_checks():
    pytest.importorskip("mypy")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run([*command, str(API)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
