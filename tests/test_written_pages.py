"""Reference pages that scripts write say what their sources say."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("script", ["configuration_page", "results_page"])
def test_a_written_page_is_up_to_date(script):
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / f"{script}.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
