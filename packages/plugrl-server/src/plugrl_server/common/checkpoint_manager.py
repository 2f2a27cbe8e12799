"""The checkpoints of one run: one directory per step, in rlightning's format.

::

    <checkpoint_dir>/<step>/manifest.json      versions, and size and SHA-256 of every file
    <checkpoint_dir>/<step>/weights.pt         the policy's state dict
    <checkpoint_dir>/<step>/training.pt        optimizers, generators, counters, buffers
    <checkpoint_dir>/<step>/config.yaml        the run's configuration
    <checkpoint_dir>/<step>/model.safetensors  the state dict again, for other tools
    <checkpoint_dir>/<step>.pt                 the same file as weights.pt

Written beside, flushed, renamed; loaded without executing code.
"""

from __future__ import annotations

import errno
import fcntl
import os
import pathlib
import shutil
from typing import TYPE_CHECKING, Any, final

from plugrl_server.common.checkpoint import Checkpoint
from plugrl_server.errors import RunExistsError, RunInUseError

if TYPE_CHECKING:
    from rlightning.checkpoint import Checkpoint as Stored

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "check_run_directory",
    "get_latest_checkpoint_step",
    "load_checkpoint_from_path",
]


_TORCH_CANNOT_WRITE = ("inline_container", "PytorchStreamWriter", "iostream")

_claimed: dict[str, int] = {}
"""Directories that are this process's own, and what holds their locks: kept until it ends."""


@final
class CheckpointManager:
    """Saves and loads the checkpoints of a directory.

    Args:
        checkpoint_dir: the run's directory.
        config: plain data, written into every checkpoint.
        overwrite: remove an earlier run's checkpoints.
        resume: continue an earlier run.
        keep: how many of the newest checkpoints stay; None keeps all.

    Raises:
        RunExistsError: there is an earlier run, and neither was asked for.
        FileNotFoundError: there is nothing to resume; no directory is left behind.
        RunInUseError: another process writes there.
    """

    def __init__(
        self,
        checkpoint_dir: pathlib.Path | str,
        *,
        config: dict[str, Any],
        overwrite: bool,
        resume: bool,
        keep: int | None = None,
    ) -> None:
        self.checkpoint_dir = pathlib.Path(checkpoint_dir)
        self._config = config
        self._keep = keep
        check_run_directory(self.checkpoint_dir, overwrite=overwrite, resume=resume)
        self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        _claim(self.checkpoint_dir)
        if overwrite:
            _empty(self.checkpoint_dir)

    def latest_step(self) -> int:
        """Give the newest step.

        Raises:
            FileNotFoundError: there is none.
        """
        return _latest_step(self.checkpoint_dir)

    def saved_config(self, step: int) -> dict[str, Any]:
        """Give the configuration that a checkpoint was saved with."""
        import yaml

        text = (self.checkpoint_dir / str(step) / "config.yaml").read_text(encoding="utf-8")
        saved: dict[str, Any] = yaml.safe_load(text)
        return saved

    def has_any(self) -> bool:
        """Whether something was saved."""
        return get_latest_checkpoint_step(self.checkpoint_dir) is not None

    def has_step(self, step: int) -> bool:
        """Whether there is a whole checkpoint of a step."""
        return step in _steps(self.checkpoint_dir)

    def save_checkpoint(self, checkpoint: Checkpoint, *, prune: bool = True) -> pathlib.Path:
        """Write a checkpoint, whole or not at all; give its directory.

        The generators of python, numpy and torch go in as they are now, unless the checkpoint
        brings them itself under ``meta["rng"]``.

        Args:
            checkpoint: what to write.
            prune: remove the oldest ones beyond ``keep``.

        Raises:
            OSError: it cannot be written.
        """
        import yaml

        from rlightning.checkpoint import Checkpoint as Stored
        from rlightning.checkpoint import save_checkpoint
        from rlightning.utils.seeding import get_rng_state

        meta = {"rng": get_rng_state(), **checkpoint.meta}
        name = str(checkpoint.step)
        try:
            directory = save_checkpoint(
                self.checkpoint_dir,
                name,
                Stored(
                    policy=str(self._config.get("policy_uid", "")),
                    epoch=checkpoint.step,
                    env_steps=checkpoint.step,
                    weights=checkpoint.model or {},
                    training={
                        "has_model": checkpoint.model is not None,
                        "optimizer": checkpoint.optimizer,
                        "meta": meta,
                    },
                    config_yaml=yaml.safe_dump(self._config, sort_keys=False),
                ),
                write_policy_file=lambda path: _write_model(pathlib.Path(path), checkpoint.model),
            )
        except RuntimeError as error:
            # What torch says where it cannot write.
            if not any(word in str(error) for word in _TORCH_CANNOT_WRITE):
                raise
            raise OSError(errno.EIO, "cannot be written; is the disk full?", name) from error
        if prune:
            self._prune()
        return directory

    def load_checkpoint(self, step: int | None = None) -> Checkpoint:
        """Load a checkpoint of this run; None means the newest.

        Raises:
            FileNotFoundError: there is none.
            CheckpointError: it is damaged.
        """
        step = self.latest_step() if step is None else step
        return load_checkpoint_from_path(self.checkpoint_dir, step)

    def _prune(self) -> None:
        if self._keep is None:
            return
        from rlightning.checkpoint import remove_checkpoint

        steps = _steps(self.checkpoint_dir)
        for step in steps[: max(0, len(steps) - self._keep)]:
            remove_checkpoint(self.checkpoint_dir / str(step))


