"""``rlightning new``: a project folder with a working policy to change."""

from __future__ import annotations

import pathlib
import shlex
import shutil
import sys

from rlightning.errors import RunDirectoryError

__all__ = ["new_project"]

_TEMPLATE = pathlib.Path(__file__).parent.parent / "templates" / "algorithm"


def new_project(folder: str) -> None:
    """Copy the algorithm template to `folder`.

    Raises:
        RunDirectoryError: it exists, or cannot be made.
    """
    target = pathlib.Path(folder)
    if target.exists():
        raise RunDirectoryError(f"{target} exists and stays as it is; choose another name")
    try:
        shutil.copytree(_TEMPLATE, target, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        raise RunDirectoryError(f"{target} cannot be made: {error}") from error
    files = sorted(path.relative_to(target) for path in target.rglob("*") if path.is_file())
    sys.stdout.write(f"{target} now holds\n" + "".join(f"  {path}\n" for path in files))
    sys.stdout.write(
        f"next:\n  cd {shlex.quote(folder)} && python train.py --config-name train_cartpole\n"
    )
