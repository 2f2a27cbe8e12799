"""The reference page of the configuration is what the models say."""

import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def test_the_configuration_page_is_up_to_date():
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "configuration_page.py", "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