def check_run_directory(directory: pathlib.Path, *, overwrite: bool, resume: bool) -> None:
    """Refuse a directory in which a run cannot begin, or not go on.

    Raises:
        RunExistsError: there is an earlier run, and neither was asked for.
        FileNotFoundError: there is nothing to resume.
    """
    if resume:
        _latest_step(directory)
    elif directory.is_dir() and any(directory.iterdir()) and not overwrite:
        raise RunExistsError(directory)


def _claim(directory: pathlib.Path) -> None:
    """Make a directory this process's own until it ends, however it ends.

    Raises:
        RunInUseError: it is another's.
    """
    key = str(directory.resolve())
    if key in _claimed:
        return
    opened = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(opened)
        raise RunInUseError(directory) from error
    except OSError:  # a file system without locks
        os.close(opened)
        return
    _claimed[key] = opened


def _empty(directory: pathlib.Path) -> None:
    for entry in directory.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _latest_step(directory: pathlib.Path) -> int:
    step = get_latest_checkpoint_step(directory)
    if step is None:
        raise FileNotFoundError(
            f"there is no checkpoint in {directory} to resume from; start without --resume, or "
            "give the --exp-name, --checkpoint-base-dir and names of the run"
        )
    return step


def _write_model(policy_file: pathlib.Path, model: dict[str, Any] | None) -> None:
    os.link(policy_file.with_name("weights.pt"), policy_file)
    if model:
        from safetensors.torch import save_file

        tensors = {name: tensor.contiguous().clone() for name, tensor in _flat(model).items()}
        save_file(tensors, str(policy_file.with_name("model.safetensors")))


def _flat(model: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Name the tensors of nested state dicts by their paths."""
    flat: dict[str, Any] = {}
    for name, value in model.items():
        inner = isinstance(value, dict)
        flat |= _flat(value, f"{prefix}{name}.") if inner else {f"{prefix}{name}": value}
    return flat


def _steps(directory: pathlib.Path) -> list[int]:
    """List the steps of whole checkpoints, ascending."""
    if not directory.is_dir():
        return []
    from rlightning.checkpoint import list_checkpoints

    return sorted(int(path.name) for path in list_checkpoints(directory) if path.name.isdigit())


def get_latest_checkpoint_step(directory: pathlib.Path | str) -> int | None:
    """Give the newest step in a run's directory; None if there is none."""
    steps = _steps(pathlib.Path(directory))
    return steps[-1] if steps else None


def load_checkpoint_from_path(path: pathlib.Path | str, step: int | None = None) -> Checkpoint:
    """Load a checkpoint; executes no code from it.

    Args:
        path: a checkpoint's directory, or a run's.
        step: which of a run's; None means the newest.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    from rlightning.checkpoint import find_checkpoint, load_checkpoint

    path = pathlib.Path(path)
    stored: Stored = load_checkpoint(find_checkpoint(path if step is None else path / str(step)))
    # A checkpoint of the other half of the house has weights and no server's training state.
    is_ours = "has_model" in stored.training
    has_model = stored.training["has_model"] if is_ours else True
    return Checkpoint(
        step=stored.env_steps,
        model=stored.weights if has_model else None,
        optimizer=stored.training.get("optimizer") if is_ours else None,
        meta=stored.training["meta"] if is_ours else {},
    )
