"""Checkpoints: written whole or not at all, loaded without executing code.

A checkpoint called ``epoch_3`` is two things in one folder: ``epoch_3.pt``, the policy's own file
(`BasePolicy.save_checkpoint`, which users override), and the directory ``epoch_3/`` with all that
a resumed run needs::

    epoch_3/manifest.json   versions, counters, and size and SHA-256 of every file
    epoch_3/weights.pt      what actors need (`BasePolicy.export_weights`)
    epoch_3/training.pt     optimizers, generators, counters, environments, buffers
    epoch_3/config.yaml     the run's configuration

Files are written beside, flushed to disk and renamed into place; the directory's rename is what
makes a checkpoint exist. Both sides of the product, in one process and behind a WebSocket, use
this module. It knows nothing about policies.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import pickle
import re
import shutil
import time
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from rlightning.errors import CheckpointError
from rlightning.types import to_device
from rlightning.utils.logger import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "Checkpoint",
    "find_checkpoint",
    "list_checkpoints",
    "load_checkpoint",
    "load_plain",
    "load_weights",
    "prune_checkpoints",
    "remove_checkpoint",
    "save_checkpoint",
    "save_offender",
]

FORMAT = 1
_MANIFEST, _WEIGHTS, _TRAINING, _CONFIG = (
    "manifest.json",
    "weights.pt",
    "training.pt",
    "config.yaml",
)
_ARRAY = "__ndarray__"
_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)
_TRIES = 10
_Content = TypeVar("_Content")
_log = get_logger("checkpoint")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a checkpoint directory holds."""

    policy: str
    """The policy's class, ``module:Name``."""
    epoch: int
    """Epochs completed."""
    env_steps: int
    """Environment steps taken."""
    weights: dict[str, Any]
    """`BasePolicy.export_weights`."""
    training: dict[str, Any]
    """Everything else, by the name of the part that wrote it."""
    config_yaml: str = ""
    """The run's configuration."""


def save_checkpoint(
    folder: pathlib.Path,
    name: str,
    checkpoint: Checkpoint,
    *,
    write_policy_file: Callable[[str], None],
) -> pathlib.Path:
    """Write a checkpoint and return its directory.

    A kill at any instant leaves the checkpoints that existed before loadable.

    Args:
        folder: where checkpoints go.
        name: for example ``"epoch_3"``.
        checkpoint: the content.
        write_policy_file: writes the policy's own file to the path it is given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _tidy(folder)
    beside = folder / f".tmp-{name}-{os.getpid()}"
    beside.mkdir()
    torch.save(_to_plain(checkpoint.weights, "weights"), beside / _WEIGHTS)
    torch.save(_to_plain(checkpoint.training, "training"), beside / _TRAINING)
    (beside / _CONFIG).write_text(checkpoint.config_yaml, encoding="utf-8")
    files = {path.name: _describe(path) for path in sorted(beside.iterdir())}
    manifest = {
        "format": FORMAT,
        "policy": checkpoint.policy,
        "epoch": checkpoint.epoch,
        "env_steps": checkpoint.env_steps,
        "saved_at_ns": time.time_ns(),
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {package: version(package) for package in ("rlightning", "torch", "numpy")},
        "files": files,
    }
    (beside / _MANIFEST).write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    policy_file = beside / f"{name}.pt"
    write_policy_file(str(policy_file))
    if not policy_file.is_file():
        raise CheckpointError(
            f"the policy's save_checkpoint wrote no file to {policy_file}; it must write to the "
            "path it is given"
        )
    for path in beside.iterdir():
        _flush(path)
    policy_file.replace(folder / f"{name}.pt")
    _flush(beside)
    target = folder / name
    _put_in_place(beside, target)
    _flush(folder)
    shutil.rmtree(_old(target), ignore_errors=True)
    return target


def save_offender(path: pathlib.Path, *, name: str, tensor: Any, batch: Any) -> str:
    """Write a tensor that is not finite and the batch it belongs to; return the file's path.

    The file holds plain data and tensors: ``torch.load(path, weights_only=True)`` reads it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {"name": name, "tensor": to_device(tensor, "cpu"), "batch": to_device(batch, "cpu")}, path
    )
    return str(path)


