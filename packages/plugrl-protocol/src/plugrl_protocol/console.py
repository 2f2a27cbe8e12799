"""What every command of the project does where its output is cut off. Needs nothing."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_LEFT: Final = 141


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the process quietly where nobody reads on, as behind ``| head -1``.

    For blocks that print and open no sockets, whose broken pipes would be taken for the reader's.

    Raises:
        SystemExit: with 141, what a shell says of a program that such a pipe has ended.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # What is still in the buffer is flushed when the process ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(_LEFT) from None
