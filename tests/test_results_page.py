"""The page of results says what the kept results say."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_the_results_page_is_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "results_page.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