def list_checkpoints(folder: pathlib.Path) -> list[pathlib.Path]:
    """Return the checkpoint directories in `folder` that are whole, the oldest first.

    Age is when they were saved, not their epoch: a run may have been written over or have gone back
    to an earlier checkpoint.
    """
    if not folder.is_dir():
        return []
    for _ in range(_TRIES):
        _recover(folder)
        paths = sorted(folder.iterdir())
        if not any(path.name.startswith(".old-") and _new(path) not in paths for path in paths):
            break  # else a running job is between its two renames
    whole: list[tuple[int, pathlib.Path]] = []
    for path in paths:
        if path.name.startswith(".") or not (_has_parts(path) or _old(path).exists()):
            continue
        try:
            manifest = _read_whole(path, _checked_manifest)
        except CheckpointError as error:
            _log.warning("%s", error)
            continue
        whole.append((manifest["saved_at_ns"], path))
    return [path for _, path in sorted(whole)]


def _has_parts(path: pathlib.Path) -> bool:
    """Tell a checkpoint, whole or not, from another folder such as that of TensorBoard."""
    return any((path / name).is_file() for name in (_MANIFEST, _WEIGHTS, _TRAINING))


def find_checkpoint(where: str | pathlib.Path) -> pathlib.Path:
    """Return the checkpoint directory that `where` means.

    Args:
        where: a checkpoint directory, its ``.pt`` file, a folder of checkpoints, or a run
            directory; of several the newest whole one is taken.

    Raises:
        CheckpointError: there is none.
    """
    where = pathlib.Path(where)
    _recover(where.parent)
    if where.suffix == ".pt" and where.with_suffix("").is_dir():
        where = where.with_suffix("")
    if (where / _MANIFEST).is_file():
        _checked_manifest(where)
        return where
    found = list_checkpoints(where / "checkpoints") or list_checkpoints(where)
    if not found:
        raise CheckpointError(
            f"there is no whole checkpoint in {where}; give a run directory, or a checkpoint such "
            "as runs/PROJECT/NAME/checkpoints/epoch_last"
        )
    return found[-1]


def prune_checkpoints(folder: pathlib.Path, *, keep: int | None) -> None:
    """Remove all but the newest `keep` checkpoints called ``epoch_<n>``; None keeps all."""
    if keep is None:
        return
    numbered = [path for path in list_checkpoints(folder) if re.fullmatch(r"epoch_\d+", path.name)]
    for path in numbered[:-keep]:
        remove_checkpoint(path)


def remove_checkpoint(path: pathlib.Path) -> None:
    """Remove a checkpoint directory and the policy's own file beside it.

    It goes by one rename: a kill leaves no half of it, and the next save clears the rest away.
    """
    gone = path.with_name(f".gone-{path.name}")
    path.rename(gone)
    path.with_name(f"{path.name}.pt").unlink(missing_ok=True)
    shutil.rmtree(gone, ignore_errors=True)


def load_checkpoint(path: str | pathlib.Path) -> Checkpoint:
    """Load a checkpoint directory; executes no code from it.

    Raises:
        CheckpointError: a file is missing, damaged, or holds more than plain data.
    """
    return _read_whole(pathlib.Path(path), _read_checkpoint)


def _read_checkpoint(path: pathlib.Path) -> Checkpoint:
    manifest = _checked_manifest(path)
    return Checkpoint(
        policy=manifest["policy"],
        epoch=int(manifest["epoch"]),
        env_steps=int(manifest["env_steps"]),
        weights=_load(path / _WEIGHTS),
        training=_load(path / _TRAINING),
        config_yaml=(path / _CONFIG).read_text(encoding="utf-8"),
    )


def load_weights(path: str | pathlib.Path) -> dict[str, Any]:
    """Load only the weights of a checkpoint directory; see `load_checkpoint`."""
    return _read_whole(pathlib.Path(path), _read_weights)


def _read_weights(path: pathlib.Path) -> dict[str, Any]:
    _checked_manifest(path)
    weights: dict[str, Any] = _load(path / _WEIGHTS)
    return weights


