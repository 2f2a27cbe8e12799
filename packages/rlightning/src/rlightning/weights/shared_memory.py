"""Pieces of shared memory: created by one process, looked at by others, gone when it is.

Whoever creates a piece registers it with Python's resource tracker, which removes it even where the
process was killed. Whoever only looks at one does not (before Python 3.13 the standard library
would remove it for everybody when that process ends). For the case that a tracker was killed along
with its process, as a cluster does with its workers, `sweep` removes what dead processes left: a
family of pieces whose header (``<family>-header``) is gone, or is held by nobody (`hold`), told by
a lock that the kernel drops when its holder ends. Locks are advisory (`flock`), so they end with
their process too.

Linux only: pieces are files in ``/dev/shm``.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pathlib
import time
from multiprocessing import resource_tracker, shared_memory
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "PREFIX",
    "create",
    "discard",
    "exists",
    "hold",
    "locked",
    "look_at",
    "remove",
    "remove_family",
    "sweep",
    "until",
]

PREFIX = "rlightning-w-"
"""How the names of all pieces begin."""

_FOLDER = pathlib.Path("/dev/shm")
_MINUTE = 60.0
_POLL_S = 0.0002
_LONGEST_POLL_S = 0.005


def create(name: str, size_bytes: int) -> None:
    """Make a piece of zeros, at least this large.

    Raises:
        OSError: there is not that much shared memory, or the name exists.
    """
    if not _FOLDER.is_dir():
        raise OSError(f"{_FOLDER} does not exist; weights are shared between processes on Linux")
    free = os.statvfs(_FOLDER)
    if size_bytes > free.f_bavail * free.f_frsize:
        raise OSError(
            f"{size_bytes / 1e6:.0f} MB of weights do not fit into the "
            f"{free.f_bavail * free.f_frsize / 1e6:.0f} MB that {_FOLDER} has left; enlarge it "
            "(docker run --shm-size), or take weight_buffer.buffer_strategy: Double"
        )
    shared_memory.SharedMemory(name, create=True, size=size_bytes).close()


def remove(name: str) -> None:
    """Remove a piece that this process created; who looks at it keeps what it sees."""
    discard(name)
    resource_tracker.unregister(f"/{name}", "shared_memory")


def discard(name: str) -> None:
    """Remove a piece that another process created, where it is still there."""
    (_FOLDER / name).unlink(missing_ok=True)


def remove_family(family: str) -> None:
    """Remove the pieces of a family that other processes created."""
    for piece in _FOLDER.glob(f"{family}-*"):
        discard(piece.name)


def exists(name: str) -> bool:
    """Return whether there is such a piece."""
    return (_FOLDER / name).exists()


def look_at(name: str) -> torch.Tensor:
    """Return the memory of a piece as a uint8 tensor; it lives as long as the tensor.

    Raises:
        FileNotFoundError: it does not exist, or no longer.
    """
    with _opened(name) as file:
        return torch.frombuffer(mmap.mmap(file, 0), dtype=torch.uint8)


def hold(name: str) -> int:
    """Return a descriptor that keeps `sweep` away from a piece until it is closed."""
    file = os.open(_FOLDER / name, os.O_RDWR)
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


@contextlib.contextmanager
def locked(name: str, *, exclusive: bool) -> Iterator[bool]:
    """Try to lock a piece for the length of a ``with`` block; yield whether that went.

    Many may lock it at once, or one exclusively.

    Raises:
        FileNotFoundError: the piece does not exist, or no longer.
    """
    with _opened(name) as file:
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True  # closing the file unlocks it


def sweep() -> None:
    """Remove the pieces of processes that ended without doing so, a minute after they were made."""
    families: dict[str, float] = {}
    for piece in _FOLDER.glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # somebody else was faster
            family = piece.name.rpartition("-")[0]
            families[family] = max(families.get(family, 0.0), piece.stat().st_ctime)
    for family, newest in families.items():
        if time.time() - newest < _MINUTE:
            continue  # its header may not be held yet
        try:
            with locked(f"{family}-header", exclusive=True) as abandoned:
                if abandoned:
                    remove_family(family)
        except FileNotFoundError:
            remove_family(family)
        except PermissionError:  # another user's
            continue


@contextlib.contextmanager
def _opened(name: str) -> Iterator[int]:
    file = os.open(f"{_FOLDER}/{name}", os.O_RDWR)
    try:
        yield file
    finally:
        os.close(file)


def until(timeout_s: float) -> Iterator[None]:
    """Yield at once and then after growing pauses, until the time is over."""
    deadline = time.monotonic() + timeout_s
    pause = _POLL_S
    yield
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, _LONGEST_POLL_S)
        yield