def load_plain(path: str | pathlib.Path, *, device: str = "cpu") -> Any:
    """Load a file of tensors, numbers, strings and containers; executes no code from it.

    Raises:
        CheckpointError: the file is damaged, or holds more than that.
    """
    try:
        return torch.load(path, map_location=device, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        # What torch says here advises to load without the check; that would run the file's code.
        raise CheckpointError(
            f"{path} cannot be loaded as plain data: it is damaged, or holds objects whose loading "
            "would run code"
        ) from error


def _load(path: pathlib.Path) -> Any:
    return _from_plain(load_plain(path))


def _read_whole(path: pathlib.Path, read: Callable[[pathlib.Path], _Content]) -> _Content:
    """Read a checkpoint directory, again where a running job replaced it meanwhile."""
    for _ in range(_TRIES):
        before = _identity(path)
        try:
            content = read(path)
        except (CheckpointError, FileNotFoundError):
            if _identity(path) == before and not _old(path).exists():
                raise
        else:
            if _identity(path) == before:
                return content
    return read(path)


def _identity(path: pathlib.Path) -> int | None:
    """Tell one directory of a name from the next."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _checked_manifest(path: pathlib.Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has checkpoint format {manifest['format']}; this version reads {FORMAT}"
            )
        int(manifest["epoch"]), int(manifest["saved_at_ns"])
        for name, expected in manifest["files"].items():
            if not (path / name).is_file() or _describe(path / name) != expected:
                raise CheckpointError(f"{path} is damaged: {name} is not what its manifest says")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error
    return manifest


def _describe(path: pathlib.Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"size_bytes": path.stat().st_size, "sha256": digest}


def _flush(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _old(target: pathlib.Path) -> pathlib.Path:
    """Return where a directory waits while another one takes its name."""
    return target.with_name(f".old-{target.name}")


def _new(old: pathlib.Path) -> pathlib.Path:
    """Return the name that an `_old` directory had."""
    return old.with_name(old.name.removeprefix(".old-"))


def _put_in_place(beside: pathlib.Path, target: pathlib.Path) -> None:
    """Rename `beside` to `target`, over an earlier directory of that name."""
    for _ in range(_TRIES):
        if target.exists():
            target.rename(_old(target))
        try:
            beside.rename(target)
        except OSError as error:
            if error.errno not in _OCCUPIED:
                raise
            continue  # a reader saw the gap and put the earlier directory back
        return
    raise CheckpointError(f"{target} cannot be replaced: other processes keep putting it back")


def _recover(folder: pathlib.Path) -> None:
    """Put back a directory whose replacement was killed between two renames."""
    for old in folder.glob(".old-*"):
        target = _new(old)
        if not target.exists():
            try:
                old.rename(target)
            except OSError as error:  # the writer was living, and has put the new one there
                if error.errno not in (errno.ENOENT, *_OCCUPIED):
                    raise


def _tidy(folder: pathlib.Path) -> None:
    """Remove what killed saves left behind."""
    _recover(folder)
    for left in (*folder.glob(".tmp-*"), *folder.glob(".old-*"), *folder.glob(".gone-*")):
        owner = re.fullmatch(r"\.tmp-.*-(\d+)", left.name)
        if owner is None or int(owner[1]) == os.getpid() or not _is_alive(int(owner[1])):
            shutil.rmtree(left, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _to_plain(value: Any, path: str) -> Any:
    """Turn numpy values, which the safe loader refuses, into tensors and numbers.

    Raises:
        CheckpointError: something at `path` is no plain data, and could not be loaded again.
    """
    if isinstance(value, dict):
        return {key: _to_plain(item, f"{path}.{key}") for key, item in value.items()}
    if isinstance(value, torch.Size):
        return value
    if isinstance(value, (list, tuple)):
        items = [_to_plain(item, f"{path}.{index}") for index, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {_ARRAY: torch.from_numpy(np.require(value, requirements=["C", "W"]))}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN:
        return value
    kind = type(value).__name__
    found = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {kind}"
    raise CheckpointError(
        f"{path} is {found}; a checkpoint holds tensors, arrays of numbers, numbers, text and "
        "containers of them, which load without running code"
    )


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_ARRAY}:
            return value[_ARRAY].numpy()
        return {key: _from_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_from_plain(item) for item in value)
    return value
